"""Puts tables and pictures together: `report.md`, `report.html`, the PNGs and `results.jsonl`."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xformer import extras
from xformer.report import costs, formatting, patterns, quality, results, style, summary, tables
from xformer.report.costs import CostRow
from xformer.report.patterns import Pattern
from xformer.report.results import Comparison
from xformer.report.summary import Row

jinja2 = extras.Lazy("jinja2")

Draw = Callable[[style.Theme], bytes | None]


@dataclasses.dataclass(frozen=True)
class Report:
    """What was written: the page, the main table as text for a terminal, and the warnings."""

    html: Path
    table: str
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Plot:
    file: str
    title: str
    caption: str
    light: str
    dark: str
    table: tables.Table | None = None
    details: tables.Table | None = None


def write(
    workdir: Path | str,
    *,
    cost_rows: Sequence[CostRow] = (),
    cost_note: str = "",
    variant_patterns: Mapping[str, Pattern] | None = None,
) -> Report:
    """Writes the report of a comparison, finished or not, into its workdir.

    Args:
      workdir: of a comparison: `config.json` and the runs under `runs/`.
      cost_rows: what each variant's attention costs at each length.
      cost_note: on what and with which sizes that was measured.
      variant_patterns: which pairs each variant considers.

    Raises:
      ValueError: `workdir` holds no comparison.
    """
    workdir = Path(workdir)
    comparison = results.load(workdir)
    rows = summary.rows(comparison)
    warnings = summary.warnings(comparison)
    plots = [plot for plot in _plots(workdir, comparison, rows, cost_rows, cost_note, variant_patterns or {}) if plot]
    main = tables.variants(comparison, rows)
    context = {
        "title": comparison.name,
        "lead": _lead(comparison, rows),
        "main": main,
        "warnings": warnings,
        "plots": plots,
        "runs": tables.runs(comparison),
        "differences": tables.differences(comparison),
        "differences_note": _differences_note(comparison),
        "made": _made(comparison),
        "colours": {name: index for index, name in enumerate(comparison.variants)},
        "light": style.LIGHT,
        "dark": style.DARK,
    }
    _write(workdir / "results.jsonl", _results(comparison).encode())
    for name in ("report.md", "report.html"):
        _write(workdir / name, _render(f"{name}.j2", context).encode())
    return Report(workdir / "report.html", main.text(), tuple(warnings))


def _plots(
    workdir: Path,
    comparison: Comparison,
    rows: Sequence[Row],
    cost_rows: Sequence[CostRow],
    cost_note: str,
    variant_patterns: Mapping[str, Pattern],
) -> list[_Plot | None]:
    variants, reference = comparison.variants, comparison.reference

    def plot(file: str, title: str, caption: str, draw: Draw, **more: tables.Table) -> _Plot | None:
        light, dark = draw(style.LIGHT), draw(style.DARK)
        if light is None or dark is None:
            (workdir / file).unlink(missing_ok=True)
            return None
        _write(workdir / file, light)
        return _Plot(file, title, caption, _data_url(light), _data_url(dark), **more)

    several = any((row.quality.half_width or 0) > 0 for row in rows)
    over = "mean over seeds, bands and bars are 95 % intervals (Student t)" if several else "one seed, no intervals"
    cost_tables = {}
    if cost_rows:
        cost_tables = {
            "table": tables.crossovers(cost_rows, variants, reference),
            "details": tables.lengths(cost_rows, variants),
        }
    return [
        plot("quality.png", "Quality against training FLOPs",
             f"Validation {comparison.metric} as training goes on; {over}.",
             lambda theme: quality.curves(comparison, theme)),
        plot("pareto.png", "Quality against cost",
             f"Test {comparison.metric} of the best checkpoint; {over}. The dashed line joins the filled points, which "
             "no other variant beats in both quality and cost.",
             lambda theme: quality.pareto(comparison, rows, theme)),
        plot("costs.png", "Cost of attention against length",
             "The attention operation alone. A ring marks the length from which a variant is cheaper than "
             f"{reference}. {cost_note}".strip(),
             lambda theme: costs.picture(cost_rows, variants, reference, theme), **cost_tables),
        plot("patterns.png", "Which pairs each variant considers",
             "First head of the first layer, each cell the stronger the more of its pairs are considered.",
             lambda theme: patterns.picture(variant_patterns, theme)),
    ]  # fmt: skip


def _lead(comparison: Comparison, rows: Sequence[Row]) -> str:
    done = [row for row in rows if row.quality.count]
    planned = sum(row.planned for row in rows)
    finished = sum(row.finished for row in rows)
    state = "" if finished == planned else f"{finished} of {planned} runs are finished. "
    if not done:
        return f"{state or 'No run has a result. '}".strip()
    best = (max if comparison.higher_is_better else min)(done, key=lambda row: row.quality.mean)
    spell = lambda row: formatting.quality(row.quality, comparison.metric)
    text = f"{state}{best.variant} has the best test {comparison.metric}, {spell(best)}."
    alike = [row.variant for row in done if row is not best and row.quality.overlaps(best.quality)]
    if alike:
        text += f" That is not clearly better than {formatting.listed(alike)}: the intervals overlap."
    reference = next(row for row in rows if row.variant == comparison.reference)
    priced = [row for row in done if math.isfinite(row.train_flops)]
    if priced and math.isfinite(reference.train_flops):
        cheapest = min(priced, key=lambda row: row.train_flops)
        share = formatting.ratio(cheapest.train_flops, reference.train_flops)
        if cheapest is not reference:
            text += (f" {cheapest.variant} takes the fewest training FLOPs, {share} those of {reference.variant}, "
                     f"and reaches {spell(cheapest)}.")  # fmt: skip
    return text


def _differences_note(comparison: Comparison) -> str:
    other = [key for key in summary.differences(comparison) if not key.startswith("attention.")]
    if other:
        names = formatting.listed(other)
        return f"More than attention: {names} differ too, so attention alone does not explain the results."
    return (
        "Attention only. Model sizes, data and their order, seeds, steps and optimizer are the same for all variants."
    )


def _made(comparison: Comparison) -> list[tuple[str, str]]:
    any_run = next((run for run in comparison.all_runs() if run.result is not None), None)
    result: Mapping[str, Any] = any_run.result or {} if any_run else {}
    found = [
        ("Device", "; ".join(summary.devices(comparison))),
        ("Versions", "; ".join(summary.versions(comparison))),
        ("Seeds", ", ".join(str(seed) for seed in comparison.seeds)),
        ("Batch size", str(result.get("batch_size", ""))),
        (
            "FLOPs",
            "2 per multiply-add of matrix products and convolutions: forward, backward, recomputation, optimizer",
        ),
        ("Test", "once, with the checkpoint that was best on the validation split"),
        ("Step time", "median over steps, compilation left out; peak memory: the largest of all seeds"),
    ]
    return [(label, text) for label, text in found if text]


def _results(comparison: Comparison) -> str:
    rows = [{"variant": run.variant, "status": run.status, "seed": run.seed} | dict(run.result or {})
            for run in comparison.all_runs()]  # fmt: skip
    return "".join(json.dumps(_finite(row)) + "\n" for row in rows)


def _finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _render(template: str, context: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("xformer.report", "."),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=False,
    )
    environment.filters["md"] = tables.escape_markdown
    environment.filters["nb"] = lambda cell: re.sub(r" (?![(\[])", "\u00a0", cell)  # a number stays with its unit
    return environment.get_template(template).render(**context)


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
