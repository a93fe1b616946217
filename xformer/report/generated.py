"""What texts score that the models of a comparison generate, such as BLEU or ROUGE, beside methods without a model."""

from __future__ import annotations

import math

from xformer.report import formatting, summary
from xformer.report.results import Comparison, mapping
from xformer.report.stats import estimate
from xformer.report.tables import Table


def metrics(comparison: Comparison) -> list[str]:
    """The metrics of generated texts: what results have of the test split alone, in their order."""
    found: dict[str, None] = {}
    for run in comparison.all_runs():
        result = run.result or {}
        test, evaluated = mapping(result.get("test")), mapping(result.get("eval"))
        found |= dict.fromkeys(name for name in test if evaluated and name not in evaluated)
    return list(found)


def table(comparison: Comparison) -> Table | None:
    """A row for each variant, and one for each simple method that has such a metric; None where nothing is generated
    or the runs have different data.
    """
    names = metrics(comparison)
    if not names or summary.data_differ(comparison):
        return None
    rows = []
    for variant in comparison.variants:
        runs = comparison.finished(variant)
        scores = (estimate([run.test(name) for run in runs]) for name in names)
        rows.append((variant, *(formatting.quality(score, name) for score, name in zip(scores, names, strict=True))))
    methods: dict[str, dict[str, float]] = {}
    for name in names:
        for run in comparison.all_runs():
            for title, (_, value) in run.others(name, "test").items():
                methods.setdefault(title, {}).setdefault(name, value)
    for title, found in methods.items():
        rows.append((title, *(formatting.metric_value(found.get(name, math.nan), name) for name in names)))
    return Table(("test", *names), tuple(rows))


def note(comparison: Comparison) -> str:
    """What the table shows, what its other rows are, and where the texts are."""
    methods: dict[str, str] = {}
    for name in metrics(comparison):
        for run in comparison.all_runs():
            methods |= {title: does for title, (does, _) in run.others(name, "test").items()}
    parts = [
        "Mean over seeds, with its 95 % interval; intervals over test examples, where there are any, stand in each "
        "result.json (test_details), the texts in test_outputs.jsonl."
    ]
    parts += [f"{title} {does}." for title, does in methods.items()]
    return " ".join(parts)
