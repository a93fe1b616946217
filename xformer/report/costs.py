"""What attention itself costs against length, and from where on a variant is cheaper than full attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xformer.report import formatting, labels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class CostRow:
    """One variant's attention at one length; NaN where nothing was measured.

    Attributes:
      length: tokens, queries and keys alike.
      flops: of one forward call.
      train_flops: of one forward and backward call.
      time_ms: measured, one forward call.
      train_time_ms: measured, one forward and backward call.
      memory_bytes: temporary memory of the compiled forward and backward call.
      note: why something is missing, if it is.
      uncounted: what the FLOPs leave out because it could not be counted.
      forward_bytes: temporary memory of the compiled forward call.
    """

    variant: str
    length: int
    flops: float
    train_flops: float = math.nan
    time_ms: float = math.nan
    train_time_ms: float = math.nan
    memory_bytes: float = math.nan
    note: str = ""
    uncounted: tuple[str, ...] = ()
    forward_bytes: float = math.nan


@dataclasses.dataclass(frozen=True)
class Panel:
    """One cost: the field of CostRow, its title, and how a number and a tick of the axis are spelt."""

    key: str
    title: str
    spell: Callable[[float], str]
    tick: Callable[[float], str]
    base: int = 10


PANELS = (
    Panel("flops", "FLOPs, forward", formatting.si, formatting.tick_flops),
    Panel("train_flops", "FLOPs, forward + backward", formatting.si, formatting.tick_flops),
    Panel("time_ms", "time, forward", formatting.milliseconds, formatting.tick_milliseconds),
    Panel("train_time_ms", "time, forward + backward", formatting.milliseconds, formatting.tick_milliseconds),
    Panel("forward_bytes", "temporary memory, forward", formatting.mebibytes, formatting.tick_bytes, base=4),
    Panel("memory_bytes", "temporary memory, forward + backward", formatting.mebibytes, formatting.tick_bytes, base=4),
)


def series(rows: Sequence[CostRow], variant: str, key: str) -> list[tuple[int, float]]:
    """(length, value) of a variant by rising length, without what is missing."""
    found = [(row.length, float(getattr(row, key))) for row in rows if row.variant == variant]
    return sorted((length, value) for length, value in found if math.isfinite(value) and value > 0)


def crossover(rows: Sequence[CostRow], variant: str, reference: str, key: str) -> int | None:
    """The smallest length from which on the variant costs less than the reference, at every length both have.

    None where it does not: not at the longest length, or nothing to compare.
    """
    full = dict(series(rows, reference, key))
    shared = [(length, value < full[length]) for length, value in series(rows, variant, key) if length in full]
    found = None
    for length, cheaper in shared:
        found = (length if found is None else found) if cheaper else None
    return found


def crossover_text(rows: Sequence[CostRow], variant: str, reference: str, key: str) -> str:
    """Where the variant is cheaper, among the lengths that both have: a dash where there is none.

    `from 2,048`, `at all from 512 to 4,096`, `not up to 4,096`; with a single length `at 512` or `not at 512`.
    """
    full = dict(series(rows, reference, key))
    shared = [length for length, _ in series(rows, variant, key) if length in full]
    if not shared or variant == reference:
        return formatting.MISSING
    found = crossover(rows, variant, reference, key)
    if len(shared) == 1:
        return f"{'not ' if found is None else ''}at {shared[0]:,}"
    if found is None:
        return f"not up to {shared[-1]:,}"
    return f"at all from {found:,} to {shared[-1]:,}" if found == shared[0] else f"from {found:,}"


def coverage(rows: Sequence[CostRow]) -> str:
    """At which lengths costs were measured, and at which they were not: a sentence or two, nothing without rows."""
    everything = sorted({row.length for row in rows})
    if not everything:
        return ""
    groups: dict[tuple[int, ...], list[str]] = {}
    for variant in dict.fromkeys(row.variant for row in rows):
        groups.setdefault(tuple(length for length, _ in series(rows, variant, "time_ms")), []).append(variant)
    if list(groups) == [()]:
        return f"Time and memory were not measured; FLOPs were counted at {formatting.lengths(everything)}."
    where = lambda lengths: f"at {formatting.lengths(lengths)}" if lengths else "at no length"
    if len(groups) == 1:
        text = f"Time and memory were measured {where(next(iter(groups)))}."
    else:
        each = (f"of {formatting.listed(names)} {where(lengths)}" for lengths, names in groups.items())
        text = f"Time and memory were measured {'; '.join(each)}."
    measured = {length for lengths in groups for length in lengths}
    missing = [length for length in everything if length not in measured]
    return text + (f" At {formatting.lengths(missing)} FLOPs were counted, nothing was measured." if missing else "")


def warnings(rows: Sequence[CostRow]) -> list[str]:
    """What was to be measured or counted and was not, one line for each reason and set of lengths."""
    lengths: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.note:
            lengths.setdefault((row.note, row.variant), []).append(row.length)
    variants: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (note, variant), found in lengths.items():
        variants.setdefault((note, tuple(sorted(found))), []).append(variant)
    return [
        f"cost of attention of {formatting.listed(names)} at {formatting.lengths(found)}: {note}"
        for (note, found), names in variants.items()
    ]


def uncounted(rows: Sequence[CostRow]) -> list[str]:
    """What the FLOPs of any row leave out because it could not be counted."""
    return sorted({name for row in rows for name in row.uncounted})


def picture(
    rows: Sequence[CostRow],
    variants: Sequence[str],
    reference: str,
    theme: style.Theme,
    panels: Sequence[Panel] = PANELS,
) -> bytes | None:
    """PNG of every panel that has a value: a marker where there is one, lines between neighbouring lengths that have.

    A ring marks the length from which a variant is cheaper than `reference`.
    """
    panels = [panel for panel in panels if any(series(rows, variant, panel.key) for variant in variants)]
    if not panels:
        return None
    palette = style.Palette(theme, variants)
    columns = theme.columns(len(panels), most=2)
    lines = math.ceil(len(panels) / columns)
    with style.figure(theme, 3.1 * lines, 0.1, nrows=lines, ncols=columns, squeeze=False) as (fig, axes):
        for ax in axes.flat[len(panels) :]:
            ax.remove()
        ends = [_draw(ax, panel, rows, reference, palette) for ax, panel in zip(axes.flat, panels, strict=False)]
        # Labels need final places, and the layout needs to know that there are labels: lay out with them, then redo.
        for ax, labels_ in zip(axes.flat, ends, strict=False):
            labels.label_ends(ax, labels_, size=8)
        fig.draw_without_rendering()
        for ax, labels_ in zip(axes.flat, ends, strict=False):
            for text in list(ax.texts):
                text.remove()
            labels.label_ends(ax, labels_, size=8)
        return style.png(fig)


def _draw(
    ax: Axes, panel: Panel, rows: Sequence[CostRow], reference: str, palette: style.Palette
) -> list[labels.Label]:
    """Draws a panel; returns what to write at the ends of its lines."""
    drawn = {name: dict(points) for name in palette.variants if (points := series(rows, name, panel.key))}
    lengths = sorted({row.length for row in rows})
    for variant, values in drawn.items():
        colour = palette.colour(variant)
        # NaN where nothing was measured, so no line is drawn across it.
        line = [values.get(length, math.nan) for length in lengths]
        ax.plot(lengths, line, color=colour, ls=palette.dashes(variant), lw=1.6, marker=palette.marker(variant), ms=4.5)
        start = crossover(rows, variant, reference, panel.key)
        shared = values.keys() & drawn.get(reference, {}).keys()
        if start is not None and variant != reference and len(shared) > 1:
            ax.plot(start, values[start], "o", ms=10, mfc="none", mec=colour, mew=1.3)
    ax.set_title(panel.title)
    style.length_axis(ax, lengths)
    style.log_axis(ax, "y", panel.tick, panel.base)
    return [(max(values), values[max(values)], name, palette.colour(name)) for name, values in drawn.items()]
