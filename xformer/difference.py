"""Where two configs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTHING = "nothing"  # stands for a key that is not there


def difference(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """(value in `old`, value in `new`) by dotted key, for every value that differs in two nested mappings.

    A key that one of them lacks has the value "nothing" there. Values of different types differ (1, 1.0 and True).
    """
    nested = [side for side in (old, new) if isinstance(side, Mapping)]
    absent = [side for side in (old, new) if isinstance(side, str) and side == NOTHING]
    if not nested or len(nested) + len(absent) < 2 or nested == [{}]:
        return {} if old == new and type(old) is type(new) else {path: (old, new)}
    before, after = (side if isinstance(side, Mapping) else {} for side in (old, new))
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*before, *after]):
        inner = f"{path}.{key}" if path else key
        found |= difference(before.get(key, NOTHING), after.get(key, NOTHING), inner)
    return found
