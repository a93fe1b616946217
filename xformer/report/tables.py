"""The tables of a report, as text that Markdown, HTML and a terminal all show."""

from __future__ import annotations

import dataclasses
import functools
import math
import unicodedata
from collections.abc import Mapping, Sequence

from xformer.report import costs, formatting, summary, timing
from xformer.report.costs import CostRow
from xformer.report.results import Comparison, Run, number
from xformer.report.stats import estimate
from xformer.report.summary import Row

CHANCE, BROKEN = "at chance", "no number"


@dataclasses.dataclass(frozen=True)
class Table:
    """Headers and rows of text; the first column names the row, the others hold numbers unless `prose`."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: bool = False

    def markdown(self) -> str:
        """A GitHub-flavoured Markdown table."""
        rule = ("---", *("---" if self.prose else "---:" for _ in self.headers[1:]))
        lines = [tuple(map(escape_markdown, row)) for row in (self.headers, *self.rows)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], rule, *lines[1:]))

    def text(self) -> str:
        """Aligned columns for a terminal."""
        widths = [max(map(_width, column)) for column in zip(self.headers, *self.rows, strict=True)]
        lines = []
        for row in (self.headers, tuple("-" * width for width in widths), *self.rows):
            cells = [
                _pad(cell, width, left=not i or self.prose)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def escape_markdown(text: str) -> str:
    """The text with what Markdown or HTML would read as markup made harmless."""
    for mark in "\\`*_[]|<>$":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(mark) in "WF" else 1 for mark in text)


def _pad(text: str, width: int, left: bool) -> str:
    space = " " * (width - _width(text))
    return text + space if left else space + text


def variants(comparison: Comparison, rows: Sequence[Row]) -> Table:
    """The main table: one row a variant."""
    reference = next(row for row in rows if row.variant == comparison.reference)
    compare = not summary.data_differ(comparison)
    interval = " (95 %)" if any(row.quality.half_width is not None for row in rows) else ""
    waits = any(math.isfinite(row.input_wait) for row in rows)
    differ = len({row.num_steps for row in rows if math.isfinite(row.num_steps)}) > 1
    headers = ("variant", f"test {comparison.metric}{interval}", "seeds", "parameters", "FLOPs a step",
               "training FLOPs", "step time", "peak memory", *(["waiting for data"] if waits else []),
               *(["steps", "training time"] if differ else []))  # fmt: skip
    steps = lambda row: f"{row.num_steps:,.0f}" if math.isfinite(row.num_steps) else formatting.MISSING
    more = lambda row: (steps(row), formatting.seconds(row.train_seconds)) if differ else ()
    body = ((*_variant(row, reference, comparison.metric, waits, compare), *more(row)) for row in rows)
    return Table(headers, tuple(body))


def _variant(row: Row, reference: Row, metric: str, waits: bool, compare: bool) -> tuple[str, ...]:
    def against(text: str, value: float, base: float) -> str:
        times = formatting.ratio(value, base) if compare and row is not reference else ""
        return f"{text} ({times})" if times else text

    marks = [
        f"{len(seeds)} {mark}" for seeds, mark in ((row.chance_seeds, CHANCE), (row.broken_seeds, BROKEN)) if seeds
    ]
    seeds = f"{row.finished}" if row.finished == row.planned else f"{row.finished} of {row.planned}"
    cells = (
        row.variant,
        formatting.quality(row.quality, metric) + (f" [{', '.join(marks)}]" if marks else ""),
        seeds,
        formatting.si(row.num_params) + formatting.change(row.num_params, reference.num_params),
        formatting.si(row.flops_per_step),
        against(formatting.si(row.train_flops), row.train_flops, reference.train_flops),
        against(formatting.milliseconds(row.step_time_ms), row.step_time_ms, reference.step_time_ms),
        formatting.mebibytes(row.peak_memory_bytes),
    )
    return (*cells, formatting.percent(row.input_wait)) if waits else cells


def pretraining(comparison: Comparison) -> Table | None:
    """What the runs of each variant started from, and what that and they cost; None where none says."""
    if not any(run.source for run in comparison.all_runs()):
        return None
    metrics = {str(run.source.get("select_metric", "")) for run in comparison.all_runs() if run.source}
    metric = next(iter(metrics)) if len(metrics) == 1 else ""
    headers = (*(["test " + metric] if metric else []), "pretraining FLOPs", "fine-tuning FLOPs", "pretraining time",
               "fine-tuning time")  # fmt: skip
    body = []
    for name in comparison.variants:
        runs = comparison.finished(name)
        score = estimate([number(run.source.get("test"), metric) for run in runs])
        cells = [formatting.quality(score, metric)] if metric else []
        for key, spell in (("train_flops", formatting.si), ("train_seconds", formatting.seconds)):
            before = estimate([number(run.source, key) for run in runs]).mean
            own = estimate([number(run.result, key) for run in runs]).mean
            cells += [spell(before), spell(own)]
        body.append((name, *cells))
    return Table(("variant", *headers), tuple(body))


def tasks(comparisons: Mapping[str, Comparison]) -> Table:
    """The same variants on several tasks, one column a task, as Long Range Arena shows them, then the mean and cost.

    FLOPs and step time are those relative to the reference, the geometric mean over the tasks.
    """
    first = next(iter(comparisons.values()))
    by_task = {task: {row.variant: row for row in summary.rows(one)} for task, one in comparisons.items()}
    body = []
    for name in first.variants:
        rows = {task: found[name] for task, found in by_task.items()}
        references = {task: found[first.reference] for task, found in by_task.items()}
        qualities = [formatting.quality(row.quality, comparisons[task].metric) for task, row in rows.items()]
        mean = _mean([row.quality.mean for row in rows.values()])
        times = [
            _geometric_mean([getattr(row, key) / getattr(references[task], key) for task, row in rows.items()])
            for key in ("train_flops", "step_time_ms")
        ]
        body.append((name, *qualities, formatting.percent(mean), *(formatting.ratio(value, 1.0) for value in times)))
    metrics = {one.metric for one in comparisons.values()}
    headers = ("variant", *(f"{task}: test {one.metric}" for task, one in comparisons.items()), "mean",
               "training FLOPs", "step time")  # fmt: skip
    if metrics != {"accuracy"}:  # other metrics have no common scale
        place = 1 + len(comparisons)
        headers, body = (*headers[:place], *headers[place + 1 :]), [(*row[:place], *row[place + 1 :]) for row in body]
    return Table(headers, tuple(body))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(_mean([math.log(value) for value in values])) if all(value > 0 for value in values) else math.nan


def runs(comparison: Comparison) -> Table:
    """One row a run, with what became of it."""
    headers = ("variant", "seed", "state", f"test {comparison.metric}", f"validation {comparison.metric}", "best step",
               summary.baseline_title(comparison), *summary.others(comparison, "test"), "step time",
               *(["data"] if summary.digests(comparison) else []))  # fmt: skip
    return Table(headers, tuple(_run(run, comparison)[: len(headers)] for run in comparison.all_runs()))


def _run(run: Run, comparison: Comparison) -> tuple[str, ...]:
    metric, titles = comparison.metric, summary.others(comparison, "test")
    chance = run.result is not None and summary.is_at_chance(run, metric, comparison.higher_is_better)
    state = CHANCE if chance else run.status
    show = functools.partial(formatting.metric_value, metric=metric)
    best = number(run.result, "best_step")
    return (
        run.variant,
        str(run.seed),
        state,
        show(run.test(metric)),
        show(number((run.result or {}).get("eval"), metric)),
        f"{best:,.0f}" if math.isfinite(best) else formatting.MISSING,
        show(summary.baseline_of(run, metric)),
        *(show(run.others(metric, "test").get(title, ("", math.nan))[1]) for title in titles),
        timing.spelt(run),
        formatting.MISSING if run.digest is None else run.digest[:12],
    )


def differences(comparison: Comparison) -> Table:
    """The config keys in which the variants differ."""
    found = summary.differences(comparison)
    shown = next(iter(found.values()), {})
    rows = (tuple(_short(values[variant]) for variant in shown) for values in found.values())
    return Table(("key", *shown), tuple((key, *row) for key, row in zip(found, rows, strict=True)), prose=True)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def crossovers(rows: Sequence[CostRow], variant_names: Sequence[str], reference: str) -> Table:
    """From which length on each variant is cheaper than the reference; of those that have an attention."""
    counted = {row.variant for row in rows}
    panels = [panel for panel in costs.PANELS if any(math.isfinite(getattr(row, panel.key)) for row in rows)]
    body = (
        (name, *(costs.crossover_text(rows, name, reference, panel.key) for panel in panels))
        for name in variant_names
        if name != reference and name in counted
    )
    return Table(("variant", *(panel.title for panel in panels)), tuple(body))


def lengths(rows: Sequence[CostRow], variant_names: Sequence[str]) -> Table:
    """Every cost that was counted or measured: the numbers behind the picture."""
    order = {name: index for index, name in enumerate(variant_names)}
    shown = sorted((row for row in rows if row.variant in order), key=lambda row: (row.length, order[row.variant]))
    headers = ("variant", "length", *(panel.title for panel in costs.PANELS), "note")
    body = (
        (row.variant, f"{row.length:,}", *(panel.spell(getattr(row, panel.key)) for panel in costs.PANELS), _note(row))
        for row in shown
    )
    return Table(headers, tuple(body))


def _note(row: CostRow) -> str:
    left_out = f"FLOPs leave out {', '.join(row.uncounted)}" if row.uncounted else ""
    return "; ".join(filter(None, (row.note, left_out)))
