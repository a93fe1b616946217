"""One-line refusals of wrong constructor arguments, shared by the tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

from xformer.checks import is_integer


def whole(task: str, key: str, value: Any, *, at_least: int, why: str = "") -> None:
    """Raises ValueError unless the value is an int (True is none) of at least so much."""
    if not is_integer(value) or value < at_least:
        raise ValueError(f"{task}: {key} must be an int of at least {at_least}{why}, got {value!r}")


def choice(task: str, key: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises ValueError unless the value is one of the allowed strings."""
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{task}: {key} must be one of {', '.join(allowed)}, got {value!r}")


def shares(task: str, **values: Any) -> None:
    """Raises ValueError unless every share is a number above 0 and together they leave something for training."""
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < 1:
            raise ValueError(f"{task}: {key} must be a number between 0 and 1, both excluded, got {value!r}")
    if math.fsum(values.values()) >= 1:
        given = " + ".join(f"{key}={value}" for key, value in values.items())
        raise ValueError(f"{task}: {given} leave nothing to train on; their sum must be below 1")


def unset(task: Any, keys: Iterable[str], what: str) -> None:
    """Raises ValueError for a key that is not at its default, where the task's `path` leaves it without use."""
    for key in keys:
        if (value := getattr(task, key)) != getattr(type(task), key):
            raise ValueError(f"{task.name}: {key} is for {what}, got {value} with path {task.path!r}")
