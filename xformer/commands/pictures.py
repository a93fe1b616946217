"""An attention op's pattern, in the parts it is made of, as the report draws it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

import numpy as np

from xformer.attention import Attention
from xformer.attention import pattern as patterns
from xformer.report import Pattern

ORDER = ("random", "window", "global")  # later ones are drawn over earlier ones


def pattern(op: Attention, length: int, num_heads: int) -> Pattern:
    """Which pairs of `length` tokens `op` considers in the first layer, and which of them are due to which part."""
    op = op.at_layer(0)
    allowed = op.pattern(length, length, num_heads)
    if allowed is None:
        return Pattern(None, note="no pairs of tokens:\n" + _mixing(op))
    found: dict[str, list[np.ndarray]] = {}
    if hasattr(op, "token_pattern"):
        for leaf in _leaves(op.token_pattern(length, num_heads)):
            found.setdefault(type(leaf).__name__.lower(), []).append(patterns.dense(leaf, length, length))
    names = sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else -1)
    parts = {name: functools.reduce(operator.or_, found[name]) & allowed for name in names}
    position = getattr(op, "position", None)
    return Pattern(allowed, parts, note="" if position is None else f"{type(position).__name__} positions")


def _mixing(op: Attention) -> str:
    rank = getattr(op, "rank", None)
    return "the length is mixed" if rank is None else f"the length is mixed\ninto {rank} slots"


def _leaves(pattern: patterns.Pattern) -> Iterator[patterns.Pattern]:
    if isinstance(pattern, patterns.Or):
        yield from _leaves(pattern.left)
        yield from _leaves(pattern.right)
    else:
        yield pattern
