"""Relative terms on tiles: tables indexed by clipped distance, read and summed without an array of pairs x head_dim.

This is the skewing of Huang et al. 2018, section 3.4.1, for tiles anywhere in the score matrix: products with distances
are moved to the pairs that have them. It is done by index, not by reshaping, and so is its transpose: what would be a
scatter over pairs is a gather, since a query has at most one key at each distance that is not clipped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention.engine.grid import Grid
from xformer.attention.engine.trees import Trees

Array = jax.Array
LONGEST_ROW = 1024  # distances


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key_table", "value_table", "bias_table", "slopes"],
    meta_fields=["radius", "grid", "trees"],
)
@dataclasses.dataclass(frozen=True)
class Relative:
    """What a position term adds, as tables over the distance `key position - query position`.

    Entry `radius + d` is read for the distance `d`, clipped to `[-radius, radius]`. Heads is 1 where they share one.

    Attributes:
      key_table: `[heads, 2 * radius + 1, head_dim]`; `query . table` is added to the score before scaling.
      value_table: `[heads, 2 * radius + 1, value depth]`; added to the value of each pair.
      bias_table: `[heads, 2 * radius + 1]`; added to the scaled score.
      slopes: `[heads]`; `-slope * |distance|`, never clipped, is added to the scaled score. Constants: no gradient.
      radius: the largest distance that the tables tell apart.
      grid: tokens lie in a grid, and key and value tables have its entries in place of those of distances.
      trees: tokens are nodes of trees, and the tables have entries for distances in those.
    """

    key_table: Array | None = None
    value_table: Array | None = None
    bias_table: Array | None = None
    slopes: Array | None = None
    radius: int = 0
    grid: Grid | None = None
    trees: Trees | None = None

    @property
    def entries_of(self) -> Grid | Trees | None:
        """What says which entries a pair reads, where its distance does not; None where that does."""
        return self.trees if self.grid is None else self.grid


class Sums(NamedTuple):
    """What was summed over pairs by distance, `[b, k, g, q_block, ...]`.

    Attributes:
      ends: `[..., 2]`, of pairs beyond the radius on either side.
      by_distance: `[..., size]`, of the others; None where there are none or they are summed otherwise.
    """

    ends: Array
    by_distance: Array | None = None

    def add(self, part: Sums) -> Sums:
        """Adds those of a chunk of tiles."""
        ends, by_distance = self.ends + part.ends, self.by_distance
        if by_distance is not None and part.by_distance is not None:
            by_distance = by_distance + part.by_distance
        return Sums(ends, by_distance)

    def scaled(self, factor: Array, distant: bool) -> Sums:
        """All times `factor` `[b, k, g, q_block]`; as long as tiles are `distant`, nothing was summed by distance."""
        factor, by_distance = factor[..., None], self.by_distance
        return Sums(self.ends * factor, by_distance if distant or by_distance is None else by_distance * factor)


class RelativeTiles:
    """Reads tables for one query tile and a chunk of key tiles, and sums gradients back into them.

    Products with a table are taken one of two ways. Of the query tile with the whole table, once
    (`whole_table`), which is for short tables; or by tile, with just the `width` distances that a tile holds. Distant
    tiles, whose pairs are all beyond the radius on one side, need neither: a query has one value for all keys of such a
    tile. `near_per_query_tile` is the number of other tiles that a query tile visits, on average.

    `starts`, int `[kv_heads, groups, chunk]`, is where each tile's first distance (from the last query to the first
    key) stands in the table; it may be far outside. Pairs are `[b, k, g, q_block, keys]`, keys being chunk x kv_block.
    """

    def __init__(
        self, q_block: int, kv_block: int, radius: int, near_per_query_tile: float, einsum: Any = jnp.einsum
    ) -> None:
        self.q_block, self.kv_block, self.radius, self.einsum = q_block, kv_block, radius, einsum
        self.size, self.width = 2 * radius + 1, q_block + kv_block
        self.near_per_query_tile = near_per_query_tile
        # Products are kept while the key tiles are visited: the table must not be long, save where all pairs are kept.
        longest = math.inf if near_per_query_tile == math.inf else max(self.width, LONGEST_ROW)
        self.whole_table = self.size <= min(near_per_query_tile * self.width, longest)

    def flops(self, num_rows: int, head_dim: int) -> int:
        """FLOPs of the products with one table and its two ends, for `num_rows` query tiles of one head."""
        distances = 2 + (self.size if self.whole_table else self.near_per_query_tile * self.width)
        return 2 * self.q_block * round(num_rows * distances) * head_dim

    def starts(self, first_query: Array, key_tiles: Array) -> Array:
        """`starts` of the key tiles `key_tiles` for the query tile at `first_query`."""
        return key_tiles * self.kv_block - first_query - (self.q_block - 1) + self.radius

    def _index(self, starts: Array) -> Array:
        """Place in the table of every pair's distance, before clipping, int `[k, g, q_block, keys]`."""
        shift = jnp.arange(self.kv_block)[None] + jnp.arange(self.q_block - 1, -1, -1)[:, None]
        index = starts[:, :, None, :, None] + shift[None, None, :, None]
        return index.reshape(*starts.shape[:2], self.q_block, -1)

    # Whole table: `[b, k, g, q_block, size]`, and the two ends of it, against pairs.

    def expand(self, ends: Array, by_distance: Array | None, starts: Array, distant: bool = False) -> Array:
        """The value of each pair's distance, `[..., keys]`; `[..., 1]` for one distant tile."""
        if distant or by_distance is None:
            by_tile = jnp.where(self._above(starts), ends[..., 1:], ends[..., :1])
            return by_tile if starts.shape[2] == 1 else jnp.repeat(by_tile, self.kv_block, axis=-1)
        index = jnp.clip(self._index(starts), 0, self.size - 1)[None]
        heads = jnp.broadcast_shapes(by_distance.shape[:3], (1, *starts.shape[:2]))
        wide = jnp.broadcast_to(by_distance, (*heads, self.q_block, self.size))
        return _pick(wide, jnp.broadcast_to(index, (*wide.shape[:-1], index.shape[-1])))

    def collapse(self, pairs: Array, starts: Array, distant: bool = False) -> Sums:
        """The transpose of `expand`: the sum over the pairs of each distance."""
        if distant:
            above, by_tile = self._above(starts), pairs.reshape(*pairs.shape[:-1], -1, self.kv_block).sum(-1)
            return Sums(_ends(jnp.where(above, 0, by_tile).sum(-1), jnp.where(above, by_tile, 0).sum(-1)))
        split = self._split(pairs)  # [b, k, g, chunk, q_block, kv_block]
        first = (
            starts[..., None] + jnp.arange(self.q_block - 1, -1, -1)[None, None, None]
        )  # index of each query's first key
        index = first[..., None] + jnp.arange(self.kv_block)[None, None, None, None]
        total = lambda some: jnp.where(some[None], split, 0).sum(-1)
        if self.kv_block > self.size:
            below, above = total(index < 0), total(index >= self.size)
        else:  # a tile is not wider than the table: what is beyond it is on one side
            beyond = total((index < 0) | (index >= self.size))
            back = (first < 0)[None]
            below, above = jnp.where(back, beyond, 0), jnp.where(back, 0, beyond)
        place = (
            jnp.arange(self.size)[None, None, None, None] - first[..., None]
        )  # [k, g, chunk, q_block, size]: the key at that distance
        inside = (place >= 0) & (place < self.kv_block)
        place = jnp.clip(place, 0, self.kv_block - 1)[None]
        picked = _pick(split, jnp.broadcast_to(place, (*split.shape[:-1], self.size)))
        return Sums(_ends(below.sum(3), above.sum(3)), jnp.where(inside[None], picked, 0).sum(3))

    def _above(self, starts: Array) -> Array:
        """On which side of the radius distant tiles are, `[1, k, g, 1, chunk]`."""
        return (starts >= self.size - 1)[None, :, :, None]

    # By tile: `[b, k, g, chunk, q_block, width]` against pairs.

    def gather(self, by_tile: Array) -> Array:
        """Pairs from products with each tile's own distances."""
        shift = jnp.arange(self.kv_block)[None] + jnp.arange(self.q_block - 1, -1, -1)[:, None]
        picked = _pick_alike(by_tile, shift)
        merged = jnp.moveaxis(picked, 3, 4)
        return merged.reshape(*merged.shape[:4], -1)

    def spread(self, pairs: Array) -> Array:
        """The transpose of `gather`."""
        split = self._split(pairs)
        place = jnp.arange(self.width)[None] - jnp.arange(self.q_block - 1, -1, -1)[:, None]
        inside = (place >= 0) & (place < self.kv_block)
        picked = _pick_alike(split, jnp.clip(place, 0, self.kv_block - 1))
        return jnp.where(jnp.broadcast_to(inside, picked.shape), picked, 0)

    def near(self, table: Array, starts: Array) -> Array:
        """A padded table's entries for each tile, `[k, g, chunk, width, head_dim]`; see `pad`."""
        pick = lambda rows, start: jax.lax.dynamic_slice_in_dim(rows, start, self.width, 0)
        tables, places = self._by_head(table, self._places(starts))
        chunks = jax.vmap(jax.vmap(lambda rows, places: jax.vmap(pick, (None, 0))(rows, places)))(tables, places)
        return chunks

    def add_near(self, total: Array, starts: Array, update: Array) -> Array:
        """Adds to a padded table where `near` reads it; sums over heads that share the table."""
        places = self._places(starts)
        shared = tuple(axis for axis in (0, 1) if total.shape[axis] == 1 and update.shape[axis] > 1)
        if shared and places.shape[:2] == (1, 1):
            update, shared = update.sum(shared, keepdims=True), ()

        def add(rows: Array, place: Array, values: Array) -> Array:
            old = jax.lax.dynamic_slice_in_dim(rows, place, self.width, 0)
            return jax.lax.dynamic_update_slice_in_dim(rows, old + values, place, 0)

        for chunk in range(places.shape[2]):
            place, values = places[:, :, chunk], update[:, :, chunk]
            if not shared:
                place = jnp.broadcast_to(place, total.shape[:2])
                total = jax.vmap(jax.vmap(add))(total, place, values)
                continue
            place = jnp.broadcast_to(place, values.shape[:2])
            for k in range(values.shape[0]):
                for g in range(values.shape[1]):
                    at = k if total.shape[0] > 1 else 0, g if total.shape[1] > 1 else 0
                    total = total.at[at].set(add(total[at], place[k, g], values[k, g]))
        return total

    def pad(self, table: Array) -> Array:
        """Repeats the first and last entry of `[k, g, size, ...]`, for tiles that reach beyond the table."""
        edges = [(0, 0), (0, 0), (self.width, self.width)] + [(0, 0)] * (table.ndim - 3)
        return jnp.pad(table, edges, mode="edge")

    def unpad(self, padded: Array) -> Array:
        """The transpose of `pad`."""
        before, table, after = jnp.split(padded, [self.width, self.width + self.size], axis=2)
        return table.at[:, :, 0].add(before.sum(2)).at[:, :, -1].add(after.sum(2))

    def _places(self, starts: Array) -> Array:
        return jnp.clip(starts + self.width, 0, self.size + self.width)

    @staticmethod
    def _by_head(table: Array, places: Array) -> tuple[Array, Array]:
        heads = jnp.broadcast_shapes(table.shape[:2], places.shape[:2])
        return jnp.broadcast_to(table, (*heads, *table.shape[2:])), jnp.broadcast_to(places, (*heads, places.shape[2]))

    def _split(self, pairs: Array) -> Array:
        """`[b, k, g, q_block, keys]` -> `[b, k, g, chunk, q_block, kv_block]`."""
        return jnp.moveaxis(pairs.reshape(*pairs.shape[:-1], -1, self.kv_block), -2, -3)

    # Scores that need no product.

    def bias_scores(self, table: Array, starts: Array, distant: bool = False) -> Array:
        """`bias_table[distance]` as pairs, from `[k, g, size]`."""
        row = table[None, :, :, None, :]
        return self.expand(ends_of(row), row, starts, distant)

    def add_bias(self, total: Array, pairs: Array, starts: Array, distant: bool = False) -> Array:
        """Adds to the gradient of a bias table `[k, g, size]` that of a chunk's scores."""
        part = jax.tree.map(lambda x: x.sum((0, 3)), self.collapse(pairs.sum(0, keepdims=True), starts, distant))
        below, above = jnp.unstack(sum_to(part.ends, (*total.shape[:2], 2)), axis=-1)
        total = total.at[..., 0].add(below).at[..., -1].add(above)
        return total if part.by_distance is None else total + sum_to(part.by_distance, total.shape)

    def slope_scores(self, slopes: Array, starts: Array) -> Array:
        """`-slope * |distance|` as pairs, from `[k, g]`."""
        distances = jnp.abs(self._index(starts) - self.radius).astype(slopes.dtype)
        return (-slopes[..., None, None] * distances)[None]


def ends_of(x: Array, axis: int = -1) -> Array:
    """The first and the last entry along an axis."""
    first, last = jax.lax.slice_in_dim(x, 0, 1, axis=axis), jax.lax.slice_in_dim(x, x.shape[axis] - 1, None, axis=axis)
    return jnp.concatenate([first, last], axis)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sums over the axes that have size 1 in `shape`, of the same rank."""
    axes = tuple(axis for axis, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want)
    return x.sum(axes, keepdims=True) if axes else x


def _ends(below: Array, above: Array) -> Array:
    return jnp.stack([below, above], axis=-1)


def _pick_alike(x: Array, index: Array) -> Array:
    """`_pick` by an index `[q_block, picked]` that all `x` `[..., q_block, entries]` share."""
    places = (jnp.arange(x.shape[-2])[:, None] * x.shape[-1] + index).reshape(-1)
    picked = x.reshape(*x.shape[:-2], -1).at[..., places].get(mode="promise_in_bounds")
    return picked.reshape(*x.shape[:-1], -1)


def _pick(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=-1, mode="promise_in_bounds")
