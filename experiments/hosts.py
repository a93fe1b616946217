"""One run on many hosts: the flags that name them, clusters that JAX finds by itself, and who may print.

Start the same command on every host, with `--coordinator=HOST:PORT --num_processes=N --process_id=I` where the
coordinator is process 0. Under SLURM (`srun`), Open MPI (`mpirun`) and on slices of Cloud TPUs no flag is needed;
`--coordinator=auto` asks JAX to find any other cluster that it knows.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Mapping

import jax

from xformer.schema import ConfigError

FLAGS = ("coordinator", "num_processes", "process_id")


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
        # The others wait at the end for process 0, which may have a report to write.
        jax.distributed.initialize(**arguments, shutdown_timeout_seconds=3600)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise ConfigError(f"--coordinator: the processes can't be joined: {' '.join(str(error).split())}") from error
    if not is_main():
        logging.getLogger().setLevel(logging.ERROR)


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
