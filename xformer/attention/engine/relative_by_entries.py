"""Relative terms of which a pair reads one or more entries, such as those of its row and column in a grid; and which
reader of tables a term needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.engine.relative_by_position import RelativeByPosition
from xformer.attention.engine.relative_tiles import Relative, RelativeTiles, Sums

Array = jax.Array


class RelativeByEntries(RelativeByPosition):
    """`RelativeByPosition` in which a pair has some entries of the table, whose sum counts.

    `starts` is a tuple of arrays of places, int `[b or 1, kv_heads or 1, groups or 1, q_block, keys]`.
    """

    def __init__(self, q_block: int, kv_block: int, size: int, einsum: Any = jnp.einsum) -> None:
        super().__init__(q_block, kv_block, 0, einsum)
        self.size = size

    def expand(self, ends: Array, by_distance: Array | None, starts: Any, distant: bool = False) -> Array:
        parts = [super(RelativeByEntries, self).expand(ends, by_distance, places, distant) for places in starts]
        return functools.reduce(jnp.add, parts)

    def collapse(self, pairs: Array, starts: Any, distant: bool = False) -> Sums:
        parts = [super(RelativeByEntries, self).collapse(pairs, places, distant) for places in starts]
        return functools.reduce(Sums.add, parts)


def places(
    tile: RelativeTiles, relative: Relative, q_positions: Array, k_positions: Array, distances: Callable[[], Array]
) -> Any:
    """`starts` of a tile whose pairs are looked up one by one.

    Args:
      tile: what reads the term's tables, of `reader`.
      relative: the term.
      q_positions, k_positions: `[b or 1, kv_heads or 1, groups or 1, q_block, 1]` and `[..., 1, keys]`.
      distances: gives those of the pairs in their trees, `[..., q_block, keys]`.
    """
    if relative.trees is not None:
        return relative.trees.entries(distances(), q_positions, k_positions)
    if relative.grid is not None:
        return relative.grid.entries(q_positions, k_positions)
    assert isinstance(tile, RelativeByPosition)
    return tile.places(q_positions, k_positions)


def reader(
    relative: Relative,
    q_block: int,
    kv_block: int,
    near_per_query_tile: float = math.inf,
    einsum: Any = jnp.einsum,
    *,
    by_position: bool = False,
) -> RelativeTiles:
    """What reads the tables of a term for tiles of this size.

    Args:
      relative: the term.
      q_block, kv_block, near_per_query_tile, einsum: see `RelativeTiles`.
      by_position: every token has a position of its own, which is given.

    Raises:
      ValueError: a grid or trees, and something else than tables of keys and values.
    """
    if relative.entries_of is not None:
        if relative.bias_table is not None or relative.slopes is not None:
            raise ValueError(
                "a Relative with a grid or trees has a key_table and a value_table only, got biases or slopes"
            )
        return RelativeByEntries(q_block, kv_block, relative.entries_of.size, einsum)
    if by_position:
        return RelativeByPosition(q_block, kv_block, relative.radius, einsum)
    return RelativeTiles(q_block, kv_block, relative.radius, near_per_query_tile, einsum)
