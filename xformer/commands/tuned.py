"""Chooses each variant's values by its trials, on the validation split; what is chosen stays chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xformer import tuning
from xformer.commands import cli, hosts
from xformer.commands.comparison_plan import Planned, of_variant
from xformer.report import results
from xformer.train import workdir as folders
from xformer.train.checkpoint import barrier


def undecided(trials: Sequence[Planned], workdir: Path) -> list[Planned]:
    """The trials of variants whose values are not chosen yet: those of others are never trained again."""
    return [trial for trial in trials if trial.variant not in results.tuned(workdir / trial.task)]


def choose(trials: Sequence[Planned], workdir: Path) -> list[str]:
    """Writes `tuned.json` of each task: the values of the trial that was best on the validation split.

    A variant is decided when all its trials have ended, and stays decided. Trials that failed or diverged are never
    chosen; of equals that of the lowest validation loss is.

    Returns:
      Labels of variants none of whose trials has finished, although all have ended.
    """
    barrier("trials")  # their failures are written by one process, and read by all
    hopeless = []
    for (task, variant), own in of_variant(trials).items():
        path = workdir / task / results.TUNED
        known: dict[str, Any] = results.read_json(path) or {}
        if variant in results.tuned(workdir / task) or not all(trial.ended for trial in own):
            continue
        scores = [_score(trial) for trial in own]
        first = next((trial.result for trial in own if trial.result is not None), None)
        label = f"{variant} on {task}" if task else variant
        if first is None:
            hopeless.append(label)
            continue
        metric = first["select_metric"]
        losses = [_of(trial, "loss") for trial in own]
        number = tuning.best(scores, first["better"][metric] == "max", losses)
        assert number is not None  # one has finished, and what finishes has a finite score
        entry = {"trial": number, "values": dict(own[number].values), "metric": metric, "value": scores[number],
                 "seed": own[number].seed}  # fmt: skip
        cli.say(f"{label}: {tuning.spelt(own[number].values)} is best of {len(own)} trials "
                f"(validation {metric} {scores[number]:.4f})")  # fmt: skip
        if hosts.is_main():
            folders.write_json(path, {**known, variant: entry})
    barrier("tuned")
    return hopeless


def _score(trial: Planned) -> float | None:
    """The validation metric that selects, of the trial's best checkpoint; None where it has none."""
    return _of(trial, str((trial.result or {}).get("select_metric")))


def _of(trial: Planned, metric: str) -> float | None:
    value = results.number((trial.result or {}).get("eval"), metric)
    return value if math.isfinite(value) else None
