"""Trains the runs of a comparison through a launcher: each once, from its checkpoint on where a worker is lost."""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xformer.commands import cli, hosts
from xformer.commands.comparison_plan import Planned
from xformer.commands.comparison_runs import FAILED, FINISHED, STOPPED, fail, interrupted, what
from xformer.commands.launchers.interface import Launcher
from xformer.commands.launchers.local import Local
from xformer.commands.launchers.on_ray import OnRay
from xformer.commands.launchers.on_slurm import OnSlurm
from xformer.commands.worker import CHANGED, LOST, describe
from xformer.schema import ConfigError, Text
from xformer.train import DataChanged
from xformer.train.progress import clock

FOLDER = "jobs"  # of a comparison's workdir: what was launched, and its logs
POLL = 0.2  # seconds between two looks at what runs
LAUNCHERS = ("local", "ray", "slurm")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `launcher` reads."""
    parser.add_argument("--workers", metavar="N", help="how many runs at once; with the local launcher, processes")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="what starts the runs (default: this process, in turn)")
    parser.add_argument(
        "--resources",
        metavar="KEY=VALUE,...",
        help="of each run: num_cpus, num_gpus, memory or a custom one for ray; parameters of submitit for slurm",
    )


def launcher(args: argparse.Namespace, workdir: Path) -> Launcher | None:
    """What the flags name; None where the runs are trained in this process, one after the other.

    Raises:
      ConfigError: flags that are wrong or do not go together.
      MissingExtra: the launcher's package is not installed.
    """
    workers, resources = _workers(args.workers), _resources(args.resources)
    given = next((flag for flag in ("launcher", "workers", "resources") if getattr(args, flag) is not None), None)
    if given is None:
        return None
    for other in ("report_only", "dry_run"):
        if getattr(args, other):
            raise ConfigError(f"--{given}: got --{other} too, which trains nothing; takes one of them")
    if hosts.joined():
        raise ConfigError(f"--{given}: got {hosts.FLAGS[0]} or a cluster too; each run that is launched is one process")
    if args.launcher == "ray":
        return OnRay(resources, workers)
    if args.launcher == "slurm":
        return OnSlurm(workdir / FOLDER, resources, workers)
    if resources:
        raise ConfigError("--resources: goes with --launcher=ray or slurm; workers share out what this machine has")
    if workers is None:
        raise ConfigError("--workers: missing; the local launcher takes --workers=N")
    return Local(workers, workdir / FOLDER)


def _workers(given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isdecimal() or not 1 <= int(given) < 2**16:
        raise ConfigError(f"--workers: got {given!r}, takes an integer from 1")
    return int(given)


def _resources(given: str | None) -> dict[str, Any]:
    found = {}
    for item in filter(None, (given or "").split(",")):
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"--resources: got {item!r}, takes KEY=VALUE,...")
        if key.strip() in found:
            raise ConfigError(f"--resources: got {key.strip()} twice, takes each key once")
        found[key.strip()] = Text(value.strip()).literal()
    return found


def train(
    runs: Sequence[Planned],
    launcher: Launcher,
    workdir: Path,
    data_dir: str | None,
    fingerprints: Mapping[str, Mapping[str, Any]],
    keep: bool = False,
) -> tuple[list[Planned], list[Planned]]:
    """As `comparison_runs.train`: what is not finished is trained; those that failed and those that stopped.

    A run whose worker is lost is started again, from its last checkpoint; the last time alone, since memory may have
    been short. What a run says of itself stands in its own folder, so the order of ending decides nothing.

    Raises:
      Interrupted: a signal came; the runs that were going on are saved.
      DataChanged: the data changed between two runs.
    """
    queue = collections.deque(run for run in runs if not run.ended and not run.waits)
    done = len(runs) - sum(run.waits for run in runs) - len(queue)
    if done:
        cli.say(f"{done} of {len(runs)} {what(runs)} are finished already")
    launcher.plan(list(queue), data_dir)
    ended: dict[str, list[Planned]] = {FINISHED: [], STOPPED: [], FAILED: []}
    tries: collections.Counter[Path] = collections.Counter()
    going: list[tuple[Any, Planned, float]] = []
    jobs = {run.folder: describe(run, workdir, data_dir, fingerprints, keep, launcher.threads) for run in queue}
    for run in queue:
        (run.folder / "failure.json").unlink(missing_ok=True)  # of an earlier try
    try:
        while queue or going:
            for run in list(queue):
                alone = tries[run.folder] > 0 and tries[run.folder] == launcher.tries - 1
                if (handle := launcher.start(run, jobs[run.folder], alone)) is not None:
                    queue.remove(run)
                    tries[run.folder] += 1
                    going.append((handle, run, time.perf_counter()))
                    cli.say(f"{run.role} started: {run}" + (", again" if tries[run.folder] > 1 else ""))
            for entry in list(going):
                handle, run, began = entry
                if (outcome := launcher.poll(handle)) is None:
                    continue
                going.remove(entry)
                kind, message = outcome["outcome"], outcome["message"]
                if kind == CHANGED:
                    raise DataChanged(message)
                if kind not in ended and tries[run.folder] < launcher.tries:
                    cli.say(f"{run}: {message}; it goes on from its last checkpoint")
                    queue.appendleft(run)
                    continue
                if kind not in ended or (kind == FAILED and not (run.folder / "failure.json").exists()):
                    fail(run, message, "NotBegun" if kind == FAILED else "WorkerLost")
                elif kind == FAILED:
                    cli.say(f"failed: {run}: {message}")
                ended[kind if kind in ended else FAILED].append(run)
                if kind == FINISHED:
                    done += 1
                    took = clock(time.perf_counter() - began)
                    cli.say(f"{done} of {len(runs)} {what(runs)} finished: {run} ({took})")
            time.sleep(POLL)
    except KeyboardInterrupt as error:
        cli.say(f"asking {len(going)} {what(runs)} to save")
        stopped, going = going, []
        launcher.stop([handle for handle, _, _ in stopped])
        outcomes = [(launcher.poll(handle), run) for handle, run, _ in stopped]
        killed = [str(run) for outcome, run in outcomes if outcome is None or outcome["outcome"] == LOST]
        saved = "those that were going on are saved"
        if killed:
            saved = f"{'; '.join(killed)} did not save in time and would go on from their last checkpoints"
        raise interrupted(runs, saved) from error
    finally:
        if going:
            launcher.stop([handle for handle, _, _ in going])
    order: Callable[[Planned], int] = list(runs).index
    return sorted(ended[FAILED], key=order), sorted(ended[STOPPED], key=order)
