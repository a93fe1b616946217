"""The answer: for each length and budget, the best variant that was measured within it, and those that tie with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from xformer.report import formatting, inference, summary
from xformer.report.results import Comparison, mapping
from xformer.report.summary import Row
from xformer.report.tables import Table

MOST_BUDGETS = 4
SIGNIFICANT = 0.05


@dataclasses.dataclass(frozen=True)
class Budget:
    """One way to pay for a run: its title, what a row costs, and how an amount is spelt."""

    title: str
    cost: Callable[[Row], float]
    spell: Callable[[float], str]


BUDGETS = (
    Budget("training FLOPs", lambda row: row.train_flops, lambda value: formatting.si(value, digits=1)),
    Budget("training time", lambda row: row.train_seconds, formatting.seconds),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What was measured within a budget.

    Attributes:
      best: the variants with the best mean, as a rule one.
      ties: those that are not told apart from it, and those of which too few seeds ran to tell.
      text: the mean of the best.
      runs: what it rests on: `full-0` and so on.
    """

    best: tuple[str, ...]
    ties: tuple[str, ...]
    text: str
    runs: tuple[str, ...]

    def __str__(self) -> str:
        ties = f"; not told apart: {formatting.listed(self.ties)}" if self.ties else ""
        return f"{formatting.listed(self.best)} {self.text}{ties} [{', '.join(self.runs)}]"


def tables(comparisons: Mapping[str, Comparison]) -> list[tuple[str, Table]]:
    """(title, table) by training FLOPs and by training time: a row for each length, or task, a column a budget."""
    rows = {task: summary.rows(one) for task, one in comparisons.items()}
    found = []
    for budget in BUDGETS:
        amounts = _amounts([budget.cost(row) for some in rows.values() for row in some if row.quality.count])
        if not amounts or sum(bool(row.quality.count) for some in rows.values() for row in some) < 2:
            continue
        body = []
        for task, comparison in comparisons.items():
            cells = [cell(comparison, rows[task], budget, amount) for amount in amounts]
            body.append((_label(task, comparison), *("" if one is None else str(one) for one in cells)))
        headers = ("length", *(f"up to {budget.spell(amount)}" for amount in amounts))
        found.append((f"Best by {budget.title}", Table(headers, tuple(body), prose=True)))
    return found


def cell(comparison: Comparison, rows: Sequence[Row], budget: Budget, amount: float) -> Cell | None:
    """The best of the variants whose runs cost no more than `amount`; None where none does, or all are at chance."""
    if summary.data_differ(comparison):
        return None
    usable = [row for row in rows if row.quality.count and budget.cost(row) <= amount and not row.broken_seeds]
    usable = [row for row in usable if not row.chance_seeds]
    if not usable:
        return None
    sign = 1 if comparison.higher_is_better else -1
    top = max(sign * row.quality.mean for row in usable)
    best = [row for row in usable if sign * row.quality.mean == top]
    others = [row for row in usable if row not in best]
    p_values = inference.holm([_p(comparison, best[0].variant, row.variant) for row in others])
    ties = [row.variant for row, p in zip(others, p_values, strict=True) if not p < SIGNIFICANT]  # NaN: nothing tells
    runs = [f"{run.variant}-{run.seed}" for row in best for run in comparison.finished(row.variant)]
    text = formatting.quality(best[0].quality, comparison.metric)
    return Cell(tuple(row.variant for row in best), tuple(ties), text, tuple(runs))


def _p(comparison: Comparison, one: str, other: str) -> float:
    """Of no difference, paired over seeds; NaN below MIN_SEEDS pairs."""
    by_seed = lambda name: {run.seed: run.test(comparison.metric) for run in comparison.finished(name)}
    found = inference.paired_seeds(by_seed(one), by_seed(other))
    return found.p if found.count >= summary.MIN_SEEDS else math.nan


def _amounts(costs: Sequence[float]) -> list[float]:
    """At most MOST_BUDGETS round numbers, the last of which pays for everything, each for something new."""
    known = sorted(cost for cost in costs if math.isfinite(cost) and cost > 0)
    rounded = sorted({_round_up(cost) for cost in known})
    stride = math.ceil(len(rounded) / MOST_BUDGETS) if rounded else 1
    return rounded[::-1][::stride][::-1]


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= value * (1 - 1e-9))


def _label(task: str, comparison: Comparison) -> str:
    lengths = {mapping(run.config.get("task")).get("max_len") for run in comparison.all_runs()} - {None}
    length = f"{lengths.pop():,} tokens" if len(lengths) == 1 else ""
    return f"{task}, {length}" if task and length else task or length or "all"


NOTE = (
    "Each cell: the variant with the best mean test quality among those whose whole runs, pretraining included, cost "
    "no more; what is not told apart from it (paired over seeds, Holm; with less than three shared seeds nothing is); "
    "and the runs that this rests on. Runs at chance are left out. Empty: nothing was measured. A run is as long as it "
    "was made to be: one that was made for a smaller budget could do better there than this table knows."
)
