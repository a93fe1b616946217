"""Worker processes on this machine: each has its share of the cores, and no more run at once than memory holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from xformer.bench import memory
from xformer.commands import cli, memory_plan, start
from xformer.commands.comparison_plan import Planned
from xformer.commands.launchers.interface import SAVING, failed, lost
from xformer.commands.worker import INTERRUPTED, Job
from xformer.schema import ConfigError
from xformer.train import workdir as folders

START = "from xformer.commands import start; start.run('worker')"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
SPARE = 0.1  # of the free memory, which no run gets


@dataclasses.dataclass
class Worker:
    """One process: the slot whose cores it has, the bytes that it may take, where its outcome and its log go."""

    process: subprocess.Popen[bytes]
    slot: int
    memory: int
    outcome: Path
    log: Path


class Local:
    """At most so many worker processes at once, each with its own share of this machine's cores.

    A run starts when its planned memory is left: what this process has taken, as a worker imports and reads the same,
    and the estimate of its training step. One that is alone always starts.

    Raises:
      ConfigError: more workers than cores, a machine whose device is no CPU, or a system other than Linux.
    """

    tries = 3
    threads: int | None = None  # by affinity, which XLA looks at

    def __init__(self, workers: int, folder: Path) -> None:
        if not hasattr(os, "sched_getaffinity"):
            raise ConfigError(
                f"--workers: got {workers} on {sys.platform}; workers share out cores as Linux alone can; takes "
                "--launcher=ray there"
            )
        cores = sorted(os.sched_getaffinity(0))
        if not 1 <= workers <= len(cores):
            raise ConfigError(
                f"--workers: got {workers}, takes an integer from 1 to {len(cores)}, the cores it may use"
            )
        if (backend := jax.default_backend()) != "cpu":
            raise ConfigError(
                f"--workers: runs of this machine compute on its {backend}, and workers share out CPU cores; takes "
                "JAX_PLATFORMS=cpu, or --launcher=ray, which gives each run a device of its own"
            )
        self.cores = [
            cores[slot * len(cores) // workers : (slot + 1) * len(cores) // workers] for slot in range(workers)
        ]
        self._folder = folder
        self._running: list[Worker] = []
        self._needs: dict[tuple[str, str, str], int] = {}
        self._room: float = math.inf

    def plan(self, runs: Sequence[Planned], data_dir: str | None) -> None:
        steps = {key: memory_plan.of_run(run, data_dir) for run in runs if (key := _key(run)) not in self._needs}
        base = memory.peak()
        self._needs |= {key: base + step for key, step in steps.items()}
        free = memory_plan.available()
        self._room = math.inf if free is None else (1 - SPARE) * free
        if steps and (most := max(self._needs.values())) * len(self.cores) > self._room:
            cli.say(f"runs need up to {most / 2**30:.1f} GiB each, {self._room / 2**30:.1f} GiB are left: "
                    f"fewer than {len(self.cores)} may run at once")  # fmt: skip

    def start(self, run: Planned, job: Job, alone: bool = False) -> Worker | None:
        taken = {worker.slot for worker in self._running}
        slot = next((slot for slot in range(len(self.cores)) if slot not in taken), None)
        needed = self._needs.get(_key(run), 0)
        needed = max(needed, math.ceil(self._room)) if alone and self._room < math.inf else needed
        used = sum(worker.memory for worker in self._running)
        if slot is None or (self._running and (alone or used + needed > self._room)):
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        files = {kind: self._folder / f"{job.name}.{kind}" for kind in ("json", "outcome", "log")}
        files["outcome"].unlink(missing_ok=True)
        folders.write_json(files["json"], dataclasses.asdict(job))
        cores = self.cores[slot]
        # A worker can be told to end from its first moment: what comes before it listens waits. See `start.run`.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, start.SIGNALS)
        try:
            with files["log"].open("a") as log:
                process = subprocess.Popen(
                    [sys.executable, "-c", START, str(files["json"]), str(files["outcome"]), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | {name: str(len(cores)) for name in THREADS},
                    start_new_session=True,  # Ctrl-C in the terminal is for the parent, which asks its workers to save
                )
            worker = Worker(process, slot, needed, files["outcome"], files["log"])
            self._running.append(worker)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.sched_setaffinity(process.pid, cores)
        return worker

    def poll(self, handle: Worker) -> dict[str, Any] | None:
        code = handle.process.poll()
        if code is None:
            return None
        if handle in self._running:
            self._running.remove(handle)
        try:
            return json.loads(handle.outcome.read_text())
        except (OSError, ValueError):
            pass
        lines = handle.log.read_text(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        if code < 0:
            return lost(f"its worker was ended by {signal.Signals(-code).name}; log: {handle.log}")
        if code == start.RESUMABLE:
            return {"outcome": INTERRUPTED, "message": "its worker was told to end before it had begun"}
        return failed(f"its worker ended with exit code {code}: {last.removeprefix('error: ')}; log: {handle.log}")

    def stop(self, handles: Sequence[Worker]) -> None:
        # A signal that came while `start` was at work has kept it from giving out a worker that had begun.
        handles = [*handles, *(worker for worker in self._running if worker not in handles)]
        for worker in handles:
            worker.process.terminate()
        deadline = time.monotonic() + SAVING
        try:
            for worker in handles:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(deadline - time.monotonic(), 0.1))
        finally:  # out of patience, or the second Ctrl-C
            for worker in handles:
                worker.process.kill()
                worker.process.wait()


def _key(run: Planned) -> tuple[str, str, str]:
    """The same for runs that need the same memory."""
    return run.task, run.role, run.cost_key
