"""The user's own pairs of texts: tables with a field for each side, or two files whose lines belong together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from xformer.tasks import pairs, reading
from xformer.tasks.pairs import Pair
from xformer.tasks.text import Source, Texts, digest

_READING = "1"  # what the same files are read as; another number where that changes


class Files(NamedTuple):
    """A table of pairs, or a file of sources and `target`, the file of their targets, line by line."""

    path: Path
    target: Path | None


def source(
    files: Mapping[str, Files],
    fields: tuple[str, str],
    shares: Mapping[str, float],
    ratio: float | None,
    keep_copies: bool = False,
) -> Source:
    """The pairs of files by part, `train` among them; a part without files is cut off that. `ratio`, `keep_copies`: see
    `cleaned`, which those of training pass.

    Raises ValueError for files that are not there or can't be read.
    """
    parts: list[bytes | str] = [_READING, *fields, str(shares), str(ratio)]
    for part, own in files.items():
        for file in filter(None, own):
            if not file.is_file():
                key = "path" if file == own.path else "target_path"
                raise ValueError(f"{_before(part)}{key}: got {str(file)!r}, takes a file that is there")
            parts += [part, file.suffix, file.read_bytes()]
    name = ", ".join(str(file) for own in files.values() for file in own if file)
    key = digest(*parts, *pairs.options(keep_copies))
    return Source(name, key, lambda: _read(files, fields, shares, ratio, keep_copies))


def _read(
    files: Mapping[str, Files],
    fields: tuple[str, str],
    shares: Mapping[str, float],
    ratio: float | None,
    keep_copies: bool,
) -> Texts:
    counts: dict[str, int] = {}
    found = {part: read(own, fields, part) for part, own in files.items()}
    train = pairs.cleaned(found["train"], counts, ratio, keep_copies)
    cut = pairs.by_group(pairs.grouped(train), {part: s for part, s in shares.items() if part not in found}, counts)
    return pairs.as_texts({**found, **cut}, counts)


def read(files: Files, fields: tuple[str, str], part: str = "train") -> list[Pair]:
    """All pairs of a part. ValueError, one line that names the place, for what can't be a pair."""
    if files.target is not None:
        if table := next((file for file in (files.path, files.target) if file.suffix.lower() in reading.TABLES), None):
            raise ValueError(
                f"{_before(part)}target_path: got {str(files.target)!r}, but {table} is a table, of more than a text a "
                "line; takes None beside a table of both sides, or two files of lines that end otherwise"
            )
        return _lines(files.path, files.target, _before(part))
    if files.path.suffix.lower() not in reading.TABLES:
        before = _before(part)
        raise ValueError(
            f"{before}path: {files.path} must be a table ({', '.join(reading.TABLES)}) of the fields {fields[0]!r} and "
            f"{fields[1]!r}, or have task.{before}target_path: the file of its targets, a line for each of its lines"
        )
    documents = reading.read_unlabelled(files.path, *fields)
    return [Pair(document.text, document.second or "") for document in documents]


def _before(part: str) -> str:
    """What the keys of a part begin with, for messages."""
    return "" if part == "train" else f"{part}_"


def _lines(path: Path, target: Path, before: str) -> list[Pair]:
    sides = [_text_lines(file) for file in (path, target)]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{before}target_path: {target} must have as many lines as {path}, got {len(sides[1]):,} and "
            f"{len(sides[0]):,}"
        )
    found = []
    for number, (one, two) in enumerate(zip(*sides, strict=True), start=1):
        if bool(one.strip()) != bool(two.strip()):
            raise ValueError(f"{before}target_path: line {number} is empty in {path if two.strip() else target} alone")
        if one.strip():
            found.append(Pair(one.strip(), two.strip()))
    if not found:
        raise ValueError(f"{before}path: {path} has no line with a text")
    return found


def _text_lines(file: Path) -> list[str]:
    """The lines of a file, as `split` and other tools count them: by line feeds alone."""
    return reading.decode(file).removesuffix("\n").split("\n")
