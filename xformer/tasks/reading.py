"""The user's own documents: JSON lines, CSV, TSV, or a folder of one folder a label. Errors name file and line."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Document = tuple[str, str, str]
"""Place (file and line, for messages), text, label."""


def files(path: Path) -> list[Path]:
    """The files of a data set, in order. Raises ValueError if nothing is there."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"path: got {str(path)!r}, takes a file or folder that is there")
    return sorted(
        file
        for file in path.glob("*/**/*.txt")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def read(path: Path, text_field: str, label_field: str) -> list[Document]:
    """All documents. Raises ValueError, one line that names the place, for whatever can't be a labelled document."""
    if path.is_dir():
        documents = list(_folder(path))
    else:
        readers: dict[str, Callable[[Path], Iterator[tuple[int, dict[str, Any]]]]] = {
            ".jsonl": _json_lines,
            ".ndjson": _json_lines,
            ".csv": _table,
            ".tsv": _table,
        }
        if path.suffix.lower() not in readers:
            raise ValueError(f"documents: {path} must end in {', '.join(readers)} or be a folder LABEL/*.txt")
        documents = [
            (place, _text(place, row, text_field), _label(place, row, label_field))
            for place, row in ((f"{path} line {line}", row) for line, row in readers[path.suffix.lower()](path))
        ]
    if not documents:
        raise ValueError(
            f"documents: {path} is empty: no " + ("LABEL/*.txt in it" if path.is_dir() else "document in it")
        )
    return documents


def _folder(path: Path) -> Iterator[Document]:
    for file in files(path):
        text = _decode(file)
        if not text.strip():
            raise ValueError(f"documents: {file} is empty")
        yield str(file), text, file.relative_to(path).parts[0]


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_decode(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"documents: {path} line {number} is no JSON: {error.msg} at column {error.colno}"
            ) from None
        except RecursionError:
            raise ValueError(f"documents: {path} line {number} is no JSON object, but nested too deep") from None
        if not isinstance(row, dict):
            raise ValueError(f"documents: {path} line {number} must be a JSON object, got {line.strip()[:40]!r}")
        yield number, row


def _table(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    before = csv.field_size_limit(sys.maxsize)  # its default, 131,072 characters, is shorter than a long document
    try:
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        reader = csv.DictReader(io.StringIO(_decode(path), newline=""), delimiter=delimiter, strict=True)
        for row in reader:
            if None in row or None in row.values():
                columns = len(reader.fieldnames or ())
                raise ValueError(
                    f"documents: {path} line {reader.line_num} doesn't have the {columns} columns of line 1"
                )
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"documents: {path} line {reader.line_num} is no {path.suffix[1:].upper()}: {error}") from None
    finally:
        csv.field_size_limit(before)


def _text(place: str, row: dict[str, Any], field: str) -> str:
    text = _field(place, row, field)
    if not isinstance(text, str):
        raise ValueError(f"documents: {place}: field {field!r} must be a string, got {text!r:.40}")
    if not text.strip():
        raise ValueError(f"documents: {place}: field {field!r} is empty")
    return text


def _label(place: str, row: dict[str, Any], field: str) -> str:
    label = _field(place, row, field)
    if not isinstance(label, str | int) or label == "" or not str(label).isprintable():
        raise ValueError(
            f"documents: {place}: field {field!r} must be a label (int or printable string), got {label!r:.40}"
        )
    return str(label)


def _field(place: str, row: dict[str, Any], field: str) -> Any:
    if field not in row:
        raise ValueError(f"documents: {place} has no field {field!r}; it has {', '.join(map(repr, row)) or 'none'}")
    return row[field]


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"documents: {path} is not UTF-8 (byte {error.start})") from None
