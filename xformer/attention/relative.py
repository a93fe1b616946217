"""Relative terms on tiles: tables indexed by clipped distance, read by skewing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention import tiles

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key_table", "value_table", "bias_table", "slopes"],
    meta_fields=["radius"],
)
@dataclasses.dataclass(frozen=True)
class Relative:
    """What a position term adds, as tables over the distance `key position - query position`.

    Entry `radius + d` is read for the distance `d`, clipped to `[-radius, radius]`. Heads is 1 where they share a table.

    Attributes:
      key_table: `[heads, 2 * radius + 1, head_dim]`; `query . table` is added to the score before scaling.
      value_table: `[heads, 2 * radius + 1, head_dim]`; added to the value of each pair.
      bias_table: `[heads, 2 * radius + 1]`; added to the scaled score.
      slopes: `[heads]`; `-slope * |distance|`, never clipped, is added to the scaled score.
      radius: the largest distance that the tables tell apart.
    """

    key_table: Array | None = None
    value_table: Array | None = None
    bias_table: Array | None = None
    slopes: Array | None = None
    radius: int = 0


class RelativeTiles:
    """The terms of one call, read for one query tile and a chunk of key tiles at a time.

    Two ways to the same numbers. By row: multiply the query tile with the whole table once, then skew parts of the
    product. By tile: multiply it with just the distances that a tile holds. The first is cheaper for short tables.
    """

    def __init__(self, q_block: int, kv_block: int, radius: int, tiles_per_row: float, einsum: Any = jnp.einsum) -> None:
        self.q_block, self.kv_block, self.radius, self.einsum = q_block, kv_block, radius, einsum
        self.size, self.width = 2 * radius + 1, q_block + kv_block
        self.by_row = self.size <= tiles_per_row * self.width

    def flops_per_row(self, tables: int, head_dim: int, num_tiles: int) -> int:
        """FLOPs of `tables` products (of a key or value table) for one head's query tile that visits `num_tiles`."""
        distances = self.size if self.by_row else num_tiles * self.width
        return 2 * tables * self.q_block * distances * head_dim

    def starts(self, first_query: Array, columns: Array) -> Array:
        """Place in the table of the first distance of each tile, int `[kv_heads, groups, chunk]`."""
        return columns * self.kv_block - first_query - (self.q_block - 1) + self.radius

    def _slices(self, table: Array, starts: Array, axis: int) -> Array:
        padded = tiles.pad_edges(table, self.width, axis)
        return tiles.distance_slices(padded, starts, self.width, self.size, axis)

    def expand(self, by_distance: Array, starts: Array) -> Array:
        """`[b, k, g, q_block, 2 * radius + 1]` -> `[b, k, g, q_block, keys]`; linear, copies only."""
        return tiles.merge_pairs(tiles.skew(self._slices(by_distance, starts, -1), self.kv_block))

    def collapse(self, by_key: Array, starts: Array) -> Array:
        """The transpose of `expand`: sums values of pairs by distance."""
        by_distance = jax.ShapeDtypeStruct((*by_key.shape[:-1], self.size), by_key.dtype)
        return jax.linear_transpose(lambda x: self.expand(x, starts), by_distance)(by_key)[0]

    def key_row(self, query: Array, table: Array) -> Array | None:
        """Products of a query tile with every distance's key, if that is the way taken."""
        return self.einsum("bkgqd,kgnd->bkgqn", query, table) if self.by_row else None

    def key_scores(self, query: Array, row: Array | None, table: Array, starts: Array) -> Array:
        """`query . key_table[distance]`, `[b, k, g, q_block, keys]`."""
        if row is not None:
            return self.expand(row, starts)
        near = self._slices(table[None], starts, -2)[0]  # [k, g, chunk, width, head_dim]
        products = self.einsum("bkgqd,kgcwd->bkgcqw", query, near)
        return tiles.merge_pairs(tiles.skew(products, self.kv_block))

    def bias_scores(self, table: Array, starts: Array) -> Array:
        """`bias_table[distance]`, `[1, k, g, q_block, keys]`."""
        near = self._slices(table[None], starts, -1)[..., None, :]
        near = jnp.broadcast_to(near, (*near.shape[:-2], self.q_block, self.width))
        return tiles.merge_pairs(tiles.skew(near, self.kv_block))

    def slope_scores(self, slopes: Array, starts: Array) -> Array:
        """`-slope * |distance|`, `[1, k, g, q_block, keys]`."""
        first = starts + (self.q_block - 1) - self.radius  # key of the tile's first column less the first query
        keys = (first[..., None] + jnp.arange(self.kv_block)).reshape(*first.shape[:2], 1, -1)
        distance = jnp.abs(keys - jnp.arange(self.q_block)[:, None])
        return (-slopes[..., None, None] * distance)[None]

    def value_sum(self, weights: Array, starts: Array) -> Array:
        """What `value_out` needs of a chunk: weights by distance, `[b, k, g, q_block, distances]` or by tile."""
        if self.by_row:
            return self.collapse(weights, starts)
        split = weights.reshape(*weights.shape[:-1], -1, self.kv_block)
        return tiles.unskew(jnp.moveaxis(split, -2, -3))  # [b, k, g, chunk, q_block, width]

    def value_near(self, table: Array, starts: Array) -> Array:
        """The value table's part for a chunk's tiles, `[k, g, chunk, width, head_dim]`."""
        return self._slices(table[None], starts, -2)[0]
