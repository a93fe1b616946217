"""How well each class is found, and what is taken for what: precision, recall, F1 and confusion matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xformer import extras
from xformer.report import formatting, style, summary
from xformer.report.formatting import percent, short
from xformer.report.results import Comparison, mapping, number
from xformer.report.stats import estimate
from xformer.report.summary import Row
from xformer.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

colors = extras.Lazy("matplotlib.colors")

MAX_CLASSES = 40  # more are neither listed nor drawn
SMALLEST = 0.005  # of a row: a smaller share has no number in its cell


@dataclasses.dataclass(frozen=True)
class ByClass:
    """What the finished runs of a comparison say by class.

    Attributes:
      names: of the classes, in the order of the task.
      shown: the reference, and the variant with the best mean quality where that is another.
      scores: for each variant, float [seeds, classes, 3]: precision, recall and F1.
      examples: test examples of each class, int [classes].
      confusion: for each variant, the mean over seeds of float [classes, classes], the share of the examples of a class
        (row) that were given each answer (column); nothing where answers are several labels.
    """

    names: Sequence[str]
    shown: Sequence[str]
    scores: dict[str, np.ndarray]
    examples: Sequence[int]
    confusion: dict[str, np.ndarray]


def read(comparison: Comparison, rows: Sequence[Row]) -> ByClass | None:
    """What the results hold; None where they hold no classes, more than 40, or come from different data."""
    found: dict[str, list[dict[str, Any]]] = {}
    for variant in comparison.variants:
        details = [dict(mapping((run.result or {}).get("test_details"))) for run in comparison.finished(variant)]
        if kept := [detail for detail in details if mapping(detail.get("classes"))]:
            found[variant] = kept
    every = [detail for details in found.values() for detail in details]
    if not every or summary.data_differ(comparison):
        return None
    names = list(every[0]["classes"])
    if len(names) > MAX_CLASSES or any(list(detail["classes"]) != names for detail in every):
        return None
    keys = ("precision", "recall", "f1")
    score = lambda detail: [[number(detail["classes"][name], key) for key in keys] for name in names]
    return ByClass(
        names=names,
        shown=_shown(comparison, rows, list(found)),
        scores={variant: np.array([score(detail) for detail in details]) for variant, details in found.items()},
        examples=[round(number(every[0]["classes"][name], "examples")) for name in names],
        confusion={
            variant: np.mean([_shares(detail["confusion"]) for detail in details], axis=0)
            for variant, details in found.items()
            if all(np.shape(detail.get("confusion", ())) == (len(names), len(names)) for detail in details)
        },
    )


def _shown(comparison: Comparison, rows: Sequence[Row], known: Sequence[str]) -> list[str]:
    means = {row.variant: row.quality.mean for row in rows if row.variant in known}
    sign = 1 if comparison.higher_is_better else -1
    judged = [variant for variant, mean in means.items() if math.isfinite(mean)]
    best = max(judged, key=lambda variant: sign * means[variant]) if judged else known[0]
    return list(dict.fromkeys(variant for variant in (comparison.reference, best) if variant in known))


def _shares(counts: Any) -> np.ndarray:
    """Counts [classes, classes] over the sum of their row, 0 in the row of a class that no example has."""
    matrix = np.asarray(counts, np.float64)
    total = matrix.sum(axis=1, keepdims=True)
    return np.divide(matrix, total, out=np.zeros_like(matrix), where=total > 0)


def table(found: ByClass) -> Table:
    """A row a class: its test examples, then precision, recall and F1 of each variant shown."""
    headers = ["class", "examples"]
    for variant in found.shown:
        headers += [f"{variant}: precision", f"{variant}: recall", f"{variant}: F1"]
    body = []
    for index, name in enumerate(found.names):
        cells = [name, f"{found.examples[index]:,}"]
        for variant in found.shown:
            scores = found.scores[variant][:, index]
            cells += [percent(value) for value in scores[:, :2].mean(axis=0)]
            cells.append(formatting.quality(estimate(scores[:, 2].tolist()), "accuracy"))
        body.append(tuple(cells))
    return Table(tuple(headers), tuple(body))


def every_f1(found: ByClass) -> Table | None:
    """A row a class with the F1 of every variant; None where `table` has them all."""
    if len(found.shown) == len(found.scores):
        return None
    f1 = lambda scores: formatting.quality(estimate(scores.tolist()), "accuracy")
    body = (
        (name, *(f1(scores[:, index, 2]) for scores in found.scores.values())) for index, name in enumerate(found.names)
    )
    return Table(("class", *(f"{variant}: F1" for variant in found.scores)), tuple(body))


def note(comparison: Comparison, found: ByClass) -> str:
    """What stands above the table."""
    first, *best = found.shown
    whose = f"Of {first}" + (f" and of {best[0]}, which has the best test {comparison.metric}" if best else "")
    seeds = max(len(scores) for scores in found.scores.values())
    over = f"means over {seeds} seeds, F1 with its 95 % interval" if seeds > 1 else "one seed"
    return f"{whose}: {over}; on the test split."


def picture(comparison: Comparison, found: ByClass | None, theme: style.Theme) -> bytes | None:
    """PNG of a confusion matrix for each variant shown; None where there is none to draw."""
    drawn = [] if found is None else [variant for variant in found.shown if variant in found.confusion]
    if found is None or not drawn:
        return None
    palette = style.Palette(theme, comparison.variants)
    columns = theme.columns(len(drawn), 2)
    lines = math.ceil(len(drawn) / columns)
    height = min(theme.width / columns, 0.6 * len(found.names) + 1.4)
    with style.figure(theme, height * lines, 0.08, nrows=lines, ncols=columns, squeeze=False) as (fig, axes):
        for index, (ax, variant) in enumerate(zip(axes.flat, drawn, strict=True)):
            _draw(ax, found.names, found.confusion[variant], palette.colour(variant), theme, index % columns == 0)
            ax.set_title(short(variant, 24))
        return style.png(fig)


def _draw(ax: Axes, names: Sequence[str], shares: np.ndarray, colour: str, theme: style.Theme, name_rows: bool) -> None:
    size = len(names)
    paper, full = (np.asarray(colors.to_rgb(shade)) for shade in (theme.paper, colour))
    # A row's few mistakes must be seen beside the many that are right.
    opacity = np.sqrt(shares)[..., None]
    ax.imshow((1 - opacity) * paper + opacity * full, interpolation="nearest")
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set(visible=True, color=theme.grid)
    text_size = 8.5 if size <= 8 else 6.5 if size <= 14 else 5 if size <= 20 else 3.5
    for row, column in zip(*np.nonzero(shares >= SMALLEST), strict=True):
        dark = _lightness(opacity[row, column] * full + (1 - opacity[row, column]) * paper) < 0.5
        ax.text(column, row, f"{100 * shares[row, column]:.0f}", ha="center", va="center", fontsize=text_size,
                color="white" if dark else "black")  # fmt: skip
    labels = [short(name, 16) for name in names]
    name_size = 8 if size <= 20 else 5
    ax.set_xticks(range(size), labels, rotation=90 if size > 4 else 0, fontsize=name_size)
    ax.set_yticks(range(size), labels if name_rows else [], fontsize=name_size)
    ax.set_xlabel("answer")
    if name_rows:
        ax.set_ylabel("class")


def _lightness(colour: np.ndarray) -> float:
    return float(colour @ (0.299, 0.587, 0.114))


def caption(found: ByClass | None) -> str:
    """What stands below the picture."""
    seeds = max((len(scores) for scores in found.scores.values()), default=1) if found else 1
    mean = f", mean over {seeds} seeds" if seeds > 1 else ""
    return (
        "How many in a hundred test examples of each class (a row) got each answer (a column)"
        f"{mean}; empty below half of one. The diagonal is recall."
    )
