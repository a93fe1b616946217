"""The user's own documents: JSON lines, CSV, TSV, or a folder of one folder a label. Errors name file and line."""

from __future__ import annotations

import functools
import json
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xformer.tasks import tables


class Document(NamedTuple):
    """A labelled text, or two: `place` is file and line, for messages; `second` is None where there is one text."""

    place: str
    text: str
    label: Any
    second: str | None = None


def files(path: Path) -> list[Path]:
    """The files of a data set, in order. Raises ValueError if nothing is there."""
    return [file for file in _walk(path) if _is_document(path, file)] if _is_folder(path) else [path]


def left_out(path: Path) -> list[Path]:
    """The files in a folder that are no documents: not `LABEL/*.txt`; hidden ones are not counted."""
    return [file for file in _walk(path) if not _is_document(path, file)] if _is_folder(path) else []


def read(
    path: Path,
    text_field: str,
    label_field: str,
    second_field: str | None = None,
    parse: Callable[[str, str, Any], Any] | None = None,
) -> list[Document]:
    """All documents. Raises ValueError, one line that names the place, for whatever can't be a labelled document.

    Args:
      path: a file, or a folder of one folder a label.
      second_field: the field of the second text, where there is one.
      parse: (place, what, value of the label's field) -> label; one class by default.
    """
    parse = parse or clean_label
    if _is_folder(path):
        documents = list(_folder(path))
    else:
        fields = [text_field, label_field, *([] if second_field is None else [second_field])]
        documents = [
            Document(
                place,
                _text(place, row, text_field),
                parse(place, f"field {label_field!r}", _field(place, row, label_field)),
                None if second_field is None else _text(place, row, second_field),
            )
            for place, row in (
                (f"{path} line {line}", row) for line, row in _rows(path, fields, "a folder LABEL/*.txt")
            )
        ]
    if not documents:
        raise ValueError(f"{path} is empty: no " + ("LABEL/*.txt in it" if path.is_dir() else "document in it"))
    return documents


def text_files(path: Path) -> list[Path]:
    """The files that `read_unlabelled` reads, in order. Raises ValueError if nothing is there."""
    if _is_folder(path):
        return [file for file in _walk(path) if file.suffix.lower() == ".txt"]
    return [path]


def read_unlabelled(path: Path, text_field: str, second_field: str | None = None) -> list[Document]:
    """Texts without labels (`label` is None), in order. Raises ValueError as `read` does.

    Args:
      path: a `.txt` file; a folder of such files, at any depth, `place` being the path in it; or a table as for `read`,
        `place` being the line.
    """
    if _is_folder(path) or path.suffix.lower() == ".txt":
        folder = path if path.is_dir() else path.parent
        found = text_files(path)
        texts = [(file.relative_to(folder).as_posix(), decode(file)) for file in found]
        if empty := next((place for place, text in texts if not text.strip()), None):
            raise ValueError(f"{folder / empty} is empty")
        documents = [Document(place, text, None) for place, text in texts]
    else:
        fields = [text_field, *([] if second_field is None else [second_field])]
        documents = []
        for line, row in _rows(path, fields, ".txt or a folder of .txt files"):
            place = f"{path} line {line}"
            second = None if second_field is None else _text(place, row, second_field)
            documents.append(Document(f"line {line}", _text(place, row, text_field), None, second))
    if not documents:
        raise ValueError(f"{path} is empty: no " + (".txt in it" if path.is_dir() else "document in it"))
    return documents


TABLES = (".jsonl", ".ndjson", ".csv", ".tsv")
"""Endings of files with a row for each document, lower case."""


def _rows(path: Path, fields: Sequence[str], others: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of a table. Raises ValueError for a file of another kind; `others` names what is read besides."""
    readers: dict[str, Callable[[], Iterator[tuple[int, dict[str, Any]]]]] = {
        ".jsonl": lambda: _json_lines(path),
        ".ndjson": lambda: _json_lines(path),
        ".csv": lambda: tables.rows(path, decode(path), ",", fields),
        ".tsv": lambda: tables.rows(path, decode(path), "\t", fields),
    }
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path} must end in {', '.join(readers)} or be {others}")
    return readers[path.suffix.lower()]()


def decode(path: Path) -> str:
    """The text of a file, without a byte order mark. Raises ValueError where it is not UTF-8, or no text at all."""
    content = path.read_bytes()
    line = lambda index: content.count(b"\n", 0, index) + 1
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} line {line(error.start)} is not UTF-8 (byte {error.start})") from None
    if (index := content.find(b"\0")) >= 0:
        raise ValueError(f"{path} line {line(index)} holds a zero byte; takes UTF-8 text")
    return text


def _is_folder(path: Path) -> bool:
    try:
        if path.is_dir():
            return True
        if path.is_file():
            return False
    except (OSError, ValueError):  # a name that no file can have
        pass
    raise ValueError(f"path: got {str(path)!r}, takes a file or folder that is there")


def _is_document(folder: Path, file: Path) -> bool:
    return file.suffix.lower() == ".txt" and file.parent != folder


def _walk(path: Path) -> Iterator[Path]:
    """The files below a folder in order, hidden ones left out, links followed."""

    def visit(folder: str, above: tuple[str, ...]) -> Iterator[Path]:
        real = os.path.realpath(folder)
        if real in above:
            raise ValueError(f"{folder} is a link to a folder that it lies in")
        for name in sorted(os.listdir(folder)):
            entry = os.path.join(folder, name)
            if name.startswith("."):
                continue
            if os.path.isdir(entry):
                yield from visit(entry, (*above, real))
            elif os.path.isfile(entry):
                yield Path(entry)
            else:
                raise ValueError(f"{entry} is a link to nothing, or no file")

    return visit(str(path), ())


def _folder(path: Path) -> Iterator[Document]:
    for file in files(path):
        text = decode(file)
        if not text.strip():
            raise ValueError(f"{file} is empty")
        yield Document(str(file), text, clean_label(str(file), "folder", file.relative_to(path).parts[0]))


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(decode(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            row = json.loads(line, object_pairs_hook=functools.partial(_object, place))
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is no JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise ValueError(f"{place} is no JSON object, but nested too deep") from None
        except ValueError as error:
            message = str(error)
            raise ValueError(message if message.startswith(place) else f"{place}: {message}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{place} must be a JSON object, got {line.strip()[:40]!r}")
        yield number, row


def _object(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise ValueError(f"{place} has the field {key!r} twice")
        row[key] = value
    return row


def _text(place: str, row: dict[str, Any], field: str) -> str:
    text = _field(place, row, field)
    if not isinstance(text, str):
        raise ValueError(f"{place}: field {field!r} must be a string, got {text!r:.40}")
    if not text.strip():
        raise ValueError(f"{place}: field {field!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"{text[error.start]!r} at character {error.start}"
        raise ValueError(f"{place}: field {field!r} holds half a surrogate pair, {what}") from None
    return text


def clean_label(place: str, what: str, label: Any) -> str:
    """A label as a string: white space around it is no part of it, and characters that look alike are one (NFC).

    Raises ValueError for a label that is neither an int nor a string, is empty, or can't be printed.
    """
    cleaned = unicodedata.normalize("NFC", str(label).strip())
    if isinstance(label, bool) or not isinstance(label, str | int) or not cleaned or not cleaned.isprintable():
        raise ValueError(f"{place}: {what} must be a label (int or printable string), got {label!r:.40}")
    return cleaned


def _field(place: str, row: dict[str, Any], field: str) -> Any:
    if field not in row:
        raise ValueError(f"{place} has no field {field!r}; it has {', '.join(map(repr, row)) or 'none'}")
    return row[field]
