"""Where the data of a task may come from, under which licence, and what has to be done first: `xformer data --list`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

UNKNOWN = "unknown"
MADE_HERE = "none, as it is made here"


@dataclasses.dataclass(frozen=True)
class Origin:
    """One of the sources of a task's data.

    Attributes:
      source: where the data comes from, in words.
      licence: what the package or its publisher states, and nothing else.
      size: how much there is, in words.
      options: those of the task that choose this source.
      given: options that only the user can know, such as the path of a file, with a word that stands for their value.
      fetch: the command that brings what `prepare` reads, `{data_dir}` standing for the folder of all data; "" where
        nothing has to be brought.
    """

    source: str = UNKNOWN
    licence: str = UNKNOWN
    size: str = UNKNOWN
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    given: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fetch: str = ""


def required(task: type) -> dict[str, str]:
    """The options that a task can't do without, each with its name in capitals for its value."""
    fields = dataclasses.fields(task)
    missing = dataclasses.MISSING
    return {
        field.name: field.name.upper()
        for field in fields
        if field.init and field.default is missing and field.default_factory is missing
    }
