"""How long the texts of a data set are, as a picture."""

from __future__ import annotations

import numpy as np

from xformer.report import formatting, labels, style

MAX_BINS = 40


def picture(lengths: np.ndarray, max_len: int, theme: style.Theme) -> bytes:
    """PNG of the distribution of lengths on a logarithmic axis, its median, 90 % and 99 % drawn in.

    Args:
      lengths: of the examples in tokens, int [examples], one or more.
      max_len: tokens that a model reads of each; a dashed line, and the share behind it, where some have more.
    """
    edges = bin_edges(int(lengths.min()), int(lengths.max()), len(lengths))
    shares = np.histogram(lengths, edges)[0] / len(lengths)
    with style.figure(theme, 3.2) as (fig, ax):
        ax.stairs(shares, edges, fill=True, color=theme.cycle[1], alpha=0.45)
        ax.set_xlim(edges[0], edges[-1])
        style.log_axis(ax, "x", lambda value: formatting.length(round(value)), base=2)
        ax.set_xlabel("length in tokens")
        ax.set_ylabel("share of the texts")
        top = 1.35 * float(shares.max())  # room for what is written beside the lines
        ax.set_ylim(0, top)
        style.percent_axis(ax)
        upright: list[labels.Label] = []
        named = {"median:": 0.5, "90 %:": 0.9, "99 %:": 0.99}
        for number, (name, share) in enumerate(named.items()):
            value = float(np.quantile(lengths, share, method="inverted_cdf"))
            upright.append((value, (0.96 - 0.08 * number) * top, f"{name} {value:,.0f}", theme.muted))
            ax.axvline(value, color=theme.muted, lw=1, ls=":")
        if longer := float(np.mean(lengths > max_len)):
            upright.append((max_len + 0.5, 0.7 * top, f"{formatting.percent(longer)} above {max_len:,}", theme.ink))
            ax.axvline(max_len + 0.5, color=theme.ink, lw=1, ls=(0, (4, 2)))
        fig.draw_without_rendering()
        labels.label_points(ax, upright, [[(x, 0.0), (x, top)] for x, *_ in upright])
        return style.png(fig)


def bin_edges(low: int, high: int, count: int) -> np.ndarray:
    """Where bins of about equal width on a logarithmic axis begin, and the last ends; no length is on an edge.

    There are at most 40 bins, fewer for few examples.
    """
    if high < 2 * low:  # lengths that hardly differ, or not at all
        low, high = max(low // 2, 1), 2 * high
    number = min(MAX_BINS, max(int(2 * count**0.5), 1))
    return np.unique(np.geomspace(low, high + 1, number + 1).round()) - 0.5
