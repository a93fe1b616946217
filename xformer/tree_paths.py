"""Names of the arrays in a tree of parameters. Standard library only, so that every room may import it."""

from __future__ import annotations

from typing import Any


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as `blocks/0/attention/value/kernel`; the `value` that Flax puts at the end is left out."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
    return "/".join(names[:-1] if len(names) > 1 and names[-1] == "value" else names)
