"""The runs of a comparison: which there are, their data, and training what is not finished."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from xformer.commands import cli, hosts, inspect
from xformer.commands.comparison_plan import Planned
from xformer.experiment import Experiment, build, recommend_half
from xformer.pretraining import FOLDER
from xformer.report import results, summary
from xformer.schema import ConfigError
from xformer.tasks import DataMissing
from xformer.train import DataChanged, Engine, Interrupted, ProcessLost, data_record
from xformer.train import workdir as folders
from xformer.train.checkpoint import Checkpoints
from xformer.train.progress import clock
from xformer.train.step import num_params

GO_ON = "the same command goes on from there"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"  # what becomes of a run that is tried
MAX_ENGINES = 32  # whose compiled steps are kept for the other seeds


def prepare(
    runs: Sequence[Planned], data_dir: str | None, trials: Sequence[Planned] = ()
) -> dict[str, Mapping[str, Any]]:
    """Makes the data, checks it against that of the runs that are there, and compares the variants' parameters.

    Args:
      trials: those before the runs, on the same data.

    Returns:
      The data's fingerprint by task; it has to stay that until the last run has ended.

    Raises:
      DataMissing, ConfigError: the data that a run needs can't be made here.
      DataChanged: runs that are there were trained on other data.
    """
    first_runs = {run.label: run for run in reversed(runs)}
    built = {label: build(first_runs[label].config) for label in dict.fromkeys(run.label for run in runs)}
    finished = all(run.result is not None for run in runs)
    fingerprints: dict[str, Mapping[str, Any]] = {}
    for label, experiment in built.items():
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
        for run in (*runs, *trials):
            if (run.task, run.variant) == (first_runs[label].task, first_runs[label].variant):
                data_record.check(run.folder, fingerprints[repr(task)])
    if finished:
        return fingerprints
    _compare_sizes(first_runs, built, data_dir)
    return fingerprints


def _compare_sizes(first_runs: Mapping[str, Planned], built: Mapping[str, Experiment], data_dir: str | None) -> None:
    """Says which variants have far more or fewer parameters than the first on their task: a warning, or where it has
    another model on purpose, in one line for all.
    """
    base: dict[str, tuple[str, str, int]] = {}
    others: list[str] = []
    for label, experiment in built.items():
        data, source = inspect.data_sizes(experiment, data_dir)
        make = experiment.model_fn(**data)
        size = num_params(nnx.state(nnx.eval_shape(lambda make=make: make(nnx.Rngs(0))), nnx.Param))
        run, model = first_runs[label], experiment.config.model.name
        name, first_model, other = base.setdefault(run.task, (run.variant, model, size))
        if abs(size / other - 1) <= summary.MAX_PARAM_DIFFERENCE:
            continue
        if model == first_model:
            share = f"{size / other - 1:+.0%} (sizes {source})"
            cli.say(f"warning: {label} has {size:,} parameters, {name} {other:,}: {share}")
        else:
            others.append(f"{label} ({model}) {size / other - 1:+.0%}")
    if others:
        cli.say(f"parameters of other models beside the first variant's: {', '.join(others)}")


def train(
    runs: Sequence[Planned],
    data_dir: str | None,
    fingerprints: Mapping[str, Mapping[str, Any]],
    engines: MutableMapping[Hashable, Engine] | None = None,
    keep: bool = False,
) -> tuple[list[Planned], list[Planned]]:
    """Trains what is not finished; the runs that failed and those that stopped at `stop_at_step`.

    Args:
      runs: all of them runs, or all of them trials; those that wait are left out.
      engines, keep: see `train_one`.

    Raises:
      Interrupted: a signal came; the message says what is done.
      DataChanged: the data changed between two runs.
    """
    failed: list[Planned] = []
    stopped: list[Planned] = []
    seconds: dict[str, list[float]] = {}
    engines = {} if engines is None else engines
    todo = [run for run in runs if not run.ended and not run.waits]
    done = sum(run.ended for run in runs)
    if done:
        cli.say(f"{done} of {len(runs)} {what(runs)} are finished already")
    recommend_half([run.config.train.get("dtype", "float32") for run in todo], cli.say)
    for number, run in enumerate(todo):
        left = time_left(runs, todo[number:], seconds)
        cli.say(f"{run.role} {done + number + 1} of {len(runs)}: {run}" + (f", about {left} left" if left else ""))
        began = time.perf_counter()
        try:
            outcome = attempt(run, data_dir, fingerprints, engines, keep)
        except Interrupted as error:
            raise interrupted(runs, f"{run} is saved at step {error.step}") from error
        except KeyboardInterrupt as error:
            raise interrupted(runs, f"{run} was starting or ending") from error
        if outcome == FINISHED:
            seconds.setdefault(run.label, []).append(time.perf_counter() - began)
        elif outcome == STOPPED:
            stopped.append(run)
        else:
            failed.append(run)
    return failed, stopped


def attempt(
    run: Planned,
    data_dir: str | None,
    fingerprints: Mapping[str, Mapping[str, Any]],
    engines: MutableMapping[Hashable, Engine],
    keep: bool = False,
) -> str:
    """Trains one run: FINISHED, STOPPED at `stop_at_step`, or FAILED, for a reason that its folder then says.

    Raises:
      Interrupted, KeyboardInterrupt: a signal came.
      DataChanged, ProcessLost: no run can go on.
    """
    try:
        train_one(run, data_dir, fingerprints, engines, keep)
    except Interrupted as error:
        stop = run.config.train.stop_at_step
        if stop is None or error.step < stop:
            raise
        return STOPPED
    except (ProcessLost, DataChanged):
        raise
    except Exception as error:  # one run's failure must not cost the others
        if not isinstance(error, (*cli.FORESEEN, ValueError)):
            traceback.print_exc()
        fail(run, f"{type(error).__name__}: {' '.join(str(error).split())}", type(error).__name__)
        return FAILED
    return FINISHED


def fail(run: Planned, line: str, kind: str) -> None:
    """Says that a run failed, and keeps the line and its kind in the run's folder, where reports look for it."""
    cli.say(f"failed: {run}: {line}")
    if hosts.is_main():
        run.folder.mkdir(parents=True, exist_ok=True)
        folders.write_json(run.folder / "failure.json", {"error": line, "kind": kind})


