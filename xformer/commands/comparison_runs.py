"""The runs of a comparison: which there are, their data, and training what is not finished."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from xformer.commands import cli, hosts, inspect
from xformer.config import comparison_runs
from xformer.experiment import build
from xformer.report import results, summary
from xformer.schema import ConfigError
from xformer.tasks import DataMissing
from xformer.train import DataChanged, Interrupted, ProcessLost, data_record
from xformer.train import workdir as folders
from xformer.train.progress import clock
from xformer.train.step import num_params

GO_ON = "the same command goes on from there"


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run that a comparison asks for."""

    variant: str
    seed: int
    config: ConfigDict
    folder: Path

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def result(self) -> dict | None:
        """What the finished run found; None where it is not finished or its `result.json` is damaged."""
        return results.read_result(self.folder)


def plan(config: ConfigDict, workdir: Path) -> list[Planned]:
    """Every run, the seeds one after the other, so that a comparison cut short has all variants."""
    runs = [
        Planned(variant, seed, run, results.run_folder(workdir, variant, seed))
        for variant, seed, run in comparison_runs(config)
    ]
    order = {seed: index for index, seed in enumerate(config.seeds)}
    return sorted(runs, key=lambda run: order[run.seed])


def prepare(runs: Sequence[Planned], data_dir: str | None) -> dict[str, Mapping[str, Any]]:
    """Makes the data, checks it against that of the runs that are there, and compares the variants' parameters.

    Returns:
      The data's fingerprint by task; it has to stay that until the last run has ended.

    Raises:
      DataMissing, ConfigError: the data that a run needs can't be made here.
      DataChanged: runs that are there were trained on other data.
    """
    first_runs = {run.variant: run for run in reversed(runs)}
    built = {variant: build(first_runs[variant].config) for variant in (run.variant for run in runs)}
    finished = all(run.result is not None for run in runs)
    fingerprints: dict[str, Mapping[str, Any]] = {}
    for variant, experiment in built.items():
        task = experiment.task
        if repr(task) not in fingerprints:
            try:
                task.prepare(data_dir, progress=None if finished else cli.say)
            except ValueError as error:  # the user's own files are at fault
                raise ConfigError(f"base.task: {error}") from error
            except DataMissing as error:
                if not finished:
                    raise
                cli.say(f"warning: not checked whether the data has changed: {error}")
                return {}
            fingerprints[repr(task)] = task.open(data_dir).fingerprint
        for run in runs:
            if run.variant == variant:
                data_record.check(run.folder, fingerprints[repr(task)])
    if finished:
        return fingerprints
    sizes: dict[str, int] = {}
    for variant, experiment in built.items():
        data, source = inspect.data_sizes(experiment, data_dir)
        make = experiment.model_fn(**data)
        sizes[variant] = num_params(nnx.state(nnx.eval_shape(lambda make=make: make(nnx.Rngs(0))), nnx.Param))
    base, *_ = sizes
    for variant, size in sizes.items():
        if abs(size / sizes[base] - 1) > summary.MAX_PARAM_DIFFERENCE:
            share = f"{size / sizes[base] - 1:+.0%} (sizes {source})"
            cli.say(f"warning: {variant} has {size:,} parameters, {base} {sizes[base]:,}: {share}")
    return fingerprints


def train(
    runs: Sequence[Planned], data_dir: str | None, fingerprints: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Planned], list[Planned]]:
    """Trains what is not finished; the runs that failed and those that stopped at `stop_at_step`.

    Raises:
      Interrupted: a signal came; the message says what is done.
      DataChanged: the data changed between two runs.
    """
    failed: list[Planned] = []
    stopped: list[Planned] = []
    seconds: dict[str, list[float]] = {}
    todo = [run for run in runs if run.result is None]
    if len(todo) < len(runs):
        cli.say(f"{len(runs) - len(todo)} of {len(runs)} runs are finished already")
    for number, run in enumerate(todo):
        left = time_left(runs, todo[number:], seconds)
        cli.say(
            f"run {len(runs) - len(todo) + number + 1} of {len(runs)}: {run}" + (f", about {left} left" if left else "")
        )
        began = time.perf_counter()
        try:
            train_one(run, data_dir, fingerprints)
            seconds.setdefault(run.variant, []).append(time.perf_counter() - began)
        except Interrupted as error:
            stop = run.config.train.stop_at_step
            if stop is None or error.step < stop:
                raise interrupted(runs, f"{run} is saved at step {error.step}") from error
            stopped.append(run)
        except KeyboardInterrupt as error:
            raise interrupted(runs, f"{run} was starting or ending") from error
        except (ProcessLost, DataChanged):
            raise
        except Exception as error:  # one run's failure must not cost the others
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if not isinstance(error, (*cli.FORESEEN, ValueError)):
                traceback.print_exc()
            cli.say(f"failed: {run}: {line}")
            if hosts.is_main():
                run.folder.mkdir(parents=True, exist_ok=True)
                folders.write_json(run.folder / "failure.json", {"error": line})
            failed.append(run)
    return failed, stopped


def train_one(run: Planned, data_dir: str | None, fingerprints: Mapping[str, Mapping[str, Any]]) -> None:
    """Trains one run to its end; what it leaves in memory is freed. A damaged `result.json` is made again."""
    if hosts.is_main():
        (run.folder / "failure.json").unlink(missing_ok=True)
        if run.result is None and (damaged := run.folder / "result.json").exists():
            cli.say(f"{damaged} is damaged: it is made again from the run's last checkpoint")
            damaged.unlink()
    try:
        trainer = build(run.config).trainer(run.folder, data_dir, progress=cli.say)
        if changes := data_record.differences(fingerprints[repr(trainer.task)], trainer.data.fingerprint):
            raise DataChanged(f"{run}: the data changed since the comparison began: {', '.join(changes)}")
        trainer.fit()
    finally:
        jax.clear_caches()
        gc.collect()


def interrupted(runs: Sequence[Planned], where: str) -> Interrupted:
    """What an interruption says: how many runs are finished, and `where` the others stand."""
    done = sum(run.result is not None for run in runs)
    return Interrupted(f"{done} of {len(runs)} runs are finished, {where}; {GO_ON}", 0)


def time_left(runs: Sequence[Planned], todo: Sequence[Planned], seconds: Mapping[str, Sequence[float]]) -> str:
    """`h:mm:ss` that `todo` will take; nothing where there is nothing to judge by.

    A variant takes what its runs took in this session (`seconds`, compilation included), else what its finished runs
    spent on training, else the mean of the variants that are known.
    """
    known = {variant: list(times) for variant, times in seconds.items()}
    for run in runs:
        if run.variant not in seconds and (spent := results.number(run.result, "train_seconds")) > 0:
            known.setdefault(run.variant, []).append(spent)
    if not known:
        return ""
    means = {variant: statistics.fmean(times) for variant, times in known.items()}
    return clock(sum(means.get(run.variant, statistics.fmean(means.values())) for run in todo))
