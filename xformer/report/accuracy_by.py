"""Test accuracy by what is known of each example: how far away what decides it is, or how long its text is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xformer.report import formatting, labels, quality, style, summary
from xformer.report.results import Comparison, Run, number
from xformer.report.stats import Estimate, estimate

Mark = tuple[int, str, str | None]
"""Where an upright dashed line stands, what is written beside it, and the variant whose colour it has, if any."""


class Bin(NamedTuple):
    """Values from `low` up to and with `high`, and the accuracy over seeds there."""

    low: int
    high: int
    accuracy: Estimate


class Examples(NamedTuple):
    """The test examples of a run: their values, accuracies and weights, each [examples]."""

    values: np.ndarray
    accuracy: np.ndarray
    weights: np.ndarray


Kept = Mapping[str, Sequence[Examples]]
"""What each finished run kept of its test examples, by variant."""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """What accuracy is drawn by.

    Attributes:
      key: its name in `test_examples.npz`; examples where it is 0 have none.
      file: of the picture.
      title: of the picture.
      axis: what stands below the horizontal axis, which is logarithmic if `log`.
      caption: how the caption begins, COUNT standing for the number of examples and BINS for that of bins.
      edges: from all values, where bins begin, and behind the last where it ends.
      pooling: what the answer has to be read from, "" for anything.
    """

    key: str
    file: str
    title: str
    axis: str
    caption: str
    edges: Callable[[np.ndarray], list[int]]
    log: bool = False
    pooling: str = ""


def even_edges(values: np.ndarray, count: int = 12) -> list[int]:
    """Bins of 1 to the largest value, as even as whole numbers are, at most `count` of them."""
    furthest = int(values.max())
    return sorted({1 + round(index * furthest / count) for index in range(count + 1)})


def quantile_edges(values: np.ndarray, count: int = 8) -> list[int]:
    """At most `count` bins that hold about as many values each."""
    inner = np.quantile(values, np.arange(count) / count, method="inverted_cdf")
    return sorted({*(int(value) for value in inner), int(values.max()) + 1})


DISTANCE = Quantity(
    key="distance",
    file="distances.png",
    title="Accuracy by distance",
    axis="distance in tokens from where the answer is read",
    caption="Test accuracy by how far the symbol that decides is from the CLS vector in front of the text, COUNT "
    "examples a seed in BINS ranges of distances",
    edges=even_edges,
    pooling="cls",
)
LENGTH = Quantity(
    key="length",
    file="lengths.png",
    title="Accuracy by length",
    axis="length of the text in tokens, before it is cut",
    caption="Test accuracy by the length of the text (of two, the longer), COUNT examples a seed in BINS ranges that "
    "hold about as many examples each",
    edges=quantile_edges,
    log=True,
)


def read(comparison: Comparison, quantity: Quantity) -> Kept:
    """What the runs kept; nothing where answers are read from something else, or all values fall into one bin."""
    pooled = {run.pooling for run in comparison.all_runs() if run.result is not None}
    if quantity.pooling and pooled != {quantity.pooling}:
        return {}
    found = {
        variant: [own for run in comparison.finished(variant) if (own := _of_examples(run, quantity.key)) is not None]
        for variant in comparison.variants
    }
    kept = {variant: runs for variant, runs in found.items() if runs}
    return kept if kept and len(quantity.edges(values(kept))) > 2 else {}


def _of_examples(run: Run, key: str) -> Examples | None:
    kept = run.test_examples()
    # Rows of next tokens are pieces of texts, of which some ask the end alone: their length says nothing.
    if key not in kept or "accuracy" not in kept or "context_tokens" in kept:
        return None
    there = kept[key] > 0
    return Examples(kept[key][there], *kept["accuracy"][:, there]) if there.any() else None


def values(kept: Kept) -> np.ndarray:
    """Those of all examples."""
    return np.concatenate([examples.values for runs in kept.values() for examples in runs])


def bins(runs: Sequence[Examples], edges: Sequence[int]) -> list[Bin]:
    """The accuracy of a variant over its seeds, bin by bin; none that no example falls into.

    Args:
      runs: what its runs kept.
      edges: where bins begin, and behind the last where it ends.
    """
    found = []
    for low, end in itertools.pairwise(edges):
        means = []
        for examples in runs:
            inside = (low <= examples.values) & (examples.values < end)
            weights = examples.weights[inside].astype(np.float64)
            if weights.sum() > 0:
                means.append(float((examples.accuracy[inside] * weights).sum() / weights.sum()))
        if means:
            found.append(Bin(low, end - 1, estimate(means)))
    return found


def marks(comparison: Comparison, quantity: Quantity, reaches: Mapping[str, int]) -> list[Mark]:
    """Upright lines: how far each variant reaches, or where texts are cut.

    Args:
      reaches: the furthest distance, in tokens, from which anything gets to where the answer is read, by variant;
        variants that see everything are left out.
    """
    if quantity is DISTANCE:
        return [(reach, f"{variant} reaches {reach:,}", variant) for variant, reach in reaches.items() if reach > 0]
    known = {number(run.info, "max_len") for run in comparison.all_runs() if run.result is not None}
    most = next(iter(known)) if len(known) == 1 else math.nan
    return [(round(most), f"cut at {most:,.0f}", None)] if math.isfinite(most) else []


def picture(
    comparison: Comparison, quantity: Quantity, kept: Kept, upright: Sequence[Mark], theme: style.Theme
) -> bytes | None:
    """PNG of test accuracy by a quantity: mean over seeds with 95 % bands.

    None if no run has kept it, or if the runs were made on different data.

    Args:
      kept: what `read` gave.
      upright: what `marks` gave; those beyond all values are left out.
    """
    if not kept or summary.data_differ(comparison):
        return None
    palette = style.Palette(theme, comparison.variants)
    edges = quantity.edges(values(kept))
    low, high = (edges[0], edges[-1] - 1) if quantity.log else (0, edges[-1] - 1)
    drawn = {name: found for name, runs in kept.items() if (found := bins(runs, edges))}
    with style.figure(theme, 3.7) as (fig, ax):
        lines = []
        for variant, found in drawn.items():
            middles = [_middle(part, quantity.log) for part in found]
            means = [part.accuracy.mean for part in found]
            lows, highs = zip(*(quality.ends("accuracy", part.accuracy) for part in found), strict=True)
            colour = palette.colour(variant)
            ax.plot(middles, means, color=colour, ls=palette.dashes(variant), marker=palette.marker(variant), ms=4.5)
            ax.fill_between(middles, lows, highs, color=colour, alpha=0.13, lw=0)
            lines.append(list(zip(middles, means, strict=True)))
        ax.set_xlim(low, high + 1)
        if quantity.log:
            style.log_axis(ax, "x", lambda value: formatting.length(round(value)), base=2)
        ax.set_ylim(-0.03, 1.06)
        ax.set_xlabel(quantity.axis)
        ax.set_ylabel("test accuracy")
        style.percent_axis(ax)
        guess = summary.baseline(comparison, "test") if comparison.metric == "accuracy" else math.nan
        chance = quality.chance_line(ax, guess, theme, summary.baseline_title(comparison))
        marked: list[labels.Label] = []
        for place, text, owner in upright:
            if low < place < high and (owner is None or owner in drawn):
                colour = theme.muted if owner is None else palette.colour(owner)
                ax.axvline(place + 0.5, color=colour, lw=1, ls=(0, (4, 2)))
                marked.append((place + 0.5, 0.5, text, colour))
                lines.append([(place + 0.5, 0.0), (place + 0.5, 1.0)])
        fig.draw_without_rendering()
        ends = [(*line[-1], name, palette.colour(name)) for name, line in zip(drawn, lines[: len(drawn)], strict=True)]
        lines += [[(max(low, 1), y), (high, y)] for _, y, _, _ in chance]
        labels.label_points(ax, [*ends, *marked, *chance], lines)
        return style.png(fig)


def _middle(part: Bin, log: bool) -> float:
    return math.sqrt(part.low * part.high) if log else (part.low + part.high) / 2


def caption(comparison: Comparison, quantity: Quantity, kept: Kept, upright: Sequence[Mark], over: str) -> str:
    """What stands below the picture."""
    counts = [run.test("examples") for run in comparison.all_runs() if math.isfinite(run.test("examples"))]
    num_bins = len(quantity.edges(values(kept))) - 1 if kept else 0
    begins = quantity.caption.replace("COUNT", f"{int(min(counts, default=0)):,}").replace("BINS", str(num_bins))
    line = f"{begins}; {over}."
    if quantity is DISTANCE:
        line += (
            " A dashed upright line: beyond it nothing can get to the CLS vector through all layers of that variant."
        )
    elif kept and any(place < values(kept).max() for place, _, _ in upright):
        line += " A dashed upright line: longer texts are cut there."
    return line