def train_one(
    run: Planned,
    data_dir: str | None,
    fingerprints: Mapping[str, Mapping[str, Any]],
    engines: MutableMapping[Hashable, Engine],
    keep: bool = False,
) -> None:
    """Trains one run to its end, after what it starts from. A damaged `result.json` is made again.

    Args:
      engines: of finished runs, by what their steps were compiled from: this run uses them, and adds its own.
      keep: whether all checkpoints stay when a run is finished; else the best one does.
    """
    if hosts.is_main():
        (run.folder / "failure.json").unlink(missing_ok=True)
    if run.pretraining is not None:
        _fit(run.pretraining, run.folder / FOLDER, data_dir, {}, engines, keep)
    _fit(run.config, run.folder, data_dir, fingerprints, engines, keep, run.role == "run")


def _fit(
    config: ConfigDict,
    folder: Path,
    data_dir: str | None,
    fingerprints: Mapping[str, Mapping[str, Any]],
    engines: MutableMapping[Hashable, Engine],
    keep: bool = False,
    test: bool = True,
) -> None:
    """Trains a run to its end; of a finished one only what it was trained on is checked.

    test: whether the test split is scored at the end: not that of a trial, so that nothing is chosen by it.
    """
    finished = results.read_result(folder) is not None
    if not finished and hosts.is_main() and (damaged := folder / "result.json").exists():
        cli.say(f"{damaged} is damaged: it is made again from the run's last checkpoint")
        damaged.unlink()
    experiment = build(config)
    try:
        like = engines.get(experiment.steps_key)
        trainer = experiment.trainer(folder, data_dir, progress=cli.say, like=like, test=test)
        known = fingerprints.get(repr(experiment.task), trainer.data.fingerprint)  # not of what is started from
        if changes := data_record.differences(known, trainer.data.fingerprint):
            run = f"{experiment.name}, seed {experiment.seed}"
            raise DataChanged(f"{run}: the data changed since the comparison began: {', '.join(changes)}")
        trainer.fit()
        if not finished:
            best = (results.read_result(folder) or {}).get("best_step")
            if hosts.is_main() and not keep and best is not None:
                Checkpoints(folder / "checkpoints").thin(best)
            engines.setdefault(experiment.steps_key, trainer.engine)
    finally:
        if len(engines) > MAX_ENGINES:
            engines.pop(next(iter(engines)))
            jax.clear_caches()
        gc.collect()


def interrupted(runs: Sequence[Planned], where: str) -> Interrupted:
    """What an interruption says: how many runs are finished, and `where` the others stand."""
    done = sum(run.ended for run in runs)
    return Interrupted(f"{done} of {len(runs)} {what(runs)} are finished, {where}; {GO_ON}", 0)


def what(runs: Sequence[Planned]) -> str:
    """What messages call these: `trials` or `runs`."""
    return "trials" if runs and runs[0].role == "trial" else "runs"


def time_left(runs: Sequence[Planned], todo: Sequence[Planned], seconds: Mapping[str, Sequence[float]]) -> str:
    """`h:mm:ss` that `todo` will take; nothing where there is nothing to judge by.

    A variant takes, on each task, what its runs took in this session (`seconds`, compilation included), else what its
    finished runs spent on training, else the mean of the variants that are known.
    """
    known = {variant: list(times) for variant, times in seconds.items()}
    for run in runs:
        if run.label not in seconds and (spent := results.total(run.result, "train_seconds")) > 0:
            known.setdefault(run.label, []).append(spent)
    if not known:
        return ""
    means = {variant: statistics.fmean(times) for variant, times in known.items()}
    return clock(sum(means.get(run.label, statistics.fmean(means.values())) for run in todo))
