"""How many steps each variant gets where a comparison's budget is in FLOPs or seconds: found once, then kept."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from xformer import budget as budgets
from xformer import pretraining
from xformer.commands import cli, hosts, inspect
from xformer.commands.comparison_plan import Planned
from xformer.config import build
from xformer.report import results
from xformer.train import workdir as folders
from xformer.train.checkpoint import barrier

WARM_STEPS, TURNS, TURN_SECONDS = 3, 5, 0.5  # steps before measuring, and how often and how long is measured


def settle(planned: Sequence[Planned], parts: Mapping[str, ConfigDict], workdir: Path, data_dir: str | None) -> None:
    """Writes `budget.json` of each task: steps for every variant, and for every tuned value that a step's cost is of.

    So too for pretraining, where FLOPs decide how long that is. What is there stays. FLOPs of a step are counted; its
    time is measured, alone, before anything is trained.

    Raises:
      ConfigError: the budget pays for less than a step, or for no more than the warmup.
    """
    for task, part in parts.items():
        own = [one for one in planned if one.task == task]
        _settle(own, dict(part.get("budget", {})), workdir / task, data_dir, task)
        if (flops := part.get("pretrain", {}).get("train_flops")) is not None:
            _settle(own, {"train_flops": flops}, workdir / task, data_dir, task, pretraining.FOLDER)


def _settle(
    planned: Sequence[Planned], budget: dict[str, float], workdir: Path, data_dir: str | None, task: str, of: str = ""
) -> None:
    """Settles the budget of the runs of a task, or of their pretraining (`of`), in its folder."""
    if not budget or "steps" in budget:
        return
    first = {one.cost_key: one for one in reversed(planned)}
    missing = {key: one for key, one in first.items() if key not in results.budget_steps(workdir, of)}
    for key in [key for key in dict.fromkeys(one.cost_key for one in planned) if key in missing]:
        one, content = missing[key], dict(results.read_json(workdir / results.BUDGET) or {})
        config: Any = one.pretraining if of else one.config
        flops = "train_flops" in budget
        cost = count_step(config, data_dir) if flops else measure_step(one, data_dir)
        label = " ".join(filter(None, (key, f"on {task}" if task else "", of)))
        steps = budgets.affords(budget, cost, label)
        budgets.check_warmup(budgets.scaled(config.to_dict(), steps), label, budget)
        each = f"{cost:.3g} FLOPs" if flops else f"{1e3 * cost:.3g} ms"
        cli.say(f"{label}: {steps:,} steps of {each} each {budgets.spelt(budget)}")
        if hosts.is_main():
            known = dict(results.mapping((results.mapping(content.get(of)) if of else content).get("steps")))
            known[key] = {"num_steps": steps, "flops_per_step" if flops else "step_seconds": cost}
            settled = {"budget": budget, "steps": known}
            folders.write_json(workdir / results.BUDGET, content | ({of: settled} if of else settled))
        barrier("budget")


def count_step(config: ConfigDict, data_dir: str | None) -> float:
    """FLOPs of one training step of a run, counted in its jaxpr: forward, backward and optimizer.

    Of batches by length (`train.length_buckets`), the mean over an epoch.
    """
    experiment = build(config)
    sizes, _ = inspect.data_sizes(experiment, data_dir)
    return inspect.mean_training_cost(experiment, sizes, data_dir)[0]


def measure_step(planned: Planned, data_dir: str | None) -> float:
    """Seconds of one training step with its batch: the median of a few turns, after the first steps and compilation."""
    with tempfile.TemporaryDirectory() as folder:  # where the trainer would write, if it were asked to train
        trainer = build(planned.config).trainer(folder, data_dir)
        engine = trainer.engine
        state, batches = engine.init(), iter(engine.train_batches(trainer.data, trainer.seed))

        def seconds(count: int) -> float:
            nonlocal state
            began, compiling = time.perf_counter(), engine.train_step.seconds
            for _ in range(count):
                state, report = engine.step(state, next(batches))
            jax.block_until_ready((state.step, report))
            return time.perf_counter() - began - (engine.train_step.seconds - compiling)

        seconds(WARM_STEPS)
        count = max(1, min(round(TURN_SECONDS / seconds(1)), 1000))
        return statistics.median(seconds(count) / count for _ in range(TURNS))
