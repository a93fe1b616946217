"""How the runs of a comparison were made: device, versions, seeds, data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xformer.report import formatting, summary, timing
from xformer.report.results import Comparison, mapping, number, read_json

FILE = "made.json"


def sessions(workdir: Path) -> list[tuple[str, str]]:
    """(when, what was run, on what) of each call that trained something, as the command kept it in `made.json`."""
    kept = (read_json(workdir / FILE) or {}).get("sessions")
    return [_session(mapping(session)) for session in kept] if isinstance(kept, list) else []


def _session(session: Mapping[str, Any]) -> tuple[str, str]:
    machine = mapping(session.get("machine"))
    commit = str(machine.get("commit") or "")
    changed = ", with uncommitted changes" if commit.endswith("+") else ""
    memory = number(machine, "memory_bytes")
    parts = [
        str(session.get("command", "")),
        f"trained {session['trained']}" if session.get("trained") else "",
        f"commit {commit.rstrip('+')[:12]}{changed}" if commit else "no commit is known",
        f"{machine.get('cpu', '')}, {machine.get('cores', '')} cores, {machine.get('device', '')}",
        f"{formatting.mebibytes(memory)} of memory" if math.isfinite(memory) else "",
        " ".join(f"{name}={value}" for name, value in mapping(machine.get("environment")).items()),
    ]
    return str(session.get("began", "")), "; ".join(filter(None, parts))


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
        (
            "Step time",
            "median over steps, or the mean where their batches have several lengths, compilation left out, and "
            f"the middle 80 % of steps where given; {timing.RULE}",
        ),
        ("Peak memory", "the largest of all seeds"),
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
