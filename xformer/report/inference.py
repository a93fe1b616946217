"""Differences between two variants and their intervals, paired over seeds or over test examples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from xformer import extras

stats = extras.Lazy("scipy.stats")  # optional, and slow to import

RESAMPLES = 2000
MOST_SEEDS = 1000  # beyond that many nobody plans
QUANTILES = 2000  # of the estimated standard deviation, for the power of a test


@dataclasses.dataclass(frozen=True)
class Difference:
    """A mean difference and its 95 % interval.

    Attributes:
      mean: of what is compared minus the baseline.
      low, high: the interval; NaN where nothing can be said.
      p: two-sided p-value of no difference; NaN where nothing can be said.
      count: pairs of seeds, or of test examples.
      basis: "seeds" or "test examples": what varies between the pairs.
      deviation: standard deviation of the differences between pairs.
    """

    mean: float
    low: float
    high: float
    p: float
    count: int
    basis: str
    deviation: float


def paired_seeds(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference:
    """Student's t over the seeds that both have; the same seed has the same data order and, often, the same start.

    Where all pairs differ by the same, p is that of a sign test.

    Args:
      values, baseline: by seed; what is not finite is left out.
    """
    shared = [seed for seed in values if seed in baseline]
    pairs = [values[seed] - baseline[seed] for seed in shared]
    pairs = [pair for pair in pairs if math.isfinite(pair)]
    count = len(pairs)
    mean = math.fsum(pairs) / count if count else math.nan
    if count < 2:
        return Difference(mean, math.nan, math.nan, math.nan, count, "seeds", math.nan)
    deviation = math.sqrt(math.fsum((pair - mean) ** 2 for pair in pairs) / (count - 1))
    error = deviation / math.sqrt(count)
    half = float(stats.t.ppf(0.975, count - 1)) * error
    same = 2.0 ** (1 - count) if mean else 1.0  # no spread, as of few test examples: t would say 0; the sign test
    p = 2 * float(stats.t.sf(abs(mean) / error, count - 1)) if error else same
    return Difference(mean, mean - half, mean + half, p, count, "seeds", deviation)


def paired_examples(values: np.ndarray, baseline: np.ndarray, seed: int = 0) -> Difference:
    """Percentile bootstrap over the test examples that both runs scored (Efron and Tibshirani 1993, section 13.3).

    It says what another test set could have shown, not what another seed would.

    Args:
      values, baseline: float `[2, examples]`, the metric's value and weight of each example, in the same order.
      seed: of the resampling.
    """
    count = values.shape[1]
    sums = np.stack([values[0] * values[1], values[1], baseline[0] * baseline[1], baseline[1]]).astype(np.float64)
    score = lambda total: total[0] / total[1] - total[2] / total[3]
    mean = float(score(sums.sum(1)))
    if count < 2 or not math.isfinite(mean):
        return Difference(mean, math.nan, math.nan, math.nan, count, "test examples", math.nan)
    rng = np.random.default_rng(seed)
    drawn = np.array([score(sums[:, rng.integers(0, count, count)].sum(1)) for _ in range(RESAMPLES)])
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    tail = min((drawn <= 0).sum(), (drawn >= 0).sum())
    p = min(1.0, 2 * float(tail + 1) / (len(drawn) + 1))
    return Difference(mean, float(low), float(high), p, count, "test examples", float(drawn.std()) * math.sqrt(count))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for being several (Holm 1979): below 0.05 all at once, one is wrong in 5 % of cases at most.

    NaNs stay, and do not count.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if math.isfinite(p))
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[index] = largest
    return adjusted


def seeds_needed(deviation: float, difference: float, power: float = 0.8) -> int | None:
    """How many seeds a paired t test at 5 % needs to find a true difference with this probability.

    Args:
      deviation: standard deviation of the differences between pairs of seeds.
      difference: the true one.
      power: the probability.

    Returns:
      At least 2; None where the deviation is not known, or MOST_SEEDS are too few.
    """
    if not math.isfinite(deviation):
        return None
    if deviation == 0:
        return 2
    enough = lambda count: _power(count, difference / deviation) >= power
    if not enough(MOST_SEEDS):
        return None
    low, high = 1, MOST_SEEDS  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _power(count: int, effect: float) -> float:
    """The probability that |t| is critical, `effect` being the true difference in standard deviations of the pairs.

    The mean over the quantiles of the estimated standard deviation, as SciPy's noncentral t is NaN for large effects.
    """
    degrees, shift = count - 1, effect * math.sqrt(count)
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    critical = float(stats.t.ppf(0.975, degrees)) * np.sqrt(stats.chi2.ppf(shares, degrees) / degrees)
    return float(np.mean(stats.norm.cdf(shift - critical) + stats.norm.cdf(-shift - critical)))
