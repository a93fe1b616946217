"""From what a constructor raises to one line about the key of the config that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from xformer.schema import ConfigError

T = TypeVar("T")

# How a message says which argument it is about, at its start: `Class.argument`, `argument must`, `argument: `,
# `argument takes`, `argument=`, or `name of a task: argument must`. Nothing else of a message is read.
_OWNED = re.compile(r"(?P<owner>[A-Z]\w*)\.(?P<key>\w+)\b")
_PLAIN = re.compile(r"(?P<key>[a-z]\w*)(?:: | must\b| takes\b|=)")
_TASK = re.compile(r"\w+: (?P<key>[a-z]\w*) must\b")


def construct(
    section: str,
    make: Callable[[], T],
    *,
    keys: Mapping[str, Mapping[str, Any]],
    owners: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> T:
    """`make()`; what it refuses is a ConfigError about the key that the error names.

    An error names its key by an attribute `key` (`xformer.checks.ArgumentError`) or at the start of its message.

    Args:
      section: the section that `make` is given, which an error without a key is about.
      keys: the keys of each section that an error may be about, in the order in which they are looked up.
      owners: the section of each class, by the class's name.
      elsewhere: the dotted path of arguments that no key of `section` sets.

    Raises:
      ConfigError: `make` raised ValueError or NotImplementedError, or a size is too large for this machine.
    """
    try:
        return make()
    except ConfigError:
        raise
    except (OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split()) or "the machine has not that much memory"
        raise ConfigError(f"{section}: a size is too large: {reason}") from error
    except (ValueError, NotImplementedError) as error:
        message = " ".join(str(error).split())
        path = _path(section, getattr(error, "key", None), message, keys, owners or {}, elsewhere or {})
        raise ConfigError(f"{path}: {message.removeprefix(path.rpartition('.')[2] + ': ')}") from error


def _path(
    section: str,
    key: str | None,
    message: str,
    keys: Mapping[str, Mapping[str, Any]],
    owners: Mapping[str, str],
    elsewhere: Mapping[str, str],
) -> str:
    owned = _OWNED.match(message)
    if key is None and owned and owned["owner"] in owners:
        return f"{owners[owned['owner']]}.{owned['key']}"
    starts = (form.match(message) for form in (_PLAIN, _TASK))
    for name in (key,) if key is not None else (start["key"] for start in starts if start):
        first, dot, rest = name.partition(".")
        if first in elsewhere:
            return f"{elsewhere[first]}{dot}{rest}"
        for path, own in keys.items():
            if first in own:
                return f"{path}.{name}"
    return section
