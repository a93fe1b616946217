"""Which trials and runs a comparison asks for, with what is known so far: chosen values, and steps by the budget."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from xformer import pretraining, tuning
from xformer.comparison import comparison_runs, comparison_trials, pretraining_run
from xformer.report import results

ENDED = ("Diverged", "OutOfMemory")  # failures that are a trial's outcome: trying again gives the same
DECIDE = ("optimizer.name",)  # keys of the optimizer section that decide what a step costs; the others do not


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run that a comparison asks for, or one trial before the runs.

    Attributes:
      pretraining: the config of the run that it starts from, in a folder of its own folder; None where there is none.
      role: "run" or "trial".
      values: what is tuned, dotted key -> value: those of a trial, or those chosen for a run.
      waits: whether its values are not chosen yet, so that it can't be trained.
    """

    task: str  # empty where the comparison has one only
    variant: str
    seed: int
    config: ConfigDict
    folder: Path
    pretraining: ConfigDict | None = None
    role: str = "run"
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    waits: bool = False

    def __str__(self) -> str:
        return self.label if self.role == "trial" else f"{self.label}, seed {self.seed}"

    @property
    def label(self) -> str:
        """What is compared: runs that differ by seed only have one label."""
        label = f"{self.variant} on {self.task}" if self.task else self.variant
        return f"{label}, trial {tuning.spelt(self.values)}" if self.role == "trial" else label

    @property
    def result(self) -> dict | None:
        """What the finished run found; None where it is not finished or its `result.json` is damaged."""
        return results.read_result(self.folder)

    @property
    def ended(self) -> bool:
        """Whether it is finished, or is a trial that failed as it would again."""
        failure = results.read_json(self.folder / "failure.json") if self.role == "trial" else None
        return self.result is not None or (failure or {}).get("kind") in ENDED

    @property
    def cost_key(self) -> str:
        """The same for runs whose steps cost the same: the variant, and tuned values that decide what a step costs."""
        return cost_key(self.variant, self.values)


def cost_key(variant: str, values: Mapping[str, Any]) -> str:
    """`full`, or `full, width 64` where values were tuned that decide what a step costs."""
    own = {key: value for key, value in values.items() if not key.startswith("optimizer.") or key in DECIDE}
    return f"{variant}, {tuning.spelt(own)}" if own else variant


def plan(parts: Mapping[str, ConfigDict], workdir: Path) -> list[Planned]:
    """Every run, the seeds one after the other, so that a comparison cut short has all variants.

    Args:
      parts: the comparisons of `xformer.comparison.comparison_parts`, by task.
      workdir: of the comparison; what it says of chosen values and of steps is in the configs.
    """
    runs = []
    for task, part in parts.items():
        known, chosen = results.budget_steps(workdir / task), results.tuned(workdir / task)
        tuned = {variant: chosen[variant] for variant in part.variants if variant in chosen and "tune_seed" in part}
        same = part.get("budget", {}).get("steps")
        steps = {variant: same or known.get(cost_key(variant, tuned.get(variant, {}))) for variant in part.variants}
        whole = comparison_runs(part, tuned)  # what a run starts from is not cut to the budget
        for (variant, seed, run), (_, _, uncut) in zip(comparison_runs(part, tuned, steps), whole, strict=True):
            folder = results.run_folder(workdir / task, variant, seed)
            waits = "tune_seed" in part and variant not in tuned
            values = tuned.get(variant, {})
            started = pretraining_run(part, uncut, _pretraining_steps(workdir / task, variant, values))
            runs.append(Planned(task, variant, seed, run, folder, started, values=values, waits=waits))
    order = {seed: index for index, seed in enumerate(next(iter(parts.values())).seeds)}
    return sorted(runs, key=lambda run: order[run.seed])


def plan_trials(parts: Mapping[str, ConfigDict], workdir: Path) -> list[Planned]:
    """Every trial, as `plan` gives the runs: the first of each variant, then the second, and so on."""
    trials = []
    for task, part in parts.items():
        known = results.budget_steps(workdir / task)
        same = part.get("budget", {}).get("steps")
        steps = lambda variant, values, known=known, same=same: same or known.get(cost_key(variant, values))
        numbers: collections.Counter[str] = collections.Counter()
        for (variant, values, run), (_, _, uncut) in zip(
            comparison_trials(part, steps), comparison_trials(part), strict=True
        ):
            number = numbers[variant]
            numbers[variant] += 1
            folder = results.trial_folder(workdir / task, variant, number)
            started = pretraining_run(part, uncut, _pretraining_steps(workdir / task, variant, values))
            own = Planned(task, variant, run.seed, run, folder, started, "trial", values)
            trials.append((number, own))
    return [trial for _, trial in sorted(trials, key=lambda pair: pair[0])]


def _pretraining_steps(workdir: Path, variant: str, values: Mapping[str, Any]) -> int | None:
    return results.budget_steps(workdir, pretraining.FOLDER).get(cost_key(variant, values))


def of_variant(planned: Sequence[Planned]) -> dict[tuple[str, str], list[Planned]]:
    """Those of each (task, variant), in order."""
    found: dict[tuple[str, str], list[Planned]] = {}
    for one in planned:
        found.setdefault((one.task, one.variant), []).append(one)
    return found
