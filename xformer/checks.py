"""Checks and messages that every room uses. Standard library only, so that every room may import it."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable
from typing import Any


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, NumPy's included; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_integer(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> None:
    """Raises ValueError with one line that has `name` unless the value is an integer in the range, both ends allowed.

    Args:
      name: what the value is called where the user gave it, such as `Window.left`.
      value: anything.
      at_least: the smallest value allowed.
      at_most: the largest value allowed; None: any.
    """
    if not is_integer(value) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least:,}, got {value!r}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name} must be at most {at_most:,}, got {value:,}")


def nearest(name: Any, choices: Iterable[Any], *, cutoff: float = 0.6) -> str | None:
    """The choice that is spelt most like `name`, upper and lower case alike; None where none comes near.

    Args:
      name: what was given.
      choices: what is allowed.
      cutoff: how alike the two must be, from 0 to 1 (`difflib.get_close_matches`).
    """
    spelt = {str(choice).lower(): str(choice) for choice in choices}
    near = difflib.get_close_matches(str(name).lower(), list(spelt), n=1, cutoff=cutoff)
    return spelt[near[0]] if near else None


def did_you_mean(name: Any, choices: Iterable[Any]) -> str:
    """`; did you mean X?` for the end of a message, or nothing where no choice comes near."""
    near = nearest(name, choices)
    return f"; did you mean {near}?" if near else ""


class ArgumentError(ValueError):
    """A constructor argument that cannot be used, by name.

    Attributes:
      key: the argument, dotted where it is an argument of an argument (`attention.max_len`).
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(key, message)  # both, so that the error can be pickled
        self.key = key

    def __str__(self) -> str:
        return str(self.args[1])
