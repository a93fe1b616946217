"""SLURM, through submitit: each run is a job of the queue, which logs it and queues it again at a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xformer import extras
from xformer.checks import did_you_mean
from xformer.commands import worker
from xformer.commands.comparison_plan import Planned
from xformer.commands.launchers.interface import SAVING, failed, lost
from xformer.schema import ConfigError

submitit = extras.Lazy("submitit")
CLUSTERS = ("slurm", "local")
LOGGING = "SUBMITIT_LOG_LEVEL"
SHARED = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node", "stderr_to_stdout")  # of every cluster
ONE = ("nodes", "tasks_per_node")  # a run is one process


class Resumable:
    """`worker.execute` as submitit calls it; at a time limit or a preemption the same job is queued again."""

    def __call__(self, job: Mapping[str, Any]) -> dict[str, Any]:
        return worker.execute(job)

    def checkpoint(self, job: Mapping[str, Any]) -> Any:
        """What submitit queues instead: the run goes on from its last checkpoint."""
        return submitit.helpers.DelayedSubmission(self, job)


class OnSlurm:
    """Jobs that submitit sends to SLURM, or with `cluster=local` to processes on this machine.

    Args:
      folder: where submitit keeps jobs and their logs.
      resources: parameters of submitit's AutoExecutor, such as `timeout_min`, `cpus_per_task`, `slurm_partition`.
      most: at most so many jobs at once; None: all of them.

    Raises:
      MissingExtra: submitit is not installed.
      ConfigError: a parameter that submitit does not take, or no SLURM here.
    """

    tries = 3  # SLURM queues again what lost its node, not what was killed

    def __init__(self, folder: Path, resources: Mapping[str, Any], most: int | None = None) -> None:
        _import_quietly()
        parameters = dict(resources)
        cluster = parameters.pop("cluster", "slurm")
        if cluster not in CLUSTERS:
            raise ConfigError(f"--resources: got cluster={cluster!r}, takes one of {', '.join(CLUSTERS)}")
        if "timeout_min" not in parameters:
            raise ConfigError("--resources: timeout_min is missing; takes timeout_min=MINUTES, what a run may take")
        for name in ONE:
            if parameters.get(name, 1) != 1:
                raise ConfigError(f"--resources: got {name}={parameters[name]!r}, takes 1: a run is one process")
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(**parameters)
        except (AssertionError, NameError, RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(_refusal(parameters, " ".join(str(error).split()))) from error
        self.threads: int | None = parameters.get("cpus_per_task")
        self._most, self._running = most, list[Any]()

    def plan(self, runs: Sequence[Planned], data_dir: str | None) -> None:
        pass

    def start(self, run: Planned, job: worker.Job, alone: bool = False) -> Any:
        if self._most is not None and len(self._running) >= self._most:
            return None
        self._executor.update_parameters(name=job.name)
        handle = self._executor.submit(Resumable(), dataclasses.asdict(job))
        self._running.append(handle)
        return handle

    def poll(self, handle: Any) -> dict[str, Any] | None:
        if not handle.done():
            return None
        self._running = [job for job in self._running if job is not handle]
        try:
            return handle.result()
        except submitit.core.utils.FailedJobError as error:  # raised before the run began
            last = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
            return failed(f"{last}; log: {handle.paths.stderr}")
        except submitit.core.utils.UncompletedJobError:
            return lost(f"its job ended without a result, in state {handle.state}; log: {handle.paths.stderr}")

    def stop(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            with contextlib.suppress(OSError, RuntimeError):
                handle.cancel(check=False)  # SLURM sends SIGTERM first: a run saves
        deadline = time.monotonic() + SAVING
        while not all(handle.done() for handle in handles) and time.monotonic() < deadline:
            time.sleep(0.5)


def _refusal(parameters: Mapping[str, Any], message: str) -> str:
    """What submitit refuses, in the words of the flag."""
    if found := re.search(r"[Pp]arameter '([^']+)'", message):
        given, near = found[1], did_you_mean(found[1], (*SHARED, "slurm_partition"))
        return (
            f"--resources: got {given}={parameters.get(given)!r}, takes {', '.join(SHARED)}, and SLURM's own as "
            f"slurm_KEY, such as slurm_partition{near}"
        )
    if found := re.match(r"Parameter \"(\w+)\" expected type <class '(\w+)'>", message):
        return f"--resources: got {found[1]}={parameters.get(found[1])!r}, takes {found[1]} of type {found[2]}"
    return f"--launcher: submitit refuses: {message}"


def _import_quietly() -> None:
    """Imports submitit, which would close this process's log handlers to configure its own; jobs have those."""
    given = os.environ.get(LOGGING)
    os.environ[LOGGING] = "NOCONFIG"
    try:
        extras.load("submitit")
    finally:
        if given is None:
            del os.environ[LOGGING]
        else:
            os.environ[LOGGING] = given
