"""Which keys a query sees, as a range, and how NaN and infinity stay with those that see them.

Products with a weight of zero would spread what is not finite to every query of a chunk. So the engine is given finite
arrays, and what a query saw is marked afterwards: in the output, and in the gradients of what it saw.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine import mesh_axes

Array = jax.Array


class Ranges(NamedTuple):
    """The first and last key of each query, int32 `[batch or 1, q_len]`; it sees none where `last < first`."""

    first: Array
    last: Array


def ranges(
    q_len: int,
    kv_len: int,
    *,
    causal: bool,
    offset: Array | None,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
) -> Ranges:
    """The ranges under a causal cut and segments; the first query stands at `offset`, by default at 0."""
    positions = jnp.arange(q_len, dtype=jnp.int32)[None] + (jnp.int32(0) if offset is None else offset)
    first, last = jnp.zeros_like(positions), jnp.full_like(positions, kv_len - 1)
    if q_segments is not None and kv_segments is not None:
        index = jnp.arange(kv_len, dtype=jnp.int32)[None]
        differs = kv_segments[:, 1:] != kv_segments[:, :-1]
        edge = jnp.ones_like(kv_segments[:, :1], bool)
        starts = jax.lax.cummax(jnp.where(jnp.concatenate([edge, differs], 1), index, 0), axis=1)
        ends = jax.lax.cummin(jnp.where(jnp.concatenate([differs, edge], 1), index, kv_len - 1), axis=1, reverse=True)
        at = jnp.clip(positions, 0, kv_len - 1)
        here = lambda x: _take(x, at)
        first = here(starts)
        last = jnp.where(here(kv_segments) == q_segments, here(ends), first - 1)
    return Ranges(first, jnp.minimum(last, positions) if causal else last)


def _take(x: Array, at: Array) -> Array:
    """`x [batch or 1, kv_len, ...]` at `[batch or 1, q_len]`."""
    batch = max(x.shape[0], at.shape[0])
    wide = lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:]))
    at = wide(at).reshape(batch, -1, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(wide(x), jnp.broadcast_to(at, (batch, at.shape[1], *x.shape[2:])), 1)


def aligned(q_segments: Any, kv_segments: Any, offset: Any) -> Any:
    """Whether the running state serves the segments: bool `[batch or 1, q_len]`, in NumPy where all is NumPy.

    Each segment of the keys is in one piece, and a query of a segment that has keys stands beside one of them.
    """
    np_like = jnp if any(isinstance(x, jax.Array) for x in (q_segments, kv_segments, offset)) else np
    kv_len = kv_segments.shape[1]
    batch = max(q_segments.shape[0], kv_segments.shape[0])
    wide = lambda x: np_like.broadcast_to(x, (batch, x.shape[1]))
    q_ids, kv_ids = wide(q_segments), wide(kv_segments)
    ordered = np_like.sort(kv_ids, axis=1)
    pieces = (kv_ids[:, 1:] != kv_ids[:, :-1]).sum(1)
    whole = (ordered[:, 1:] != ordered[:, :-1]).sum(1) == pieces
    at = np_like.clip(offset + np_like.arange(q_ids.shape[1]), 0, kv_len - 1)
    beside = kv_ids[:, at] == q_ids
    place: Any
    if np_like is jnp:
        place = jax.vmap(jnp.searchsorted)(ordered, q_ids)
    else:
        place = np.stack([np.searchsorted(*row) for row in zip(ordered, q_ids, strict=True)])
    found = np_like.take_along_axis(ordered, np_like.minimum(place, kv_len - 1), 1)
    return whole[:, None] & (beside | (found != q_ids))


def any_in(flags: Array, ranges: Ranges) -> Array:
    """Whether a flag `[batch or 1, kv_len, heads]` is up among the keys that a query sees, `[batch, q_len, heads]`."""
    kv_len = flags.shape[1]
    sums = jnp.pad(jnp.cumsum(flags, axis=1, dtype=jnp.int32), [(0, 0), (1, 0), (0, 0)])
    end = jnp.clip(ranges.last + 1, 0, kv_len)
    start = jnp.minimum(jnp.clip(ranges.first, 0, kv_len), end)
    return _take(sums, end) > _take(sums, start)


class Sizes(NamedTuple):
    """Shapes of queries, keys and values `[batch, length, heads, depth]` and of the output, and the dtype of all."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    out: tuple[int, ...]
    dtype: Any


def _zeros(sizes: Sizes, query: Array, key: Array, value: Array, ranges: Ranges, real: Array | None) -> Array:
    """Zeros in the shape of the output.

    Where their gradient is NaN, so is that of the query and of what it saw.
    """
    return mesh_axes.varying(jnp.zeros(sizes.out, sizes.dtype), mesh_axes.axes_of(query, key, value))


def _forward(sizes: Sizes, query: Array, key: Array, value: Array, ranges: Ranges, real: Array | None) -> Any:
    return _zeros(sizes, query, key, value, ranges, real), (ranges, real)


def _backward(sizes: Sizes, saved: Any, gradient: Array) -> Any:
    ranges, real = saved
    bad = jnp.isnan(gradient).any(-1)  # [batch, q_len, heads]
    batch, q_len, heads = bad.shape
    kv_len, kv_heads = sizes.key[1:3]
    by_head = bad.reshape(batch, q_len, kv_heads, heads // kv_heads).any(-1).astype(jnp.int32)
    first, last = (jnp.broadcast_to(x, (batch, q_len)) for x in ranges)
    by_head = by_head * (last >= first)[..., None].astype(jnp.int32)
    row = jnp.arange(batch)[:, None]
    counts = jnp.zeros((batch, kv_len + 1, kv_heads), jnp.int32)
    counts = mesh_axes.varying(counts, mesh_axes.axes_of(by_head, first))
    counts = counts.at[row, jnp.clip(first, 0, kv_len)].add(by_head)
    counts = counts.at[row, jnp.clip(last + 1, 0, kv_len)].add(-by_head)
    hit = jnp.cumsum(counts, axis=1)[:, :kv_len] > 0
    hit = hit if real is None else hit & real
    nan, zero = jnp.full((), jnp.nan, sizes.dtype), jnp.zeros((), sizes.dtype)
    marked = lambda flags, shape: jnp.broadcast_to(jnp.where(flags[..., None], nan, zero), shape)
    return marked(bad, sizes.query), marked(hit, sizes.key), marked(hit, sizes.value), None, None


seen: Any = jax.custom_vjp(_zeros, nondiff_argnums=(0,))
seen.defvjp(_forward, _backward)
