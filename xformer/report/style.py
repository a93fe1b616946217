"""How every picture looks: one colour and marker a variant, light and dark, labels beside the lines, no legends."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xformer import extras
from xformer.report import formatting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

image = extras.Lazy("PIL.Image")
matplotlib = extras.Lazy("matplotlib")
ticker = extras.Lazy("matplotlib.ticker")

DPI = 160
COLOURS = 256  # of a picture: with fewer, shades of one colour turn grey beside those of another
WIDE, NARROW = 7.6, 3.9  # inches; the page shows pictures at about this size, narrow ones on a phone
DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (5, 1.4, 1.2, 1.4)))
# matplotlib's name of each shape, and the character that shows it in text.
MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("X", "✖"), ("*", "★"))


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of one appearance, and the width of its pictures in inches.

    `cycle` holds one colour a variant. Readers who are red-blind or green-blind tell them apart too: they differ in
    lightness and along blue and yellow.
    """

    name: str
    paper: str
    ink: str
    muted: str
    grid: str
    cycle: tuple[str, ...]
    width: float = WIDE

    def narrow(self) -> Theme:
        """The same for a narrow page: panels below each other, text as large as on a wide one."""
        return dataclasses.replace(self, width=NARROW)

    def columns(self, panels: int, most: int) -> int:
        """How many panels stand side by side: as many as there are, at most `most` or what the width has room for."""
        return max(1, min(panels, most, int(most * self.width / WIDE)))


LIGHT = Theme(
    name="light", paper="#ffffff", ink="#1c1f24", muted="#6a707a", grid="#e4e6ea",
    cycle=("#0b1210", "#4285df", "#742600", "#57a561", "#28219e", "#bc890b", "#930f53", "#129fb2"),
)  # fmt: skip
DARK = Theme(
    name="dark", paper="#16181d", ink="#e8eaed", muted="#9aa1ac", grid="#2c3038",
    cycle=("#fffdf0", "#276ea7", "#c36009", "#4fee7f", "#6c75ff", "#fdd036", "#cf5d7a", "#08dffe"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Palette:
    """The colour, marker and dashes of each variant, the same in every picture."""

    theme: Theme
    variants: Sequence[str]

    def colour(self, variant: str) -> str:
        return self.theme.cycle[self.variants.index(variant) % len(self.theme.cycle)]

    def marker(self, variant: str) -> str:
        return marker(self.variants.index(variant))[0]

    def dashes(self, variant: str) -> Any:
        return DASHES[self.variants.index(variant) // len(self.theme.cycle) % len(DASHES)]


def marker(index: int) -> tuple[str, str]:
    """The marker of the variant at this place, for matplotlib and as a character.

    Once the colours start again, each comes with another shape than before.
    """
    return MARKERS[(index + index // len(MARKERS)) % len(MARKERS)]


@contextlib.contextmanager
def figure(theme: Theme, height: float, pad: float = 0.04, **subplots: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure in the theme, `height` inches high with `pad` inches round its axes."""
    settings: Any = {
        "figure.facecolor": theme.paper, "axes.facecolor": theme.paper, "savefig.facecolor": theme.paper,
        "text.color": theme.ink, "axes.labelcolor": theme.muted, "axes.edgecolor": theme.muted,
        "xtick.color": theme.muted, "ytick.color": theme.muted, "axes.titlecolor": theme.ink,
        "font.family": "sans-serif", "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9,
        "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 8,
        "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": theme.grid, "grid.linewidth": 0.8,
        "axes.axisbelow": True, "xtick.major.size": 3, "ytick.major.size": 0, "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round", "text.parse_math": False,  # a variant may be called `a_$b`
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        # Not from pyplot, which would choose a backend for the user's whole process.
        fig = extras.load("matplotlib.figure").Figure(figsize=(theme.width, height), layout="constrained")
        extras.load("matplotlib.backends.backend_agg").FigureCanvasAgg(fig)  # draws without a screen
        fig.get_layout_engine().set(w_pad=pad, h_pad=pad)
        yield fig, fig.subplots(**subplots)


def png(fig: Figure) -> bytes:
    """The figure as PNG of 256 colours, without the software and time that would make equal pictures differ.

    Drawn once, where `savefig` would lay it out and draw it twice.
    """
    fig.set_dpi(DPI)
    canvas: Any = fig.canvas
    canvas.draw()
    drawn = image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    drawn.quantize(COLOURS, dither=image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def webp(png: bytes) -> bytes:
    """The same picture, pixel by pixel, in a smaller file, which browsers show and papers do not."""
    buffer = io.BytesIO()
    image.open(io.BytesIO(png)).convert("RGB").save(buffer, "WEBP", lossless=True)
    return buffer.getvalue()


def log_axis(ax: Axes, which: Literal["x", "y"], spell: Callable[[float], str], base: int = 10) -> None:
    """A logarithmic axis with a few round ticks, spelt out. Call when the limits are final but for rounding."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    if which == "x":
        ax.set_xscale("log", base=base)
    else:
        ax.set_yscale("log", base=base)
    low, high = axis.get_view_interval()
    axis.set_major_locator(ticker.FixedLocator(round_ticks(low, high, base)))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: spell(value)))


def is_logarithmic(metric: str, values: Iterable[float]) -> bool:
    """Whether the axis of a metric is logarithmic: that of a perplexity, the exponential of a loss."""
    return metric == "perplexity" and all(value > 0 for value in values)


def round_ticks(low: float, high: float, base: int) -> list[float]:
    """At most six round numbers between `low` and `high`: powers of the base where that is enough of them."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    for subs in ((1,), (1, 2, 5) if base == 10 else (1, 2)):
        ticks = [float(sub * base**power) for power in range(first, last + 1) for sub in subs]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 6)]
    return [tick for tick in ticker.MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= tick <= high]


def length_axis(ax: Axes, lengths: Sequence[int]) -> None:
    """A logarithmic x axis of lengths with a tick at each, from the shortest to the longest whatever is drawn."""
    ax.set_xscale("log", base=2)
    room = max((lengths[-1] / lengths[0]) ** 0.05, 1.1)
    ax.set_xlim(lengths[0] / room, lengths[-1] * room)
    ax.xaxis.set_major_locator(ticker.FixedLocator(list(lengths)))
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: formatting.length(round(value))))
    ax.set_xlabel("length (tokens)")


def percent_axis(ax: Axes) -> None:
    """A y axis of shares as percentages, with as many digits as its ticks need."""
    ax.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{round(100 * value, 6):g} %"))


def margins_log(ax: Axes, values: Sequence[float]) -> None:
    """Room left and right of the values on a logarithmic x axis, for labels."""
    low, high = min(values), max(values)
    factor = max((high / low) ** 0.4, 1.3)
    ax.set_xlim(low / factor, high * factor)
