"""How much step times varied, and whether the machine was evidently busy with something else."""

from __future__ import annotations

import math

from xformer.report import formatting
from xformer.report.results import Comparison, Run, number

SPREAD = 1.5  # 90 % quantile over median, within a run
APART = 1.3  # slowest over fastest median, among runs of one variant, which do the same work
RULE = (
    f"a machine counts as loaded where one step in ten took more than {SPREAD:g} times the median of its run, or the "
    f"medians of one variant's runs lie more than {APART:g} times apart"
)


def spread(run: Run) -> tuple[float, float, float]:
    """(10 % quantile, median, 90 % quantile) of a run's step times in milliseconds; NaN where it doesn't say."""
    low, high = (number(run.result, f"step_time_p{share}_ms") for share in (10, 90))
    return low, number(run.result, "step_time_ms"), high


def spelt(run: Run) -> str:
    """`12.3 ms (11.9 to 14.0)`: median, and the middle 80 % of the steps."""
    low, median, high = spread(run)
    text = formatting.milliseconds(median)
    if not (math.isfinite(low) and math.isfinite(high)):
        return text
    return f"{text} ({formatting.milliseconds(low)} to {formatting.milliseconds(high)})"


def warnings(comparison: Comparison) -> list[str]:
    """One line where the machine was loaded by `RULE`, so that times say little; FLOPs are what they are."""
    uneven, apart = [], []
    for variant in comparison.variants:
        runs = comparison.finished(variant)
        for run in runs:
            _, median, high = spread(run)
            if median > 0 and high > SPREAD * median:
                uneven.append(f"{variant}-{run.seed} ({high / median:.1f})")
        medians = [median for run in runs if (median := spread(run)[1]) > 0]
        if medians and max(medians) > APART * min(medians):
            apart.append(f"{variant} ({max(medians) / min(medians):.1f})")
    found = []
    if uneven:
        found.append(f"steps of one run took unequal times, 90 % quantile over median: {', '.join(uneven)}")
    if apart:
        found.append(f"runs of one variant had unequal step times, slowest over fastest: {', '.join(apart)}")
    if not found:
        return []
    return [f"the machine was loaded while runs were timed, so do not trust step times: {'; '.join(found)}"]
