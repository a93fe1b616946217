"""Puts tables and pictures together: `report.md`, `report.html`, PNGs, `results.jsonl`, `comparison.json`."""

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
from xformer.report import (
    accuracy_by,
    against,
    answer,
    claims,
    classes,
    costs,
    curves,
    export,
    formatting,
    generated,
    made,
    own_sections,
    patterns,
    quality,
    results,
    style,
    summary,
    tables,
    timing,
    trials,
)
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
class Measured:
    """What a report shows of each variant besides its runs.

    Attributes:
      cost_rows: what its attention costs at each length.
      cost_note: on what and with which sizes that was measured.
      variant_patterns: which pairs it considers.
      reaches: the furthest position from which anything gets to the first through all layers, where that is not all.
      sections: names of functions that make sections of the user's own; see `xformer.report.own_sections`.
    """

    cost_rows: Sequence[CostRow] = ()
    cost_note: str = ""
    variant_patterns: Mapping[str, Pattern] = dataclasses.field(default_factory=dict)
    reaches: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sections: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class _Plot:
    file: str
    title: str
    caption: str
    images: Mapping[str, str]  # `light`, `dark`, `light_narrow` and `dark_narrow`: data URLs
    table: tables.Table | None = None
    details: tables.Table | None = None
    curves: str = ""  # what the page's script draws in place of the images, as JSON


def write(
    workdir: Path | str,
    *,
    cost_rows: Sequence[CostRow] = (),
    cost_note: str = "",
    variant_patterns: Mapping[str, Pattern] | None = None,
    reaches: Mapping[str, int] | None = None,
    sections: Sequence[str] = (),
) -> Report:
    """Writes the report of a comparison, finished or not, into its workdir.

    Args:
      workdir: of a comparison: `config.json` and the runs under `runs/`.
      cost_rows, cost_note, variant_patterns, reaches, sections: see `Measured`.

    Raises:
      ValueError: `workdir` holds no comparison.
    """
    workdir = Path(workdir)
    comparison = results.load(workdir)
    measured = Measured(cost_rows, cost_note, variant_patterns or {}, reaches or {}, sections)
    part = _part(workdir, comparison, measured)
    return _write_page(workdir, comparison.name, {"": comparison}, [part])


def write_tasks(workdir: Path | str, name: str, measured: Mapping[str, Measured]) -> Report:
    """Writes one report on the comparisons of the same variants on several tasks.

    Args:
      workdir: holds a comparison's workdir for each task, under the task's name.
      name: the title.
      measured: by task, in the order of the report.

    Raises:
      ValueError: a folder holds no comparison.
    """
    workdir = Path(workdir)
    comparisons = {task: results.load(workdir / task) for task in measured}
    parts = [_part(workdir, comparison, measured[task], task) for task, comparison in comparisons.items()]
    return _write_page(workdir, name, comparisons, parts)


