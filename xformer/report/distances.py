"""Accuracy by the distance of what decides an example from where the answer is read, for tasks that say it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xformer.report import labels, quality, style, summary
from xformer.report.results import Comparison, Run
from xformer.report.stats import Estimate, estimate

BINS = 12


class Bin(NamedTuple):
    """Distances from `low` up to and with `high`, in tokens, and the accuracy over seeds there."""

    low: int
    high: int
    accuracy: Estimate


Kept = Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]
"""(distance, accuracy) of the test examples of each finished run that kept them, by variant."""


def read(comparison: Comparison) -> Kept:
    """What the runs kept; nothing where answers are not read from a CLS vector."""
    if any(run.pooling != "cls" for run in comparison.all_runs() if run.result is not None):
        return {}
    found = {
        variant: [examples for run in comparison.finished(variant) if (examples := _of_examples(run)) is not None]
        for variant in comparison.variants
    }
    return {variant: runs for variant, runs in found.items() if runs}


def _of_examples(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """An example without a distance, which is kept as 0, is left out."""
    kept = run.test_examples()
    if "distance" not in kept or "accuracy" not in kept:
        return None
    there = kept["distance"] > 0
    return kept["distance"][there], kept["accuracy"][0][there]


def bins(kept: Sequence[tuple[np.ndarray, np.ndarray]], edges: Sequence[int]) -> list[Bin]:
    """The accuracy of a variant over its seeds, bin by bin; none that no example falls into.

    Args:
      kept: that of its runs.
      edges: where bins begin, in tokens, and behind the last where it ends.
    """
    found = []
    for low, end in itertools.pairwise(edges):
        values = [accuracy[(low <= distance) & (distance < end)] for distance, accuracy in kept]
        if any(some.size for some in values):
            found.append(Bin(low, end - 1, estimate([float(some.mean()) for some in values if some.size])))
    return found


def even_edges(furthest: int, count: int = BINS) -> list[int]:
    """Bins of 1 to `furthest` tokens, as even as whole numbers are, at most `count` of them."""
    return sorted({1 + round(index * furthest / count) for index in range(count + 1)})


def furthest(kept: Kept) -> int:
    """The largest distance of a test example; 0 where no run says one."""
    return max((int(distance.max(initial=0)) for runs in kept.values() for distance, _ in runs), default=0)


def picture(comparison: Comparison, kept: Kept, reaches: Mapping[str, int], theme: style.Theme) -> bytes | None:
    """PNG of test accuracy by distance: mean over seeds with 95 % bands, and how far each window reaches.

    Args:
      kept: what `read` gave.
      reaches: the furthest distance, in tokens, from which anything gets to where the answer is read, by variant;
        variants that see everything are left out.

    None if no run has kept distances, or if the runs were made on different data.
    """
    most = furthest(kept)
    if not most or summary.data_differ(comparison):
        return None
    palette = style.Palette(theme, comparison.variants)
    edges = even_edges(most)
    drawn = {name: found for name, runs in kept.items() if (found := bins(runs, edges))}
    with style.figure(theme, 3.7) as (fig, ax):
        lines = []
        for variant, found in drawn.items():
            middles = [(part.low + part.high) / 2 for part in found]
            means = [part.accuracy.mean for part in found]
            lows, highs = zip(*(quality.ends(comparison, part.accuracy) for part in found), strict=True)
            colour = palette.colour(variant)
            ax.plot(middles, means, color=colour, ls=palette.dashes(variant), marker=palette.marker(variant), ms=4.5)
            ax.fill_between(middles, lows, highs, color=colour, alpha=0.13, lw=0)
            lines.append(list(zip(middles, means, strict=True)))
        ax.set_xlim(0, most + 1)
        ax.set_ylim(-0.03, 1.06)
        ax.set_xlabel("distance in tokens from where the answer is read")
        ax.set_ylabel("test accuracy")
        style.percent_axis(ax)
        chance = quality.chance_line(
            ax, summary.baseline(comparison, "test"), theme, summary.baseline_title(comparison)
        )
        reached: list[labels.Label] = []
        for variant, reach in reaches.items():
            if variant in drawn and 0 < reach < most:
                ax.axvline(reach + 0.5, color=palette.colour(variant), lw=1, ls=(0, (4, 2)))
                reached.append((reach + 0.5, 0.5, f"{variant} reaches {reach:,}", palette.colour(variant)))
                lines.append([(reach + 0.5, 0.0), (reach + 0.5, 1.0)])
        fig.draw_without_rendering()
        ends = [(*line[-1], name, palette.colour(name)) for name, line in zip(drawn, lines[: len(drawn)], strict=True)]
        lines += [[(0, y), (most, y)] for _, y, _, _ in chance]
        labels.label_points(ax, [*ends, *reached, *chance], lines)
        return style.png(fig)


def caption(comparison: Comparison, kept: Kept, over: str) -> str:
    """What stands below the picture."""
    count = min((int(run.test("examples")) for run in comparison.all_runs() if math.isfinite(run.test("examples"))),
                default=0)  # fmt: skip
    return (
        f"Test accuracy by how far the symbol that decides is from the CLS vector in front of the text, {count:,} "
        f"examples a seed in {len(even_edges(furthest(kept))) - 1} ranges of distances; {over}. A dashed upright "
        "line: beyond it nothing can get to the CLS vector through all layers of that variant."
    )
