"""One run on many hosts: the flags that name them, clusters that JAX finds by itself, and who may print.

Start the same command on every host, with `--coordinator=HOST:PORT --num_processes=N --process_id=I` where the
coordinator is process 0. Under SLURM (`srun`), Open MPI (`mpirun`) and on slices of Cloud TPUs no flag is needed;
`--coordinator=auto` asks JAX to find any other cluster that it knows.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
from jax._src import distributed  # the key-value store that JAX's processes share has no public name

from xformer.schema import ConfigError

FLAGS = ("coordinator", "num_processes", "process_id")
CHOICES = "xformer.attention.kernels.choice"  # the logger that says what runs; its lines are shown, warnings or not
ALIVE = "xformer/alive"
BEAT = 1.0  # seconds between two signs of life of a process
LOST_AFTER = 30  # beats without a sign of life; JAX itself would wait for longer than this takes


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `start` reads."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="run on many hosts: address of process 0, the same for all; auto: let JAX find the cluster",
    )
    parser.add_argument("--num_processes", metavar="N", help="how many processes there are in all")
    parser.add_argument("--process_id", metavar="I", help="which of them this one is, from 0")


def start(args: argparse.Namespace) -> None:
    """Joins the processes of the run, if there are several; before any other use of JAX's devices.

    All but process 0 keep silent from here on, except for their own failures.

    Raises:
      ConfigError: flags that are wrong or do not go together, or a cluster that can't be joined.
    """
    arguments = read_flags(args)
    if arguments is None and (arguments := cluster(os.environ)) is None:
        return
    try:
        # The others wait at the end for process 0, which may have a report to write. Lost ones are found by
        # `_watch_others`; what JAX takes for a loss may be a machine that was suspended for a while.
        jax.distributed.initialize(**arguments, shutdown_timeout_seconds=3600, heartbeat_timeout_seconds=600)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise ConfigError(f"--coordinator: the processes can't be joined: {' '.join(str(error).split())}") from error
    if joined():
        _watch_others()
        # Native code (Gloo) tells of its connections on stdout, which is for results.
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    if not is_main():
        for name in (None, CHOICES):
            logging.getLogger(name).setLevel(logging.ERROR)


def _watch_others() -> None:
    """Ends this process, in one line, when another is gone: left alone it would wait for ever in a collective.

    Each process counts up in a thread, so that one that computes or waits for long is still seen to be alive, and
    process 0 reads what they count: when it leaves, JAX ends the others. What stops them all alike, such as a suspended
    machine, is no loss: beats are counted, not seconds.
    """
    client: Any = distributed.global_state.client
    me, count = jax.process_index(), jax.process_count()

    def watch() -> None:
        beat, silent, seen = 0, [0] * count, dict[int, str]()
        while True:
            time.sleep(BEAT)
            beat += 1
            try:
                client.key_value_set(f"{ALIVE}/{me}", str(beat), allow_overwrite=True)
                if me != 0:
                    continue
                found = {int(key.rpartition("/")[2]): value for key, value in client.key_value_dir_get(ALIVE)}
            except jax.errors.JaxRuntimeError:
                time.sleep(10)  # at the end of a run process 0 may leave first
                if threading.main_thread().is_alive():
                    _stop_alone("process 0 can't be reached")
                return
            for other in range(count):
                silent[other] = silent[other] + 1 if found.get(other) == seen.get(other) else 0
                if silent[other] > LOST_AFTER:
                    _stop_alone(f"process {other} is gone")
            seen = found

    threading.Thread(target=watch, name="xformer-watch", daemon=True).start()
    _at_abort(lambda: _stop_alone("JAX gave up, most likely because another process is gone"))


def _stop_alone(reason: str) -> NoReturn:
    """Says why this process can't go on, and ends it at once: JAX's own way out waits for the others."""
    line = f"error: {prefix()}{reason}; start them all again: the run goes on from its last checkpoint"
    print(line, file=sys.stderr, flush=True)
    os._exit(1)


def _at_abort(act: Any) -> None:
    """Calls `act` when native code aborts, as JAX does without process 0; Python's own handlers would come too late."""
    global _keep_alive
    _keep_alive = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: act())
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _keep_alive)


_keep_alive: Any = None


def read_flags(args: argparse.Namespace) -> dict | None:
    """Arguments for `jax.distributed.initialize`; None where no flag is given."""
    given = {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    if not given:
        return None
    coordinator, *numbers = FLAGS
    address = given.get(coordinator, "")
    if address == "auto":
        if len(given) > 1:
            raise ConfigError(f"--coordinator: auto finds the others by itself, got also --{list(given)[1]}")
        return {}
    for name in FLAGS:
        if name not in given:
            raise ConfigError(f"--{name}: missing; --coordinator, --num_processes and --process_id go together")
    match = re.fullmatch(r"(?:[^\s:]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", address)
    if match is None or not 0 < int(match[1]) < 2**16:
        raise ConfigError(f"--coordinator: got {address!r}, takes HOST:PORT of process 0, or auto")
    count, index = (_integer(name, given[name]) for name in numbers)
    if count < 1:
        raise ConfigError(f"--num_processes: got {count}, takes an integer of at least 1")
    if not 0 <= index < count:
        raise ConfigError(f"--process_id: got {index}, takes an integer from 0 to {count - 1} (--num_processes - 1)")
    return {"coordinator_address": address, "num_processes": count, "process_id": index}


def _integer(name: str, text: str) -> int:
    if re.fullmatch(r"-?\d{1,9}", text) is None:
        raise ConfigError(f"--{name}: got {text!r}, takes an integer")
    return int(text)


def cluster(environment: Mapping[str, str]) -> dict | None:
    """`{}`, for JAX to find out the rest, where the environment is that of one of several processes; else None."""
    sizes = (
        environment.get("SLURM_NTASKS", "1") if "SLURM_STEP_NODELIST" in environment else "1",  # set by srun alone
        environment.get("OMPI_COMM_WORLD_SIZE", "1") if "OMPI_MCA_orte_hnp_uri" in environment else "1",
    )
    workers = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    return {} if any(size != "1" for size in sizes) or "," in workers else None


def joined() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_main() -> bool:
    """Whether this process is the one that prints."""
    return not joined() or jax.process_index() == 0


def prefix() -> str:
    """What tells this process's own failures from those of others."""
    return f"process {jax.process_index()}: " if joined() else ""


def leave() -> None:
    """Waits until the other processes end too."""
    if joined():
        jax.distributed.shutdown()
