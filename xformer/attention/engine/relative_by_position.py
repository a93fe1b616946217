"""Relative terms where every token has a position of its own: distances are looked up pair by pair.

With tokens in order a tile's distances follow from where it starts, and `RelativeTiles` reads and sums by them. With
positions given they can be anything, and a query may have several keys at one distance.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.engine.relative_tiles import RelativeTiles, Sums, sum_to

Array = jax.Array


class RelativeByPosition(RelativeTiles):
    """`RelativeTiles` in which `starts` is the place in the table of every pair, int
    `[b or 1, kv_heads or 1, groups or 1, q_block, keys]`.

    Places are not clipped yet. Products are taken with the whole table.
    """

    def __init__(self, q_block: int, kv_block: int, radius: int, einsum: Any = jnp.einsum) -> None:
        super().__init__(q_block, kv_block, radius, math.inf, einsum)

    def places(self, q_positions: Array, k_positions: Array) -> Array:
        """`starts` of pairs, from `[b or 1, kv_heads or 1, groups or 1, q_block, 1]` and `[..., 1, keys]`."""
        return k_positions - q_positions + self.radius

    def _clipped(self, places: Array) -> Array:
        return jnp.clip(places, 0, self.size - 1)

    def expand(self, ends: Array, by_distance: Array | None, starts: Array, distant: bool = False) -> Array:
        assert by_distance is not None and not distant
        index = jnp.broadcast_to(self._clipped(starts), (*by_distance.shape[:-1], starts.shape[-1]))
        return jnp.take_along_axis(by_distance, index, axis=-1, mode="promise_in_bounds")

    def collapse(self, pairs: Array, starts: Array, distant: bool = False) -> Sums:
        index = jnp.broadcast_to(self._clipped(starts), pairs.shape).reshape(-1, pairs.shape[-1])
        rows = jnp.arange(index.shape[0])[:, None]
        sums = jnp.zeros((index.shape[0], self.size), pairs.dtype)
        sums = sums.at[rows, index].add(pairs.reshape(index.shape), mode="promise_in_bounds")
        by_distance = sums.reshape(*pairs.shape[:-1], self.size)  # clipped distances are among them
        return Sums(jnp.zeros((*pairs.shape[:-1], 2), pairs.dtype), by_distance)

    def bias_scores(self, table: Array, starts: Array, distant: bool = False) -> Array:
        index = self._clipped(starts)
        if index.shape[1:3] == (1, 1):  # the same places in all heads
            picked = jnp.take(table, index[:, 0, 0], axis=-1, mode="clip")
            return jnp.moveaxis(picked, 2, 0)
        table, index = self._with_heads(table, index)
        picked = jnp.take_along_axis(table[None], index.reshape(*index.shape[:3], -1), axis=-1, mode="clip")
        return picked.reshape(index.shape)

    def add_bias(self, total: Array, pairs: Array, starts: Array, distant: bool = False) -> Array:
        index = self._clipped(starts)
        if index.shape[1:3] == (1, 1):
            index = jnp.broadcast_to(index[:, 0, 0], (pairs.shape[0], *pairs.shape[3:])).reshape(-1)
            pairs = jnp.moveaxis(pairs, 0, 2).reshape(*pairs.shape[1:3], -1)
            part = jnp.zeros((*pairs.shape[:2], self.size), pairs.dtype)
            return total + sum_to(part.at[..., index].add(pairs, mode="promise_in_bounds"), total.shape)
        index = jnp.broadcast_to(index, pairs.shape)
        heads, group = jnp.ix_(*map(jnp.arange, pairs.shape[1:3]))
        at = heads[None, ..., None, None], group[None, ..., None, None], index
        part = jnp.zeros((*pairs.shape[1:3], self.size), pairs.dtype)
        return total + sum_to(part.at[at].add(pairs, mode="promise_in_bounds"), total.shape)

    def _with_heads(self, table: Array, index: Array) -> tuple[Array, Array]:
        """Both with all head axes."""
        heads = jnp.broadcast_shapes(table.shape[:2], index.shape[1:3])
        table = jnp.broadcast_to(table, (*heads, *table.shape[2:]))
        return table, jnp.broadcast_to(index, (index.shape[0], *heads, *index.shape[3:]))

    def slope_scores(self, slopes: Array, starts: Array) -> Array:
        return -slopes[..., None, None] * jnp.abs(starts - self.radius).astype(slopes.dtype)
