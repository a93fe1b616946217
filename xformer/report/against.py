"""Every variant against the baseline of its comparison: the table, the sentence above it, and `comparison.json`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xformer.report import formatting, inference, summary
from xformer.report.inference import Difference
from xformer.report.results import Comparison
from xformer.report.summary import Row
from xformer.report.tables import Table

ONE_POINT = 0.01
SIGNIFICANT = 0.05


@dataclasses.dataclass(frozen=True)
class Against:
    """One variant against the baseline.

    Attributes:
      row: the variant over its seeds.
      difference: its metric minus the baseline's, over the seeds or the test examples that both have.
      p_adjusted: the p-value, corrected for the number of variants (Holm); NaN where nothing can be said.
      excluded: why the variant is in no statement about the cheapest one; empty where it is not left out.
      verdict: "better", "worse", "tie" where these runs can't tell, or "" where there are two seeds. Of one seed it is
        that of its run, not of the variant.
    """

    row: Row
    difference: Difference
    p_adjusted: float
    excluded: str
    verdict: str


def against(comparison: Comparison, rows: Sequence[Row]) -> list[Against]:
    """Every variant but the baseline, in order; none where runs were made on different data."""
    if summary.data_differ(comparison):
        return []
    others = [row for row in rows if row.variant != comparison.reference]
    found = [_difference(comparison, row.variant) for row in others]
    adjusted = inference.holm([difference.p for difference in found])
    return [
        Against(row, difference, p, excluded(row), _verdict(comparison, difference, p))
        for row, difference, p in zip(others, found, adjusted, strict=True)
    ]


def excluded(row: Row) -> str:
    """Why a variant's cost is compared with no other's: some run learnt nothing, or ended without a number."""
    reasons = ((row.chance_seeds, "at chance"), (row.broken_seeds, "no finite number"))
    spelt = [f"{what}: seed {', '.join(map(str, seeds))}" for seeds, what in reasons if seeds]
    return "; ".join(spelt) if row.finished else "no finished run"


def _difference(comparison: Comparison, variant: str) -> Difference:
    by_seed = lambda name: {run.seed: run.test(comparison.metric) for run in comparison.finished(name)}
    paired = inference.paired_seeds(by_seed(variant), by_seed(comparison.reference))
    if paired.count != 1:
        return paired
    runs = {name: {run.seed: run for run in comparison.finished(name)} for name in (variant, comparison.reference)}
    (seed,) = runs[variant].keys() & runs[comparison.reference].keys()
    ours, theirs = (runs[name][seed].test_examples().get(comparison.metric) for name in (variant, comparison.reference))
    if not _same_examples(ours, theirs):
        return paired
    assert ours is not None and theirs is not None
    return inference.paired_examples(ours, theirs)


def _same_examples(ours: np.ndarray | None, theirs: np.ndarray | None) -> bool:
    """Whether both have a value and a weight for each example, and the same weights."""
    if ours is None or theirs is None or ours.ndim != 2 or ours.shape[0] != 2 or ours.shape != theirs.shape:
        return False
    return bool(np.array_equal(ours[1], theirs[1]) and ours[1].sum() > 0)


def _verdict(comparison: Comparison, difference: Difference, p: float) -> str:
    few = difference.basis == "seeds" and difference.count < summary.MIN_SEEDS
    if few or not math.isfinite(p):
        return ""
    if p >= SIGNIFICANT or difference.low <= 0 <= difference.high:
        return "tie"
    return "better" if (difference.mean > 0) == comparison.higher_is_better else "worse"


def table(comparison: Comparison, found: Sequence[Against]) -> Table | None:
    """One row a variant; None where nothing can be said of any."""
    known = [one for one in found if math.isfinite(one.difference.mean)]
    if not known:
        return None
    points = _in_points(comparison)
    headers = (f"variant minus {comparison.reference}", "difference (95 %)", "p (Holm)", "pairs", "verdict",
               *(["seeds for 1 point"] if points else []))  # fmt: skip
    return Table(headers, tuple(_cells(one, points) for one in known))


def _in_points(comparison: Comparison) -> bool:
    """Whether the metric is a share, so that a difference of one point means something."""
    return comparison.metric in ("accuracy", "macro_f1")


def _cells(one: Against, points: bool) -> tuple[str, ...]:
    difference, scale = one.difference, 100 if points else 1
    digits = 1 if points else formatting.decimals(one.row.quality.mean)
    number = lambda value: f"{scale * value:+.{digits}f}"
    text = number(difference.mean)
    if math.isfinite(difference.low):
        text += f" ({number(difference.low)} to {number(difference.high)})"
    p = formatting.MISSING
    if math.isfinite(one.p_adjusted):
        p = "< 0.001" if one.p_adjusted < 0.001 else f"{one.p_adjusted:.3f}"
    unit = "test example" if difference.basis == "test examples" else "seed"
    pairs = f"{difference.count:,} {unit}{'' if difference.count == 1 else 's'}"
    verdict = {"tie": "can't be told apart", "": formatting.MISSING}.get(one.verdict, one.verdict)
    if difference.basis == "test examples" and one.verdict in ("better", "worse"):
        verdict = f"this run is {verdict}"
    if one.row.chance_seeds:
        verdict += " [at chance]"
    cells = (one.row.variant, text, p, pairs, verdict)
    if not points:
        return cells
    varies = difference.basis == "seeds" and difference.deviation != 0  # where all pairs are alike nothing is known
    needed = inference.seeds_needed(difference.deviation, ONE_POINT) if varies else None
    return (*cells, formatting.MISSING if needed is None else f"{needed:,}")


def note(comparison: Comparison, found: Sequence[Against]) -> str:
    """What the table says, and how it was reckoned."""
    by_verdict: dict[str, list[str]] = {}
    for one in found:
        by_verdict.setdefault(one.verdict, []).append(one.row.variant)
    bases = {one.difference.basis for one in found if one.verdict}
    alone = " in its one run" if bases == {"test examples"} else ""
    parts = [
        f"{formatting.listed(by_verdict[verdict])} {'is' if len(by_verdict[verdict]) == 1 else 'are'} {words}{alone}"
        for verdict, words in (
            ("better", "better"),
            ("worse", "worse"),
            ("tie", "neither clearly better nor clearly worse"),
        )
        if verdict in by_verdict
    ]
    how = {
        "seeds": "Differences are paired over the seeds that both have (Student's t), p-values of all variants "
        "corrected together (Holm). All seeds share one test set.",
        "test examples": "One seed: differences are paired over the test examples (bootstrap), p-values corrected "
        "together (Holm). They say what another test set could show, not what another seed would.",
    }
    too_few = f"No variant is called better or worse: that takes {summary.MIN_SEEDS} seeds that both have."
    said = f"Against {comparison.reference}, {'; '.join(parts)}." if parts else too_few
    needed = ""
    if "seeds" in bases and _in_points(comparison):
        needed = ("The last column: seeds that a difference of one point would need to be found in 80 % of such "
                  "comparisons, as the pairs vary here.")  # fmt: skip
    return " ".join(filter(None, [said, *(how[basis] for basis in sorted(bases)), needed]))


def as_json(comparison: Comparison, rows: Sequence[Row], found: Sequence[Against]) -> dict[str, Any]:
    """What `comparison.json` holds: the numbers of the main table and of this one, None where there is none."""
    by_variant: Mapping[str, Against] = {one.row.variant: one for one in found}
    return {
        "name": comparison.name,
        "metric": comparison.metric,
        "better": "max" if comparison.higher_is_better else "min",
        "baseline": comparison.reference,
        "variants": {row.variant: _entry(row, by_variant.get(row.variant)) for row in rows},
    }


def _entry(row: Row, one: Against | None) -> dict[str, Any]:
    half, mean = row.quality.half_width, row.quality.mean
    entry: dict[str, Any] = {
        "mean": mean,
        "interval": None if half is None else [mean - half, mean + half],
        "seeds": row.quality.count,
        "train_flops": row.train_flops,
        "step_time_ms": row.step_time_ms,
        "excluded": excluded(row) or None,
        "difference": None,
        "difference_interval": None,
        "p_adjusted": None,
        "paired_over": None,
        "verdict": None,
    }
    if one is None or not math.isfinite(one.difference.mean):
        return entry
    interval = [one.difference.low, one.difference.high]
    return entry | {
        "difference": one.difference.mean,
        "difference_interval": interval if math.isfinite(interval[0]) else None,
        "p_adjusted": one.p_adjusted,
        "paired_over": f"{one.difference.count} {one.difference.basis}",
        "verdict": one.verdict or None,
    }
