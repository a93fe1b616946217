"""The text and the picture of `xformer data --describe`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xformer.report import formatting, lengths, style
from xformer.report.tables import Table
from xformer.tasks import Task, TaskData, description, readiness

MAX_LABELS = 30  # that are listed, the commonest


def text(task: Task, data: TaskData, name: str, folder: Path | None, at: Sequence[int]) -> str:
    """What is known of opened data, for a terminal.

    Args:
      folder: where it lies; None where that isn't known.
      at: lengths in tokens, to say which share of the texts is longer.
    """
    return "\n\n".join(filter(None, (
        "\n".join(_source(data, name, folder)),
        _splits(data).text(),
        _longer(data, at).text(),
        "\n".join(_labels(data)),
        "\n".join(_baselines(task, data)),
        "\n".join(_examples(task, data)),
    )))  # fmt: skip


def draw(data: TaskData, out: Path) -> str:
    """Writes the picture of the lengths of the training split; the line that says what was done."""
    image = lengths.picture(data.examples("train").lengths, data.max_len, style.LIGHT)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(image)
    return f"lengths of train: {out}"


def _source(data: TaskData, name: str, folder: Path | None) -> Iterator[str]:
    info, tokenizer = data.info, data.info["tokenizer"]
    yield f"{name}: {info.get('source', 'source unknown')}"
    if folder is not None:
        size = formatting.mebibytes(readiness.num_bytes(folder))
        yield f"in {folder}, {size}, version {info.get('data_version', 'unknown')}"
    yield f"content digest {info['digest']}"
    yield f"tokenizer: {tokenizer['kind']}, {tokenizer['size']:,} ids; max_len {data.max_len:,}"
    known = ("digest", "source", "data_version", "num_classes", "vocab_size", "max_len")
    others = {key: value for key, value in info.items() if isinstance(value, int | float) and key not in known}
    if others:
        yield "; ".join(f"{key.replace('_', ' ')}: {value:,}" for key, value in others.items())


def _splits(data: TaskData) -> Table:
    """Sizes and lengths; and how many examples stand in the training split too.

    Where models do not read the stored texts one by one there are rows besides.
    """
    same, near = description.repeated(data), data.info.get("near_duplicates")
    packed = any(data.num_examples(split) != len(data.examples(split)) for split in data.splits)
    headers = [
        "split",
        *(["texts", "rows"] if packed else ["examples"]),
        *(f"length, {name}" for name in data.info["lengths"]["train"]),
        "also in train",
    ]
    headers += ["but for case and space"] if near is not None else []
    rows = []
    for split in data.splits:
        counts = [len(data.examples(split))] * packed + [data.num_examples(split)]
        sizes = [*counts, *data.info["lengths"][split].values()]
        row = (split, *(f"{size:,}" for size in sizes), _count(same, split))
        rows.append(row if near is None else (*row, _count(near, split)))
    return Table(tuple(headers), tuple(rows))


def _count(counts: Mapping[str, int], split: str) -> str:
    return f"{counts[split]:,}" if split in counts else formatting.MISSING


def _longer(data: TaskData, at: Sequence[int]) -> Table:
    at = sorted({*at, data.max_len})
    shares = description.longer_than(data, at)
    headers = ("share longer than", *(f"{most:,}{' (max_len)' if most == data.max_len else ''}" for most in at))
    return Table(headers, tuple((split, *map(formatting.percent, own)) for split, own in shares.items()))


def _labels(data: TaskData) -> Iterator[str]:
    """The share of each label by split, the commonest of the training split first; or what numbers are like."""
    if (targets := data.info.get("targets")) is not None:
        headers = ("numbers", *next(iter(targets.values())))
        rows = ((split, *(f"{value:.4g}" for value in own.values())) for split, own in targets.items())
        yield Table(headers, tuple(rows)).text()
        return
    if not data.class_names:
        yield "no labels"
        return
    shares: Mapping[str, Sequence[float]] | None = data.info.get("label_shares")
    if shares is None:
        yield f"{len(data.class_names):,} labels: {', '.join(data.class_names[:MAX_LABELS])}, ..."
        return
    order = sorted(range(len(data.class_names)), key=lambda index: -shares["train"][index])
    shown = order[:MAX_LABELS]
    rows = (
        (description.short(data.class_names[index], 40), *(formatting.percent(own[index]) for own in shares.values()))
        for index in shown
    )
    yield Table(("label", *shares), tuple(rows)).text()
    if len(order) > len(shown):
        yield f"and {len(order) - len(shown):,} rarer labels"


def _baselines(task: Task, data: TaskData) -> Iterator[str]:
    """What simple methods score by the metric that runs select by."""
    metric, found = next(iter(task.better)), task.baseline(data)
    methods: list[Mapping[str, Any]] = [found, *found.get("others", ())]
    splits = list(found["scores"])
    spell = formatting.percent if metric in ("accuracy", "macro_f1", "micro_f1") else lambda value: f"{value:.4f}"
    rows = []
    for method in methods:
        scores = (method["scores"].get(split, {}).get(metric, math.nan) for split in splits)
        shown = (spell(score) if math.isfinite(score) else formatting.MISSING for score in scores)
        rows.append((method["name"] + (f" ({method['missing']})" if "missing" in method else ""), *shown))
    yield Table((f"{metric} of a method that", *splits), tuple(rows)).text()


def _examples(task: Task, data: TaskData) -> Iterator[str]:
    found = description.examples(task.family, data)
    yield f"{len(found)} examples of train, label first:"
    for label, shown in found:
        yield f"  [{label}] {shown}"
