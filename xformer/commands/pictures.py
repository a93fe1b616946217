"""An attention op's pattern, in the parts it is made of, as the report draws it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from xformer.attention import Attention, LinearAttention, entries
from xformer.attention import pattern as patterns
from xformer.report import Pattern

MAX_REACH = 4096
HEAD_DIM = 32  # of the random inputs that pairs are chosen for
ORDER = ("random", "window", "global")  # later ones are drawn over earlier ones


def pattern(op: Attention, length: int, num_heads: int) -> Pattern:
    """Which pairs of `length` tokens `op` considers in the first layer, and which of them are due to which part.

    The parts of a stack are its entries, each in its first layer.
    """
    if len(entries(op)) > 1:
        return _stack(op, length, num_heads)
    op = op.at_layer(0)
    allowed = op.pattern(length, length, num_heads)
    if allowed is None:
        chosen = _chosen(op, length, num_heads)
        if chosen is None:
            return Pattern(None, note="no pairs of tokens:\n" + _mixing(op))
        return Pattern(chosen, note="of random inputs")
    found: dict[str, list[np.ndarray]] = {}
    if hasattr(op, "token_pattern"):
        for leaf in _leaves(op.token_pattern(length, num_heads)):
            found.setdefault(type(leaf).__name__.lower(), []).append(patterns.dense(leaf, length, length))
    names = sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else -1)
    parts = {name: functools.reduce(operator.or_, found[name]) & allowed for name in names}
    position = getattr(op, "position", None)
    return Pattern(allowed, parts, note="" if position is None else f"{type(position).__name__} positions")


def reach(op: Attention, length: int, num_layers: int, num_heads: int) -> int | None:
    """The furthest position whose token moves the output at position 0 after so many layers.

    None where a layer mixes the length without pairs of tokens, or above 4,096 positions, where patterns are large.
    """
    seen = np.eye(1, length, dtype=bool)[0]
    for layer in reversed(range(num_layers)):
        allowed = op.at_layer(layer).pattern(length, length, num_heads) if length <= MAX_REACH else None
        if allowed is None:
            return None
        seen |= allowed[:, seen].any(axis=(0, 1))
    return int(np.flatnonzero(seen)[-1])


def _chosen(op: Attention, length: int, num_heads: int) -> np.ndarray | None:
    """The pairs that `op` chooses for one example of random queries that are the keys too; None if it has no pairs."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, length, num_heads, HEAD_DIM)), jnp.float32)
    try:
        return np.asarray(op.pattern_of(x, x))[0]
    except NotImplementedError:
        return None


def _stack(op: Attention, length: int, num_heads: int) -> Pattern:
    kinds = [f"layer {index}: {type(entry).__name__}" for index, entry in enumerate(entries(op))]
    allowed = [op.at_layer(index).pattern(length, length, num_heads) for index in range(len(kinds))]
    if all(mask is None for mask in allowed):
        return Pattern(None, note="no pairs of tokens:\nthe length is mixed")
    parts = {kind: mask[:1] for kind, mask in zip(kinds, allowed, strict=True) if mask is not None}
    mixing = len(kinds) - len(parts)
    note = f"{len(kinds)} layers in turn" + (f", {mixing} of them without pairs" if mixing else "")
    return Pattern(functools.reduce(operator.or_, parts.values()), parts, note=note)


def _mixing(op: Attention) -> str:
    if isinstance(op, LinearAttention):
        return "queries meet a sum\nover the keys"
    rank = getattr(op, "rank", None)
    return "the length is mixed" if rank is None else f"the length is mixed\ninto {rank} slots"


def _leaves(pattern: patterns.Pattern) -> Iterator[patterns.Pattern]:
    if isinstance(pattern, patterns.Or):
        yield from _leaves(pattern.left)
        yield from _leaves(pattern.right)
    else:
        yield pattern
