"""What the runs of a comparison would cost: counted, or read from runs that are finished. Trains and writes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from xformer.commands import inspect
from xformer.commands.comparison_runs import Planned
from xformer.config import build
from xformer.report import formatting, results
from xformer.report.tables import Table
from xformer.train import step as steps


def table(runs: Sequence[Planned], data_dir: str | None) -> str:
    """A row for each variant and task, and a line for all.

    Times are those of finished runs of the same kind, training steps alone; a dash where there is none. A checkpoint
    holds what training needs to go on: parameters and the optimizer's state. What the data decides and is not prepared
    yet is assumed, and said.
    """
    rows, total, seconds, unknown, assumed = [], 0.0, 0.0, False, set()
    for label in dict.fromkeys(run.label for run in runs):
        own = [run for run in runs if run.label == label]
        todo = [run for run in own if run.result is None]
        flops, params, size, missing = _counted(own[0], data_dir)
        assumed |= missing
        spent = [results.total(run.result, "train_seconds") for run in own if run.result is not None]
        known = [value for value in spent if math.isfinite(value)]
        each = float(np.mean(known)) if known else math.nan
        total += len(todo) * flops
        seconds += len(todo) * each if todo else 0.0
        unknown |= bool(todo) and not known
        rows.append((label, str(len(own)), str(len(todo)), f"{params:,}", formatting.si(flops),
                     formatting.mebibytes(size), formatting.seconds(each)))  # fmt: skip
    headers = ("variant", "runs", "to train", "parameters", "training FLOPs a run", "checkpoint", "training time a run")
    left = sum(run.result is None for run in runs)
    time = "" if unknown or not left else f", about {formatting.seconds(seconds)} of training steps"
    lines = [
        Table(headers, tuple(rows)).text(),
        "",
        f"{len(runs)} runs, {left} to train: {formatting.si(total, 'FLOP')}{time}",
    ]
    if assumed:
        lines.append(f"The data is not prepared yet; assumed: {', '.join(sorted(assumed))}")
    return "\n".join(lines)


def _counted(run: Planned, data_dir: str | None) -> tuple[float, int, int, set[str]]:
    """(training FLOPs of a run, its parameters, bytes of a checkpoint, sizes that are assumed)."""
    flops, params, size, assumed = 0.0, 0, 0, set()
    for config in filter(None, (run.pretraining, run.config)):
        experiment = build(config)
        sizes, _ = inspect.data_sizes(experiment, data_dir)
        preprocessing = inspect.preprocessing(experiment, data_dir)
        batch = experiment.task.example_batch(experiment.train.batch_size, preprocessing)
        _, step, state = inspect.training_cost(experiment, sizes, batch)
        flops += step.flops * experiment.train.num_steps
        params = steps.num_params(state.params)
        size = sum(math.prod(x.shape) * _item_size(x) for x in jax.tree.leaves(state))
        assumed |= set(sizes.assumed)
    return flops, params, size, assumed


def _item_size(x: jax.ShapeDtypeStruct) -> int:
    return 0 if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else np.dtype(x.dtype).itemsize
