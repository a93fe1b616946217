"""Sections of a report that a user's own function makes, named by `"package.module:function"`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from xformer import lookup
from xformer.checks import ArgumentError
from xformer.report import style
from xformer.report.results import Comparison
from xformer.report.tables import Table

PNG = b"\x89PNG\r\n\x1a\n"


@dataclasses.dataclass(frozen=True)
class Section:
    """What a user's function gives: a title and at least one of a text, a table and a picture.

    Attributes:
      title: a heading.
      text: a paragraph, shown as it is.
      table: headers and rows of text.
      picture: a PNG.
    """

    title: str
    text: str = ""
    table: Table | None = None
    picture: bytes | None = None


Make = Callable[[Comparison], Section]


def find(names: Sequence[str]) -> list[Make]:
    """The functions of these names.

    Raises:
      ArgumentError: one can't be imported, or can't be called with a comparison alone; one line that names it.
    """
    found = []
    for index, name in enumerate(names):
        key = f"report.sections[{index}]"
        make = lookup.import_class(key, name)
        try:
            inspect.signature(make).bind(object())
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                key, f"{key}: got {name!r}, takes a function of one argument, the comparison ({error})"
            ) from error
        found.append(make)
    return found


def make(comparison: Comparison, names: Sequence[str]) -> tuple[list[Section], list[str]]:
    """(the sections, a line for each that could not be made): what a function raises costs its own section only."""
    sections, warnings = [], []
    for index, name in enumerate(names):
        key = f"report.sections[{index}]"
        try:
            own = find(names[index : index + 1])[0]
            section = lookup.guarded(f"{key} {name!r}", lambda own=own: own(comparison), _Failed)  # type: ignore[misc]
            if (wrong := _wrong(section)) is not None:
                raise _Failed(f"{key} {name!r} gave {wrong}")
        except (_Failed, ArgumentError) as error:
            warnings.append(f"{error}; the report is without it")
        else:
            sections.append(section)
    return sections, warnings


class _Failed(Exception):
    """A function of a user's raised something, or gave something else than a Section."""


def _wrong(section: Any) -> str | None:
    """What is wrong with what a function gave; None if nothing is."""
    if not isinstance(section, Section):
        return f"a {type(section).__name__}, takes an xformer.report.Section"
    if not isinstance(section.title, str) or not section.title.strip():
        return f"the title {section.title!r}, takes a text"
    if not isinstance(section.text, str):
        return f"a text that is a {type(section.text).__name__}"
    table, picture = section.table, section.picture
    if table is not None and not isinstance(table, Table):
        return f"a table that is a {type(table).__name__}, takes an xformer.report.Table"
    if table is not None and any(len(row) != len(table.headers) for row in table.rows):
        return f"a table with a row of another length than its {len(table.headers)} headers"
    if table is not None and not all(isinstance(cell, str) for row in (table.headers, *table.rows) for cell in row):
        return "a table with a cell that is no text"
    if picture is not None and not (isinstance(picture, bytes) and picture.startswith(PNG)):
        return "a picture that is no PNG"
    if picture is not None:
        try:
            style.webp(picture)
        except (OSError, SyntaxError, ValueError):  # as Pillow tells of a damaged file
            return "a picture that is a damaged PNG"
    return None
