"""How the runs of a comparison were made: device, versions, seeds, data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xformer.report import formatting, summary
from xformer.report.results import Comparison, mapping


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    """(label, text) of everything that the end of a report says; what no run says is left out."""
    any_run = next((run for run in comparison.all_runs() if run.result is not None), None)
    result: Mapping[str, Any] = any_run.result or {} if any_run else {}
    found = [
        ("Device", "; ".join(summary.devices(comparison))),
        ("Versions", "; ".join(summary.versions(comparison))),
        ("Seeds", ", ".join(str(seed) for seed in comparison.seeds)),
        ("Batch size", str(result.get("batch_size", ""))),
        *_of_data(comparison),
        ("Test", "once, with the checkpoint that was best on the validation split"),
        ("Step time", "median over steps, compilation left out; peak memory: the largest of all seeds"),
    ]
    return [(label, text) for label, text in found if text]


def _of_data(comparison: Comparison) -> list[tuple[str, str]]:
    """(label, text) of what the data was, and of what models made of it, where all runs that say so say the same."""
    finished = [run for run in comparison.all_runs() if run.result is not None]
    infos = [run.info for run in finished]
    percent = lambda info: {split: formatting.percent(share) for split, share in mapping(info.get("truncated")).items()}
    models = [mapping((run.result or {}).get("model")) for run in finished]
    found = {
        "Data": [summary.spelt(info.get("source", "")) for info in infos],
        "Data version": [summary.spelt(info.get("data_version", "")) for info in infos],
        "Content digest": [summary.spelt(info.get("digest", "")) for info in infos],
        "Tokenizer": [_tokenizer(mapping(info.get("tokenizer"))) for info in infos],
        "Examples": [summary.spelt(mapping(info.get("num_examples"))) for info in infos],
        "Truncated": [summary.spelt(percent(info)) for info in infos],
        "Towers": [summary.spelt({key: text for key, text in model.items() if key != "name"}) for model in models],
    }
    return [(label, texts[0]) for label, texts in found.items() if texts and set(texts) == {texts[0]} and texts[0]]


def _tokenizer(known: Mapping[str, Any]) -> str:
    return f"{known['kind']}, {known['size']:,} ids" if {"kind", "size"} <= known.keys() else ""
