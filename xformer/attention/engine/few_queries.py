"""Attention of a few queries to keys as a cache holds them: heads first, so that nothing is moved as a whole.

Each query meets all keys in one product. That is what decoding does token by token: the cost is that of reading the
keys and values once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention.dtypes import compute_dtype
from xformer.attention.engine.dense import softmax
from xformer.attention.engine.query_tile import merge_heads
from xformer.attention.engine.relative_by_position import RelativeByPosition
from xformer.attention.engine.relative_tiles import Relative
from xformer.attention.pattern import Pattern

Array = jax.Array
MOST_QUERIES = 16  # of a call; more are attended by tiles


class CachedKeys(NamedTuple):
    """Keys and values, heads first, and where they stand.

    Attributes:
      key: `[batch * kv_heads, capacity, head_dim]`, NaN where the value was not finite.
      value: likewise, of any depth and always finite.
      positions: int32 `[batch or 1, capacity]`, or `[batch or 1, num_heads or 1, capacity]` where query heads have keys
        of their own; negative where there is no key.
      first: int32 `[batch or 1]` or an int; the key at position p, if there is one, has the place
        `(p - first) mod capacity`.
      in_order: whether the key at position p has the place p.
    """

    key: Array
    value: Array
    positions: Array
    first: Array | int = 0
    in_order: bool = False


def attend(
    query: Array,
    parts: Sequence[CachedKeys],
    q_positions: Array,
    pattern: Pattern,
    relative: Relative | None,
    scale: float,
) -> Array:
    """Softmax attention, in float32 (float64 for float64 queries), to the keys of all parts.

    Args:
      query: `[batch, q_len, kv_heads, groups, head_dim]`, rotated where keys are.
      parts: what is attended to; no position is in two of them.
      q_positions: int32 `[batch or 1, q_len]`.
      pattern: which pairs exist. It must be causal: of tables of distances only what is not ahead is read.
      relative: what a position term adds, or None.

    Returns:
      `[batch, q_len, num_heads, value depth]`. A query with nothing to attend to gets zeros.
    """
    batch, q_len, kv_heads, groups, _ = query.shape
    dtype = compute_dtype(query.dtype)
    queries = jnp.moveaxis(query.astype(dtype), 1, 3) * scale  # [batch, kv_heads, groups, q_len, head_dim]
    full = lambda x: x.reshape(batch, kv_heads, groups, q_len, x.shape[-1])
    flat = lambda x: x.reshape(batch * kv_heads, groups * q_len, x.shape[-1])
    products = [jnp.einsum("nmd,nsd->nms", flat(queries), part.key.astype(dtype)) for part in parts]
    scores = full(_joined(products))
    positions = _joined([x.positions if x.positions.ndim == 3 else x.positions[:, None] for x in parts])
    split = lambda x: x.reshape(len(x), *((1, 1) if x.shape[1] == 1 else (kv_heads, groups)), *x.shape[2:])
    of_queries, of_keys = q_positions[:, None, None, :, None], split(positions)[:, :, :, None]
    tables = None
    if relative is not None:
        tables = _Tables(relative, of_queries, of_keys, (kv_heads, groups), dtype)
        scores = tables.scores(scores, queries)
    wide = (
        jnp.broadcast_to(x, (max(len(q_positions), len(positions)), *x.shape[1:])) for x in (q_positions, positions)
    )
    allowed = split(jax.vmap(pattern.allows)(*wide)) & (of_keys >= 0)
    weights = softmax(scores, allowed)[0]
    own = jnp.split(weights, [part.key.shape[1] for part in parts[:-1]], axis=-1)
    sums = [jnp.einsum("nms,nsd->nmd", flat(w), part.value.astype(dtype)) for w, part in zip(own, parts, strict=True)]
    out = full(sum(sums[1:], sums[0]))
    if tables is not None and tables.value is not None:
        out = out + tables.values(weights, zip(own, parts, strict=True), q_positions)
    return merge_heads(jnp.moveaxis(out, 3, 1))


def turned(part: CachedKeys, *, turn: Callable[[Array, Array], Array], batch: int) -> CachedKeys:
    """The part with keys turned by their positions: `turn(keys [batch, capacity, kv_heads, head_dim], positions)`."""
    by_token = jnp.moveaxis(part.key.reshape(batch, -1, *part.key.shape[1:]), 1, 2)
    return part._replace(key=jnp.moveaxis(turn(by_token, part.positions), 2, 1).reshape(part.key.shape))


def _joined(arrays: Sequence[Array]) -> Array:
    """Along the last axis; the others broadcast."""
    if len(arrays) == 1:
        return arrays[0]
    lead = jnp.broadcast_shapes(*(x.shape[:-1] for x in arrays))
    return jnp.concatenate([jnp.broadcast_to(x, (*lead, x.shape[-1])) for x in arrays], axis=-1)


class _Tables:
    """A position term's tables, heads split, up to the distance 0: nothing ahead is seen."""

    def __init__(
        self, relative: Relative, of_queries: Array, of_keys: Array, heads: tuple[int, int], dtype: Any
    ) -> None:
        self.radius = relative.radius
        sizes = of_queries.shape[3], of_keys.shape[4]
        self.tile = RelativeByPosition(*sizes, relative.radius)
        self.places = self.tile.places(of_queries, of_keys)  # [batch or 1, 1, 1, q_len, keys]

        def split(table: Array | None) -> Array | None:
            if table is None:
                return None
            return table.reshape(*((1, 1) if len(table) == 1 else heads), *table.shape[1:]).astype(dtype)

        past = lambda table: None if table is None else table[:, : self.radius + 1]
        self.key, self.value = split(past(relative.key_table)), split(past(relative.value_table))
        self.bias, self.slopes = split(relative.bias_table), split(relative.slopes)

    def scores(self, scores: Array, queries: Array) -> Array:
        """The scores `[batch, kv_heads, groups, q_len, keys]` of scaled queries, with what is added to them."""
        if self.key is not None:
            shared = self.key.shape[:2] == (1, 1)
            table = self.key[0, 0] if shared else self.key
            by_distance = jnp.einsum("bkgqd,nd->bkgqn" if shared else "bkgqd,kgnd->bkgqn", queries, table)
            index = jnp.broadcast_to(jnp.clip(self.places, 0, self.radius), scores.shape)
            scores = scores + jnp.take_along_axis(by_distance, index, axis=-1, mode="promise_in_bounds")
        if self.bias is not None and self.places.shape[1:3] == (1, 1):
            scores = scores + self.tile.bias_scores(self.bias, self.places)
        elif self.bias is not None:
            index = jnp.clip(self.places, 0, self.bias.shape[-1] - 1)
            rows = jnp.broadcast_to(self.bias[None, :, :, None], (*index.shape[:-1], self.bias.shape[-1]))
            scores = scores + jnp.take_along_axis(rows, index, axis=-1, mode="promise_in_bounds")
        if self.slopes is not None:
            scores = scores + self.tile.slope_scores(self.slopes, self.places)
        return scores

    def values(self, weights: Array, parts: Iterable[tuple[Array, CachedKeys]], q_positions: Array) -> Array:
        """The sum over pairs of weight times the entry of the pair's distance in the table of values.

        A query has one key at most at each distance nearer than the radius, so its weight is looked up.
        """
        table = self.value
        assert table is not None
        far = jnp.where(self.places <= 0, weights, jnp.zeros((), weights.dtype)).sum(-1, keepdims=True)
        wanted = q_positions[..., None] + jnp.arange(1 - self.radius, 1, dtype=jnp.int32)  # [batch or 1, q_len, radius]
        near = jnp.zeros((*weights.shape[:-1], self.radius), weights.dtype)
        for own, part in parts:
            first = jnp.asarray(part.first, jnp.int32).reshape(-1, 1, 1)
            place = (wanted - first) % part.key.shape[1]
            held = jnp.take_along_axis(part.positions[:, None], place, axis=-1, mode="promise_in_bounds") == wanted
            index = jnp.broadcast_to(place[:, None, None], near.shape)
            picked = jnp.take_along_axis(own, index, axis=-1, mode="promise_in_bounds")
            near = near + jnp.where(held[:, None, None], picked, jnp.zeros((), near.dtype))
        by_distance = jnp.concatenate([far, near], axis=-1)
        if table.shape[:2] == (1, 1):
            return jnp.einsum("bkgqn,nd->bkgqd", by_distance, table[0, 0])
        return jnp.einsum("bkgqn,kgnd->bkgqd", by_distance, table)
