"""Text beside lines and points, placed so that nothing covers anything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xformer import extras
from xformer.report import formatting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

patheffects = extras.Lazy("matplotlib.patheffects")
text_boxes = extras.Lazy("matplotlib.text")
transforms = extras.Lazy("matplotlib.transforms")

Label = tuple[float, float, str, str]
"""x, y in data coordinates, text, colour."""


def label_ends(ax: Axes, ends: Sequence[Label], size: float = 8.5) -> None:
    """Writes each label right of all points, moved up or down until none overlap, within the height of the axes.

    Call when limits, scales and layout are final. Each label is joined to its point by a thin line. Labels that do not
    all fit are written closer together.
    """
    to_axes = ax.transData + ax.transAxes.inverted()
    points = sorted(((*to_axes.transform((x, y)), text, colour) for x, y, text, colour in ends), key=lambda p: p[1])
    side = max((point[0] for point in points), default=1.0) + 0.06
    height = ax.get_window_extent().height / _figure(ax).dpi * 72
    edge = 0.5 * size / height  # a label reaches this far above and below its middle
    gap = min(1.25 * size / height, (1 - 2 * edge) / max(1, len(points) - 1))
    places = spread([point[1] for point in points], gap, edge, 1 - edge)
    for (x, y, text, colour), place in zip(points, places, strict=True):
        ax.annotate(
            formatting.short(text, 20), xy=(x, y), xytext=(side, place), xycoords="axes fraction",
            textcoords="axes fraction", color=colour, fontsize=size, va="center", ha="left", annotation_clip=False,
            arrowprops=leader(colour) | {"relpos": (0, 0.5)},  # from the middle of the label's left edge
        )  # fmt: skip


def leader(colour: str) -> dict[str, Any]:
    """The thin line from a label to its point, dotted: nobody must read it as a curve."""
    return {"arrowstyle": "-", "color": colour, "lw": 0.7, "ls": ":", "alpha": 0.8, "shrinkA": 1, "shrinkB": 4}


def spread(places: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Moves sorted places as little as needed (least squares) into `low` to `high`, neighbours at least `gap` apart."""
    # Shifting place i down by i * gap turns "at least gap apart" into "in order": isotonic regression by pooling. The
    # best places within bounds are those without, cut at the bounds.
    pools: list[tuple[float, int]] = []
    for index, place in enumerate(places):
        mean, count = place - index * gap, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    ordered = [mean for mean, count in pools for _ in range(count)]
    last = high - (len(places) - 1) * gap
    return [min(max(place, low), last) + index * gap for index, place in enumerate(ordered)]


def label_points(
    ax: Axes, points: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]] = (), size: float = 8.5
) -> None:
    """Writes each label beside its point, on the side where it covers no point, no other label and none of `lines`.

    Call when limits, scales and layout are final. `lines` are polylines in data coordinates.
    """
    fig = _figure(ax)
    renderer = fig.canvas.get_renderer()
    pixel = fig.dpi / 72
    frame = ax.get_window_extent(renderer)
    drawn = np.array([place for line in lines for place in _along(ax, line, 2 * pixel)]).reshape(-1, 2)
    centres = [ax.transData.transform((x, y)) for x, y, _, _ in points]
    halo = [patheffects.withStroke(linewidth=2.5, foreground=ax.get_facecolor())]
    taken = [transforms.Bbox.from_bounds(x - 5 * pixel, y - 5 * pixel, 10 * pixel, 10 * pixel) for x, y in centres]
    for x, y, text, colour in points:
        best: tuple[float, Any, Bbox] | None = None
        for dx, dy in _sides():
            label = ax.annotate(
                formatting.short(text), xy=(x, y), xytext=(dx, dy), textcoords="offset points", color=colour,
                fontsize=size,
                ha="left" if dx > 0 else "right" if dx < 0 else "center",
                va="bottom" if dy > 0 else "top" if dy < 0 else "center", path_effects=halo,
                arrowprops=leader(colour) if np.hypot(dx, dy) > 14 else None,
            )  # fmt: skip
            label.update_positions(renderer)
            box = text_boxes.Text.get_window_extent(label, renderer)  # without the leader
            inside = (drawn > (box.x0, box.y0)) & (drawn < (box.x1, box.y1))
            outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
            faults = 50 * sum(map(box.overlaps, taken)) + 50 * outside + int(inside.all(axis=1).sum())
            faults += max(0.0, 0.4 * np.hypot(dx, dy) - 4)  # rather across a line than far from its point
            if best is not None and faults >= best[0]:
                label.remove()
                continue
            if best is not None:
                best[1].remove()
            best = (faults, label, box)
            if not faults:
                break
        if best is not None:
            taken.append(best[2])


def _sides() -> Iterator[tuple[float, float]]:
    """Offsets to try, in points: near before far, right before left before above and below."""
    for radius in (8, 12, 18, 26):
        slant = 0.7 * radius
        yield from ((radius, 0), (-radius, 0), (slant, slant), (slant, -slant), (-slant, slant), (-slant, -slant))
        yield from ((0, radius), (0, -radius))


def _along(ax: Axes, line: Sequence[tuple[float, float]], step: float) -> Iterator[np.ndarray]:
    places = ax.transData.transform(line)
    for start, end in itertools.pairwise(places):
        yield from np.linspace(start, end, 2 + int(np.hypot(*(end - start)) / step))


def _figure(ax: Axes) -> Any:
    fig = ax.get_figure()
    assert fig is not None
    return fig
