"""Rows of CSV and TSV files with the line each begins on; what can be read in two ways is refused."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

Row = tuple[int, list[str]]
"""The line that a row begins on, and its fields."""


def rows(path: Path, text: str, delimiter: str, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, value by column) of each row; the first line names the columns, empty lines are skipped.

    CSV is RFC 4180: a quoted field may hold delimiters and line ends. Many TSV files know no quotes, and there a field
    may well begin with one (`"5 inch`), so TSV is read without quotes where only that makes rows of equal length.

    Args:
      path: for messages.
      fields: columns that will be read; none of them may be there twice.

    Raises:
      ValueError: one line with the place, for a row of another length than the first, a quote that is not closed, a
        column named twice, and a TSV file that makes sense both with and without quotes, but not the same.
    """
    kind = path.suffix[1:].upper()
    try:
        found = _checked(path, list(_quoted(text, delimiter)))
    except (csv.Error, ValueError) as error:
        place = error.args[0] if isinstance(error, ValueError) else f"{path} is no {kind}: {error}"
        if delimiter != "\t":
            raise ValueError(place) from None
        try:
            found = _checked(path, _unquoted(text, delimiter))
        except ValueError:
            raise ValueError(place) from None
    else:
        if delimiter == "\t" and '"' in text:
            _check_quotes(path, text, delimiter, found)
    if not found:
        return
    (_, header), *body = found
    for name in fields:
        if header.count(name) > 1:
            raise ValueError(f"{path} line 1 names the column {name!r} {header.count(name)} times")
    for line, row in body:
        yield line, dict(zip(header, row, strict=True))


def _checked(path: Path, found: list[Row]) -> list[Row]:
    for line, row in found:
        if len(row) != len(found[0][1]):
            raise ValueError(f"{path} line {line} doesn't have the {len(found[0][1])} columns of line 1")
    return found


def _quoted(text: str, delimiter: str) -> Iterator[Row]:
    before = csv.field_size_limit(sys.maxsize)  # its default, 131,072 characters, is shorter than a long document
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise csv.Error(f"{error} (the row that begins on line {line})") from None
            if row:
                yield line, row
    finally:
        csv.field_size_limit(before)


def _unquoted(text: str, delimiter: str) -> list[Row]:
    lines = text.replace("\r\n", "\n").split("\n")
    return [(number, line.split(delimiter)) for number, line in enumerate(lines, start=1) if line]


def _check_quotes(path: Path, text: str, delimiter: str, found: list[Row]) -> None:
    """Refuses a file in which a quoted field spans lines that would be rows of the right length by themselves."""
    try:
        plain = _checked(path, _unquoted(text, delimiter))
    except ValueError:
        return
    if len(plain) != len(found):
        begins = {line for line, _ in found}
        line = next(line for line, _ in plain if line not in begins) - 1
        raise ValueError(
            f"{path} line {line}: a quote opens a field that ends on a later line, but each line is a row "
            'of its own too; write a quote inside of a field as "" and put quotes around the field, or use .jsonl'
        )