def _write_page(
    workdir: Path, title: str, comparisons: Mapping[str, Comparison], parts: Sequence[Mapping[str, Any]]
) -> Report:
    several = "" not in comparisons
    main = tables.tasks(comparisons) if several else parts[0]["main"]
    first = next(iter(comparisons.values()))
    rows = [row for task, comparison in comparisons.items() for row in _results(task, comparison)]
    table = export.as_csv(rows)
    context = {
        "title": title,
        "csv": f"data:text/csv;charset=utf-8;base64,{base64.b64encode(table.encode()).decode()}",
        "sessions": made.sessions(workdir),
        "tasks": main if several else None,
        "tasks_note": claims.tasks_note(first) if several else "",
        "answers": answer.tables(comparisons),
        "answers_note": answer.NOTE,
        "parts": parts,
        "scripted": any(plot.curves for part in parts for plot in part["plots"]),
        "marks": {name: (index, style.marker(index)[1]) for index, name in enumerate(first.variants)},
        "light": style.LIGHT,
        "dark": style.DARK,
    }
    _write(workdir / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    _write(workdir / "results.csv", table.encode())
    for part in parts:
        _write(workdir / part["task"] / "comparison.json", (json.dumps(part["json"], indent=2) + "\n").encode())
    for name in ("report.md", "report.html"):
        _write(workdir / name, _render(f"{name}.j2", context).encode())
    warnings = [f"{part['task']}: {line}" if several else line for part in parts for line in part["warnings"]]
    return Report(workdir / "report.html", main.text(), tuple(warnings))


def _part(workdir: Path, comparison: Comparison, measured: Measured, task: str = "") -> dict[str, Any]:
    """What the page says of one comparison; its pictures are written."""
    rows = summary.rows(comparison)
    differences = against.against(comparison, rows)
    by_class = classes.read(comparison, rows)
    own, own_warnings = own_sections.make(comparison, measured.sections)
    return {
        "task": task,
        "lead": claims.lead(comparison, rows),
        "main": tables.variants(comparison, rows),
        "flops_note": " ".join(filter(None, [claims.budget_note(comparison), claims.flops_note(comparison)])),
        "json": _finite(_with_tuning(comparison, against.as_json(comparison, rows, differences))),
        "against": against.table(comparison, differences),
        "against_title": f"Against {comparison.reference}",
        "against_note": against.note(comparison, differences),
        "pretraining": tables.pretraining(comparison),
        "pretraining_note": claims.PRETRAINING,
        "tuning": trials.table(comparison),
        "tuning_note": trials.note(comparison),
        "tuning_more": trials.every(comparison),
        "warnings": [
            *summary.warnings(comparison),
            *timing.warnings(comparison),
            *trials.warnings(comparison),
            *costs.warnings(measured.cost_rows),
            *own_warnings,
        ],
        "plots": [plot for plot in _plots(workdir, task, comparison, rows, measured, by_class) if plot],
        "classes": classes.table(by_class) if by_class else None,
        "classes_note": classes.note(comparison, by_class) if by_class else "",
        "classes_more": classes.every_f1(by_class) if by_class else None,
        "generated": generated.table(comparison),
        "generated_note": generated.note(comparison),
        "own": _own(workdir, task, own),
        "runs": tables.runs(comparison),
        "differences": tables.differences(comparison),
        "differences_note": claims.differences_note(comparison),
        "made": made.facts(comparison),
    }


def _own(workdir: Path, task: str, sections: Sequence[own_sections.Section]) -> list[dict[str, Any]]:
    """What the page says of the sections of the user's own; their pictures are written, and earlier ones removed."""
    found = []
    for earlier in (workdir / task).glob("own-[0-9]*.png"):
        earlier.unlink()
    for number, section in enumerate(sections):
        file, image = "", ""
        if section.picture is not None:
            file, image = f"{task}/own-{number}.png" if task else f"own-{number}.png", _data_url(section.picture)
            _write(workdir / file, section.picture)
        found.append(
            {"title": section.title, "text": section.text, "table": section.table, "file": file, "image": image}
        )
    return found


def _with_tuning(comparison: Comparison, found: dict[str, Any]) -> dict[str, Any]:
    """What `comparison.json` holds, with the budget and, by variant, what was tuned."""
    found["budget"] = dict(comparison.budget)
    for variant, entry in found["variants"].items():
        entry["tuned"] = trials.as_json(comparison, variant)
    return found


def _plots(
    workdir: Path,
    task: str,
    comparison: Comparison,
    rows: Sequence[Row],
    measured: Measured,
    by_class: classes.ByClass | None,
) -> list[_Plot | None]:
    variants, reference, cost_rows = comparison.variants, comparison.reference, measured.cost_rows
    folder = f"{task}/" if task else ""

    def plot(name: str, title: str, caption: str, draw: Draw, **more: Any) -> _Plot | None:
        file = f"{folder}{name}"
        drawn = {
            theme.name + suffix: draw(shape(theme))
            for theme in (style.LIGHT, style.DARK)
            for suffix, shape in (("", lambda theme: theme), ("_narrow", style.Theme.narrow))
        }
        pictures = {kind: picture for kind, picture in drawn.items() if picture is not None}
        if len(pictures) < len(drawn):
            (workdir / file).unlink(missing_ok=True)
            return None
        _write(workdir / file, pictures["light"])
        images = {kind: _data_url(picture) for kind, picture in pictures.items()}
        return _Plot(file, title, caption, images, **more)

    several = any(row.quality.half_width is not None for row in rows)
    over = "mean over seeds, bands and bars are 95 % intervals over seeds (Student t)" if several else (
        "one seed, no intervals")  # fmt: skip
    chance = summary.baseline(comparison, "test")
    spell = lambda value: formatting.metric_value(value, comparison.metric)
    guesser = summary.guesser(comparison)
    guess = f" {guesser[0].upper()}{guesser[1:]} gives {spell(chance)}." if math.isfinite(chance) else ""
    for title, (name, score) in summary.others(comparison, "test").items():
        guess += f" Dash-dotted: {title}, a classifier that {name}, gives {spell(score)}."
    left_out = " Variants with a run at chance level are not filled." if any(row.chance_seeds for row in rows) else ""
    crossovers = tables.crossovers(cost_rows, variants, reference)
    ring = f" A ring marks the length from which a variant is cheaper than {reference}, at every longer length too."
    cost_caption = [
        f"The attention operation alone.{ring if crossovers.rows else ''}",
        costs.coverage(cost_rows),
        f"FLOPs: {claims.FLOPS}. Left out: {claims.LEFT_OUT}{claims.also(costs.uncounted(cost_rows))}.",
        measured.cost_note,
    ]
    cost_tables = {}
    if cost_rows:
        cost_tables = {
            "table": crossovers if crossovers.rows else None,
            "details": tables.lengths(cost_rows, variants),
        }

    def plot_by(quantity: accuracy_by.Quantity) -> _Plot | None:
        kept = accuracy_by.read(comparison, quantity)
        marks = accuracy_by.marks(comparison, quantity, measured.reaches)
        caption = accuracy_by.caption(comparison, quantity, kept, marks, over)
        draw = lambda theme: accuracy_by.picture(comparison, quantity, kept, marks, theme)
        return plot(quantity.file, quantity.title, caption + (guess if comparison.metric == "accuracy" else ""), draw)

    return [
        plot_by(accuracy_by.DISTANCE),
        plot_by(accuracy_by.LENGTH),
        plot("quality.png", "Quality against training FLOPs",
             f"Validation {comparison.metric} as training goes on; {over}.",
             lambda theme: quality.curves(comparison, theme), curves=curves.script(comparison)),
        plot("pareto.png", "Quality against cost",
             f"Test {comparison.metric} of the best checkpoint; {over}. The dashed line joins the filled points: no "
             "other variant has both a better mean and a lower cost, intervals not regarded." + guess + left_out,
             lambda theme: quality.pareto(comparison, rows, theme)),
        plot("tuning.png", "Quality over what was tuned", trials.CAPTION,
             lambda theme: trials.picture(comparison, theme)),
        plot("costs.png", "Cost of attention against length",
             " ".join(filter(None, cost_caption)),
             lambda theme: costs.picture(cost_rows, variants, reference, theme), **cost_tables),
        plot("patterns.png", "Which pairs each variant considers",
             "First head of the first layer, each cell the stronger the more of its pairs are considered.",
             lambda theme: patterns.picture(measured.variant_patterns, theme)),
        plot("confusion.png", "What is taken for what", classes.caption(by_class),
             lambda theme: classes.picture(comparison, by_class, theme)),
    ]  # fmt: skip


def _results(task: str, comparison: Comparison) -> list[dict[str, Any]]:
    """What `results.jsonl` and `results.csv` hold: the runs, then the trials before them."""
    of_task, tuned = {"task": task} if task else {}, bool(comparison.trials)
    rows: list[dict[str, Any]] = []
    for run in comparison.all_runs():
        row = {**of_task, "role": "run", "variant": run.variant, "status": run.status, "seed": run.seed}
        row |= {
            "budget": dict(comparison.budget),
            "num_steps": results.mapping(run.config.get("train")).get("num_steps"),
        }
        rows.append(row | ({"tuned": dict(run.values)} if tuned else {}) | dict(run.result or {}))
    for variant, tried in comparison.trials.items():
        for number, run in enumerate(tried):
            row = {**of_task, "role": "trial", "variant": variant, "status": run.status, "seed": run.seed}
            row |= {"trial": number, "values": dict(run.values), "chosen": comparison.chosen.get(variant) == number}
            row |= {"num_steps": run.num_steps}
            rows.append(row | ({"failure": run.failure} if run.failure else {}) | dict(run.result or {}))
    return [_finite(row) for row in rows]


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
    return f"data:image/webp;base64,{base64.b64encode(style.webp(png)).decode()}"


def _write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: what is killed on the way leaves the file that was there."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
