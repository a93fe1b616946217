"""Which pairs each variant considers, as in figure 1 of the BigBird paper (Zaheer et al. 2020, arXiv:2007.14062)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from xformer import extras
from xformer.report import style
from xformer.report.formatting import percent, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

colors = extras.Lazy("matplotlib.colors")

CELLS = 32  # cells along each side of a panel, at most
COLUMNS = 4  # panels side by side, at most


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A variant's pattern.

    Attributes:
      allowed: bool `[heads, q_len, kv_len]`, the pairs considered; the first head is drawn. None where there are no
        pairs of tokens.
      parts: what `allowed` is the union of (window, global, random), if it is made of parts; arrays of the same kind.
      note: said under the panel, or in it where there are no pairs.
    """

    allowed: np.ndarray | None
    parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass(frozen=True)
class _Panel:
    title: str
    layers: tuple[tuple[str, np.ndarray], ...]  # (colour, bool [q_len, kv_len]), later ones on top
    note: str


def picture(
    patterns: Mapping[str, Pattern], theme: style.Theme, parts: bool = True, most_cells: int = CELLS
) -> bytes | None:
    """PNG with a panel for each variant, then, with `parts`, one for each part of those that are made of several.

    A panel has at most `most_cells` cells on a side.
    """
    if not patterns:
        return None
    palette = style.Palette(theme, list(patterns))
    columns = theme.columns(COLUMNS, COLUMNS)
    panels: list[_Panel | None] = [_panel(variant, pattern, palette) for variant, pattern in patterns.items()]
    for variant, pattern in patterns.items():
        if parts and len(pattern.parts) > 1:
            panels += [None] * (-len(panels) % columns)  # each on a row of its own: the parts, then their union
            colours = _part_colours(pattern, theme)
            panels += [
                _Panel(f"{variant}: {part}", ((colours[part], mask[0]),), _share(mask))
                for part, mask in pattern.parts.items()
            ]
            panels.append(_panel(variant, pattern, palette))
    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    with style.figure(theme, 2.4 * lines, 0.08, nrows=lines, ncols=columns, squeeze=False) as (fig, axes):
        for index, ax in enumerate(axes.flat):
            panel = panels[index] if index < len(panels) else None
            if panel is None:
                ax.remove()
                continue
            _draw(ax, panel, theme, most_cells)
            ax.set_title(short(panel.title, 24), pad=14 if index < columns else 6)  # room for "keys"
        axes[0, 0].set_ylabel("queries", fontsize=8)
        axes[0, 0].annotate("keys", (0.5, 1.01), xycoords="axes fraction", ha="center", va="bottom", fontsize=8,
                            color=theme.muted)  # fmt: skip
        return style.png(fig)


def _panel(variant: str, pattern: Pattern, palette: style.Palette) -> _Panel:
    if pattern.allowed is None:
        return _Panel(variant, (), pattern.note)
    share = _share(pattern.allowed)
    note = f"{share},\n{pattern.note}" if pattern.note else share  # two lines, or neighbours meet
    if len(pattern.parts) > 1:
        colours = _part_colours(pattern, palette.theme)
        return _Panel(variant, tuple((colours[part], mask[0]) for part, mask in pattern.parts.items()), note)
    return _Panel(variant, ((palette.colour(variant), pattern.allowed[0]),), note)


def _share(mask: np.ndarray) -> str:
    return f"{percent(mask[0].mean(), digits=0)} of pairs"


def _part_colours(pattern: Pattern, theme: style.Theme) -> dict[str, str]:
    colours = theme.cycle[::-1]  # those that few variants have
    return {part: colours[index % len(colours)] for index, part in enumerate(pattern.parts)}


def _draw(ax: Axes, panel: _Panel, theme: style.Theme, most_cells: int) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(visible=False)
    ax.set_aspect("equal")
    for spine in ax.spines.values():
        spine.set(visible=True, color=theme.grid)
    if not panel.layers:
        ax.set(xlim=(0, 1), ylim=(0, 1))
        ax.text(0.5, 0.5, panel.note, ha="center", va="center", fontsize=8, color=theme.muted, wrap=True)
        return
    shape = panel.layers[0][1].shape
    rows, columns = (min(most_cells, size) for size in shape)
    image = np.broadcast_to(colors.to_rgb(theme.paper), (rows, columns, 3)).copy()
    for colour, mask in panel.layers:
        share = cells(mask, rows, columns)
        # A cell with one pair in a thousand must still be seen.
        opacity = np.where(share > 0, 0.35 + 0.65 * share, 0.0)[..., None]
        image = (1 - opacity) * image + opacity * np.asarray(colors.to_rgb(colour))
    ax.imshow(image, extent=(0, columns, rows, 0), interpolation="nearest")
    ax.hlines(range(1, rows), 0, columns, color=theme.paper, lw=0.5)
    ax.vlines(range(1, columns), 0, rows, color=theme.paper, lw=0.5)
    ax.set_xlabel(panel.note, fontsize=8)


def cells(mask: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Share of True in each of `rows x columns` cells of a bool `[q_len, kv_len]` array."""
    row_edges = np.linspace(0, mask.shape[0], rows + 1).round().astype(int)
    column_edges = np.linspace(0, mask.shape[1], columns + 1).round().astype(int)
    sums = np.add.reduceat(np.add.reduceat(mask.astype(np.int64), row_edges[:-1], 0), column_edges[:-1], 1)
    return sums / (np.diff(row_edges)[:, None] * np.diff(column_edges)[None])
