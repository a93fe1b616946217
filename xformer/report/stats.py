"""Intervals over seeds and over test examples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from xformer import extras

stats = extras.Lazy("scipy.stats")  # optional, and slow to import


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Mean of `count` seeds, half the width of its 95 % interval (None where one seed can't tell), both extremes."""

    mean: float
    half_width: float | None
    count: int
    lowest: float = math.nan
    highest: float = math.nan


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of the mean (Student's t, len(values) - 1 degrees of freedom); NaNs are left out."""
    values = [value for value in values if math.isfinite(value)]
    count = len(values)
    if count == 0:
        return Estimate(math.nan, None, 0)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1, mean, mean)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half_width = float(stats.t.ppf(0.975, count - 1)) * deviation / math.sqrt(count)
    return Estimate(mean, half_width, count, min(values), max(values))


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of `count` examples (Wilson 1927): honest for small counts and shares near 0 and 1."""
    z = float(stats.norm.ppf(0.975))
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def at_chance(accuracy: float, count: float, majority: float) -> bool:
    """Whether `accuracy` on `count` test examples is not clearly above always answering the commonest class.

    False where a number is missing: then there is nothing to judge.
    """
    if not (math.isfinite(majority) and math.isfinite(accuracy)):
        return False
    if not math.isfinite(count) or count < 1:
        return accuracy <= majority
    return wilson(accuracy, round(count))[0] <= majority
