"""Of a cache's keys those that a few queries may see, where a pattern bounds them: fewer are read than are held."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine.few_queries import CachedKeys
from xformer.attention.pattern import Pattern

Array = jax.Array
LEAST_SAVED = 2  # keys held for each that is in reach: below that all are read where they stand


def keys_in_reach(
    part: CachedKeys, pattern: Pattern, q_positions: Array, batch: int, num_heads: int
) -> CachedKeys | None:
    """The keys in the ranges of `Pattern.reach`, each key once; None where reading all is as well.

    Args:
      part: keys of which the one at position p has place p.
      pattern: which pairs exist.
      q_positions: int32 `[batch or 1, q_len]`, that follow each other.
      batch, num_heads: examples, and heads of the queries.

    Returns:
      Keys and values with positions `[batch or 1, heads, keys]`; `[batch * num_heads, keys, depth]` where every query
      head has ranges of its own, else of the key heads.
    """
    q_len, capacity = q_positions.shape[1], part.key.shape[1]
    anywhere = pattern.reach(np.zeros(1, np.int64), q_len)
    if not anywhere or LEAST_SAVED * sum(x.first.shape[-1] * x.length for x in anywhere) > capacity:
        return None
    lengths = [x.length for x in anywhere for _ in range(x.first.shape[-1])]

    def firsts(position: Array) -> list[Array]:
        found = [jnp.asarray(x.first, jnp.int32)[:, 0] for x in pattern.reach(position[None], q_len) or ()]
        return [x[:, index] for x in found for index in range(x.shape[1])]

    ranges = jax.vmap(firsts)(q_positions[:, 0])  # of each [batch or 1, num_heads or 1]
    by_head = any(first.shape[1] > 1 for first in ranges)
    heads = num_heads if by_head else len(part.key) // batch
    source = jnp.arange(batch * heads) // (batch * heads // len(part.key))
    keys, values, positions = [], [], []
    for index, (first, length) in enumerate(zip(ranges, lengths, strict=True)):
        start = jnp.clip(first, 0, capacity - length)
        held = start[..., None] + jnp.arange(length, dtype=jnp.int32)
        for number, (other, size) in enumerate(zip(ranges[: index + 1], lengths, strict=False)):
            within = (held >= other[..., None]) & (held < other[..., None] + size)
            held = jnp.where(within == (number == index), held, -1)  # in its own range and in none before
        positions.append(held)
        if start.size == 1:
            some = [jax.lax.dynamic_slice_in_dim(x, start[0, 0], length, 1) for x in (part.key, part.value)]
            some = [jnp.repeat(x, batch * heads // len(x), axis=0) for x in some]
        else:
            starts = jnp.broadcast_to(start, (batch, heads)).reshape(-1)
            some = [_slices(x, source, starts, length) for x in (part.key, part.value)]
        keys.append(some[0])
        values.append(some[1])
    lead = jnp.broadcast_shapes(*(x.shape[:2] for x in positions))
    joined = jnp.concatenate([jnp.broadcast_to(x, (*lead, x.shape[2])) for x in positions], axis=-1)
    return CachedKeys(jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1), joined)


def _slices(x: Array, rows: Array, starts: Array, length: int) -> Array:
    """`length` entries from `starts` `[n]` on of rows `[n]` of `x`: `[n, length, depth]`."""
    one = lambda row, start: jax.lax.dynamic_slice(x, (row, start, jnp.zeros_like(start)), (1, length, x.shape[2]))[0]
    return jax.vmap(one)(rows.astype(jnp.int32), starts)
