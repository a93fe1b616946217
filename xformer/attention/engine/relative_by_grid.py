"""Relative terms of tokens in a grid, by row and column; and which reader of tables a term needs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.engine.grid import Grid
from xformer.attention.engine.relative_by_position import RelativeByPosition
from xformer.attention.engine.relative_tiles import Relative, RelativeTiles, Sums

Array = jax.Array


class RelativeByGrid(RelativeByPosition):
    """`RelativeByPosition` in which a pair has two entries of the table, whose sum counts.

    `starts` is a pair of arrays of places, int `[b or 1, kv_heads or 1, groups or 1, q_block, keys]`.
    """

    def __init__(self, q_block: int, kv_block: int, grid: Grid, einsum: Any = jnp.einsum) -> None:
        super().__init__(q_block, kv_block, 0, einsum)
        self.grid, self.size = grid, grid.size

    def places(self, q_positions: Array, k_positions: Array) -> Any:
        return self.grid.entries(q_positions, k_positions)

    def expand(self, ends: Array, by_distance: Array | None, starts: Any, distant: bool = False) -> Array:
        row, column = (super(RelativeByGrid, self).expand(ends, by_distance, places, distant) for places in starts)
        return row + column

    def collapse(self, pairs: Array, starts: Any, distant: bool = False) -> Sums:
        row, column = (super(RelativeByGrid, self).collapse(pairs, places, distant) for places in starts)
        return row.add(column)


def reader(
    relative: Relative,
    q_block: int,
    kv_block: int,
    near_per_query_tile: float = math.inf,
    einsum: Any = jnp.einsum,
    *,
    by_position: bool = False,
) -> RelativeTiles:
    """What reads the tables of a term for tiles of this size; its `starts` come from `places` where it has that method.

    Args:
      relative: the term.
      q_block, kv_block, near_per_query_tile, einsum: see `RelativeTiles`.
      by_position: every token has a position of its own, which is given.

    Raises:
      ValueError: a grid, and something else than tables of keys and values.
    """
    if relative.grid is not None:
        if relative.bias_table is not None or relative.slopes is not None:
            raise ValueError("a Relative with a grid has a key_table and a value_table only, got biases or slopes")
        return RelativeByGrid(q_block, kv_block, relative.grid, einsum)
    if by_position:
        return RelativeByPosition(q_block, kv_block, relative.radius, einsum)
    return RelativeTiles(q_block, kv_block, relative.radius, near_per_query_tile, einsum)
