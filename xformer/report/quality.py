"""Pictures of quality: against training FLOPs while training, and at the end against what it took."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from xformer.report import formatting, labels, style
from xformer.report.results import Comparison
from xformer.report.stats import Estimate, estimate
from xformer.report.summary import Row, baseline, baseline_title, data_differ, others

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, Estimate]


class Panel(NamedTuple):
    """One way to look at cost: its title, its axis, and what a row costs."""

    title: str
    label: str
    cost: Callable[[Row], float]
    tick: Callable[[float], str]


PANELS = (
    Panel("against training FLOPs", "training FLOPs", lambda row: row.train_flops, formatting.tick_flops),
    Panel(
        "against measured time", "time of a training step", lambda row: row.step_time_ms, formatting.tick_milliseconds
    ),
)


def mean_curve(comparison: Comparison, variant: str) -> list[Point]:
    """(training FLOPs, metric over seeds) at every evaluation that all finished seeds of the variant share."""
    curves = [curve for run in comparison.finished(variant) if (curve := run.curve(comparison.metric))]
    length = min((len(curve) for curve in curves), default=0)
    points = []
    for index in range(length):
        flops = [curve[index][0] for curve in curves]
        values = estimate([curve[index][1] for curve in curves])
        if all(math.isfinite(value) and value > 0 for value in flops) and values.count:
            points.append((math.fsum(flops) / len(flops), values))
    return points


def curves(comparison: Comparison, theme: style.Theme) -> bytes | None:
    """PNG of validation quality against training FLOPs: mean over seeds with 95 % bands.

    None if there is no run, or if the runs were made on different data.
    """
    if data_differ(comparison):
        return None
    drawn = {name: points for name in comparison.variants if (points := mean_curve(comparison, name))}
    if not drawn:
        return None
    palette = style.Palette(theme, comparison.variants)
    with style.figure(theme, 3.7) as (fig, ax):
        for variant, points in drawn.items():
            flops, means = [x for x, _ in points], [value.mean for _, value in points]
            lows, highs = zip(*(ends(comparison.metric, value) for _, value in points), strict=True)
            colour = palette.colour(variant)
            ax.plot(flops, means, color=colour, ls=palette.dashes(variant), marker=palette.marker(variant), ms=4.5)
            ax.fill_between(flops, lows, highs, color=colour, alpha=0.13, lw=0)
        every = [value for points in drawn.values() for _, value in points]
        chance = baseline(comparison, "validation")
        style.log_axis(ax, "x", formatting.tick_flops)
        ax.set_xlabel("training FLOPs so far")
        _quality_axis(ax, comparison, every, "validation", chance)
        line = chance_line(ax, chance, theme, baseline_title(comparison))
        line += _other_lines(ax, comparison, "validation", theme)
        fig.draw_without_rendering()
        last = [(points[-1][0], points[-1][1].mean, name, palette.colour(name)) for name, points in drawn.items()]
        lines = [[(x, value.mean) for x, value in points] for points in drawn.values()]
        lines += [[(x, y), (0.8 * x, y)] for x, y, _, _ in line]
        labels.label_points(ax, [*last, *line], lines)
        return style.png(fig)


def pareto(comparison: Comparison, rows: Sequence[Row], theme: style.Theme) -> bytes | None:
    """PNG of test quality against training FLOPs and against step time, with the front of what nothing dominates.

    None if there is no run, or if the runs were made on different data.
    """
    rows = [] if data_differ(comparison) else [row for row in rows if row.quality.count]
    panels = [panel for panel in PANELS if any(_positive(panel.cost(row)) for row in rows)]
    if not panels:
        return None
    palette = style.Palette(theme, comparison.variants)
    columns = theme.columns(len(panels), most=2)
    lines = math.ceil(len(panels) / columns)
    grid = {"nrows": lines, "ncols": columns, "sharey": True, "squeeze": False}
    with style.figure(theme, 3.5 * lines, 0.04 * lines, **grid) as (fig, axes):
        for ax, panel in zip(axes.flat, panels, strict=True):
            _draw_panel(ax, panel, comparison, rows, palette)
        for ax in axes[:, 1:].flat:
            ax.set_ylabel("")
        fig.draw_without_rendering()
        for ax, panel in zip(axes.flat, panels, strict=True):
            shown = [row for row in rows if _positive(panel.cost(row))]
            places = [(panel.cost(row), row.quality.mean, row.variant, palette.colour(row.variant)) for row in shown]
            bars = [[(panel.cost(row), end) for end in ends(comparison.metric, row.quality)] for row in shown]
            best = [
                (panel.cost(row), row.quality.mean) for row in front(shown, panel.cost, comparison.higher_is_better)
            ]
            labels.label_points(ax, places, [*bars, best])
        return style.png(fig)


def _draw_panel(ax: Axes, panel: Panel, comparison: Comparison, rows: Sequence[Row], palette: style.Palette) -> None:
    shown = [row for row in rows if _positive(panel.cost(row))]
    best = front(shown, panel.cost, comparison.higher_is_better)
    costs = [panel.cost(row) for row in shown]
    ax.plot(
        [panel.cost(row) for row in best], [row.quality.mean for row in best],
        color=palette.theme.muted, lw=1, ls="--", zorder=1,
    )  # fmt: skip
    for row, x in zip(shown, costs, strict=True):
        colour = palette.colour(row.variant)
        low, high = ends(comparison.metric, row.quality)
        bar = [[row.quality.mean - low], [high - row.quality.mean]]
        ax.errorbar(
            x, row.quality.mean, yerr=None if row.quality.half_width is None else bar, fmt=palette.marker(row.variant),
            ms=7, lw=1.2, capsize=3, color=colour, mfc=colour if row in best else palette.theme.paper, mew=1.5,
        )  # fmt: skip
    ax.set_title(panel.title)
    ax.set_xlabel(panel.label)
    style.margins_log(ax, costs)
    style.log_axis(ax, "x", panel.tick)
    _quality_axis(ax, comparison, [row.quality for row in rows], "test")
    chance_line(ax, baseline(comparison, "test"), palette.theme, baseline_title(comparison))
    _other_lines(ax, comparison, "test", palette.theme)


def front(rows: Sequence[Row], cost: Callable[[Row], float], higher_is_better: bool) -> list[Row]:
    """The rows that no other beats in both cost and quality, by rising cost; none with a run at chance level.

    What has learnt nothing is cheap for nothing.
    """
    sign = 1 if higher_is_better else -1
    kept: list[Row] = []
    learnt = [row for row in rows if not row.chance_seeds]
    for row in sorted(learnt, key=lambda row: (cost(row), -sign * row.quality.mean)):
        if not kept or sign * row.quality.mean > sign * kept[-1].quality.mean:
            kept.append(row)
    return kept


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def ends(metric: str, value: Estimate) -> tuple[float, float]:
    """Both ends of the interval over seeds; that of an accuracy ends at 0 and 1, that of a perplexity at 1."""
    half = value.half_width or 0.0
    low, high = value.mean - half, value.mean + half
    if metric == "perplexity":
        return min(max(low, 1.0), value.mean), high
    return (max(low, 0.0), min(high, 1.0)) if metric == "accuracy" else (low, high)


def _quality_axis(
    ax: Axes, comparison: Comparison, values: Sequence[Estimate], split: str, also: float = math.nan
) -> None:
    """A y axis that holds every interval whole, and the value `also`; logarithmic for a perplexity."""
    shown = [end for value in values for end in ends(comparison.metric, value)]
    shown += [also] if math.isfinite(also) else []
    low, high = min(shown), max(shown)
    ax.set_ylabel(f"{split} {comparison.metric}")
    if style.is_logarithmic(comparison.metric, shown):
        room = (high / low) ** 0.06 if high > low else 1.02
        ax.set_ylim(low / room, high * room)
        style.log_axis(ax, "y", lambda value: f"{value:,g}")
        return
    margin = 0.06 * (high - low) or 0.02
    ax.set_ylim(low - margin, high + margin)
    if comparison.metric == "accuracy":
        style.percent_axis(ax)


def chance_line(ax: Axes, score: float, theme: style.Theme, title: str) -> list[labels.Label]:
    """Draws what a guesser scores that reads nothing, if the axis reaches it; what to write at the line's end."""
    low, high = ax.get_ylim()
    if not low <= score <= high:
        return []
    ax.axhline(score, color=theme.muted, lw=1, ls=":")
    return [(ax.get_xlim()[1], score, title, theme.muted)]


def _other_lines(ax: Axes, comparison: Comparison, split: str, theme: style.Theme) -> list[labels.Label]:
    """Draws what other simple methods score, the axis made longer where needed; what to write at the lines' ends."""
    found = others(comparison, split)
    for _, score in found.values():
        low, high = ax.get_ylim()
        margin = 0.05 * (max(high, score) - min(low, score))
        ax.set_ylim(min(low, score - margin), max(high, score + margin))
        ax.axhline(score, color=theme.muted, lw=1, ls="-.")
    return [(ax.get_xlim()[1], score, title, theme.muted) for title, (_, score) in found.items()]
