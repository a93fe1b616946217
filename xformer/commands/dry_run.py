"""What the runs of a comparison would cost: counted, or read from runs that are finished. Trains and writes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from xformer import budget as budgets
from xformer import pretraining
from xformer.commands import inspect, memory_plan
from xformer.commands.comparison_plan import Planned, of_variant
from xformer.config import build
from xformer.report import formatting, results
from xformer.report.tables import Table
from xformer.train import step as steps

HEADERS = ("variant", "runs", "to train", "parameters", "training FLOPs a run", "memory", "checkpoint",
           "training time a run")  # fmt: skip


def table(
    runs: Sequence[Planned],
    data_dir: str | None,
    trials: Sequence[Planned] = (),
    parts: Mapping[str, ConfigDict] | None = None,
) -> str:
    """A row for each variant and task, one for its trials, and a line for all.

    Times are those of finished runs of the same kind, training steps alone, or the budget's; a dash where there is
    none. Memory is that of a training step: what the compiler planned for a finished run, else an estimate from above;
    see `memory_plan`. A checkpoint holds what training needs to go on: parameters and the optimizer's state. What the
    data decides and is not prepared yet is assumed, and said. Runs whose values are not chosen yet count as their
    config has them.
    """
    rows, total, seconds, unknown, assumed, uncounted = [], 0.0, 0.0, False, set(), False
    groups = [*of_variant(trials).items(), *of_variant(runs).items()]
    for (task, _), own in groups:
        budget = dict((parts or {}).get(task, {}).get("budget", {}))
        is_trial = own[0].role == "trial"
        todo = [run for run in own if not run.ended]
        pretrain_flops = (parts or {}).get(task, {}).get("pretrain", {}).get("train_flops")
        each_kind = {one.cost_key: one for one in own}
        counted = {key: _counted(one, data_dir, budget, pretrain_flops) for key, one in each_kind.items()}
        flops = [counted[run.cost_key][0] for run in own]
        _, params, size, missing = counted[own[0].cost_key]
        assumed |= missing
        memory = max(memory_plan.of_run(run, data_dir) for run in {one.cost_key: one for one in reversed(own)}.values())
        spent = [results.total(run.result, "train_seconds") for run in own if run.result is not None]
        known = [value for value in spent if math.isfinite(value)] or [float(budget.get("seconds", math.nan))]
        each = float(np.mean(known))
        left = sum(counted[run.cost_key][0] for run in todo)
        uncounted |= not math.isfinite(left)
        total += left
        seconds += len(todo) * each if todo else 0.0
        unknown |= bool(todo) and not math.isfinite(each)
        label = f"{own[0].variant} on {task}" if task else own[0].variant
        rows.append((f"{label}: trials" if is_trial else label, str(len(own)), str(len(todo)), f"{params:,}",
                     formatting.si(float(np.mean(flops))), formatting.mebibytes(memory), formatting.mebibytes(size),
                     formatting.seconds(each)))  # fmt: skip
    left_over = sum(not run.ended for run in (*trials, *runs))
    time = "" if unknown or not left_over else f", about {formatting.seconds(seconds)} of training steps"
    count = f"{len(trials)} trials and {len(runs)} runs" if trials else f"{len(runs)} runs"
    cost = "FLOPs known when step times are measured" if uncounted else formatting.si(total, "FLOP")
    lines = [Table(HEADERS, tuple(rows)).text(), "", f"{count}, {left_over} to train: {cost}{time}"]
    if assumed:
        lines.append(f"The data is not prepared yet; assumed: {', '.join(sorted(assumed))}")
    return "\n".join(lines)


def _counted(
    run: Planned, data_dir: str | None, budget: Mapping[str, float], pretrain_flops: float | None
) -> tuple[float, int, int, set[str]]:
    """(training FLOPs of a run, its parameters, bytes of a checkpoint, sizes that are assumed).

    FLOPs are NaN where a budget in seconds decides them and no step has been timed yet.
    """
    flops, params, size, assumed = 0.0, 0, 0, set()
    known = {of: results.budget_steps(run.folder.parent.parent, of) for of in ("", pretraining.FOLDER)}
    started = {} if pretrain_flops is None else {"train_flops": pretrain_flops}
    for of, config, own in ((pretraining.FOLDER, run.pretraining, started), ("", run.config, budget)):
        if config is None:
            continue
        experiment = build(config)
        sizes, _ = inspect.data_sizes(experiment, data_dir)
        each, state = inspect.mean_training_cost(experiment, sizes, data_dir)
        train = experiment.train
        if train.num_epochs is not None and (examples := inspect.num_train(experiment, data_dir)) is not None:
            train = train.steps_for(examples)
        elif train.num_epochs is not None:
            assumed.add("num_steps, though num_epochs may end a run before")
        num_steps: float = train.num_steps
        if run.cost_key not in known[of] and "train_flops" in own:
            num_steps = budgets.affords(own, each, " ".join(filter(None, (run.cost_key, of))))
        elif run.cost_key not in known[of] and "seconds" in own:
            num_steps = math.nan
        flops += each * num_steps
        params = steps.num_params(state.params)
        size = sum(math.prod(x.shape) * _item_size(x) for x in jax.tree.leaves(state))
        assumed |= set(sizes.assumed)
    return flops, params, size, assumed


def _item_size(x: jax.ShapeDtypeStruct) -> int:
    return 0 if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else np.dtype(x.dtype).itemsize
