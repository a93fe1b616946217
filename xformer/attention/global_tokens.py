"""Global tokens that each example has for itself: attended by all, and attending to all (Beltagy et al. 2020, 3.1)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.call import Call
from xformer.attention.full import Full
from xformer.attention.interface import Attention
from xformer.attention.merge_parts import merge_parts
from xformer.attention.signature import Params

Array = jax.Array
Attended = tuple[Array, Array]  # output `[batch, q_len, heads, depth]` and log-sum-exp `[batch, q_len, heads]`


def attend_globally(call: Call, params: Params, window: Attention, whole: Full, most: int) -> Attended:
    """Attends as `window` does, to the global tokens from everywhere, and from them to everything.

    Where no example has more than `most` global tokens, these are gathered, and cost what so many queries and keys do.
    Otherwise every key and every query is visited, for the same numbers, in memory linear in the length too: at twice
    the cost of full attention.

    Args:
      call: the call, with `global_tokens`.
      params: of the op; all three share them.
      window: the op of the others, which are not global.
      whole: full attention with the op's position term and causal cut.
      most: see above.
    """
    is_global, of_queries = by_example(call)
    rng = call.dropout_rng
    calls = [
        dataclasses.replace(
            call, global_tokens=None, dropout_rng=None if rng is None else jax.random.fold_in(rng, part)
        )
        for part in range(3)
    ]
    near = window.attend_lse(with_keys(calls[0], ~is_global), params)
    every = functools.partial(_visit_all, calls[1:], params, whole, is_global, of_queries)
    if most >= call.lengths[1]:
        return every(near)
    gathered = functools.partial(_gather, calls[1:], params, whole, is_global, of_queries, most)
    return jax.lax.cond(is_global.sum(1).max() <= most, gathered, every, near)


def by_example(call: Call) -> tuple[Array, Array]:
    """Which keys are global and which queries are, bool `[batch or 1, length]` each."""
    assert call.global_tokens is not None
    (q_len, kv_len), offset = call.lengths, call.offset("global_tokens")
    if q_len == kv_len and isinstance(offset, int) and offset == 0:
        return call.global_tokens, call.global_tokens
    positions = offset + jnp.arange(q_len)
    exists = (positions >= 0) & (positions < kv_len)
    return call.global_tokens, jnp.take(call.global_tokens, positions, axis=1, mode="clip") & exists


def global_pairs(call: Call, *, causal: bool) -> Array:
    """The pairs of a global query or key, bool `[batch or 1, 1, q_len, kv_len]`: for dense computation."""
    is_global, of_queries = by_example(call)
    found = of_queries[:, None, :, None] | is_global[:, None, None, :]
    if causal:
        (q_len, kv_len), offset = call.lengths, call.offset("global_tokens")
        found &= jnp.arange(kv_len) <= (offset + jnp.arange(q_len))[:, None]
    return found


def with_keys(call: Call, keys: Array) -> Call:
    """The call with the keys hidden where `keys`, bool `[batch or 1, kv_len]`, is False."""
    keys = keys[:, None, None, :]
    return dataclasses.replace(call, mask=keys if call.mask is None else call.mask & keys)


def _visit_all(
    calls: list[Call], params: Params, whole: Full, is_global: Array, of_queries: Array, near: Attended
) -> Attended:
    columns = whole.attend_lse(with_keys(dataclasses.replace(calls[0], sinks=None), is_global), params)
    rows = whole.attend_lse(calls[1], params)
    pick = lambda new, old: jnp.where(of_queries.reshape(*of_queries.shape, *[1] * (new.ndim - 2)), new, old)
    out, lse = (pick(new, old) for new, old in zip(rows, merge_parts([near, columns]), strict=True))
    return out, lse


def _gather(
    calls: list[Call], params: Params, whole: Full, is_global: Array, of_queries: Array, most: int, near: Attended
) -> Attended:
    call, (q_len, kv_len) = calls[0], calls[0].lengths
    positions = call.offset("global_tokens") + jnp.arange(q_len)
    # Keys that are global, from all queries.
    keys, exist = _places(is_global, call.batch, most)
    of_keys: Any = lambda x: None if x is None else _take(x, keys, 1)
    bias, mask = (x if x is None or x.shape[3] == 1 else _take(x, keys, 3) for x in (call.bias, call.mask))
    columns = dataclasses.replace(
        call, key=of_keys(call.key), value=of_keys(call.value), bias=bias, mask=mask, sinks=None,
        kv_segments=of_keys(call.kv_segments), query_offset=None, q_positions=positions[None], kv_positions=keys,
        kv_paths=of_keys(call.kv_paths), distances=None if call.distances is None else _take(call.distances, keys, 2),
    )  # fmt: skip
    merged = merge_parts([near, whole.attend_lse(with_keys(columns, exist), params)])
    # Queries that are global, to all keys.
    call, (places, exist) = calls[1], _places(of_queries, call.batch, min(most, q_len))
    of_rows: Any = lambda x: None if x is None else _take(x, places, 1)
    bias, mask = (x if x is None or x.shape[2] == 1 else _take(x, places, 2) for x in (call.bias, call.mask))
    rows = dataclasses.replace(
        call, query=of_rows(call.query), bias=bias, mask=mask, q_segments=of_rows(call.q_segments), query_offset=None,
        q_positions=jnp.take(positions, places), kv_positions=jnp.arange(kv_len)[None], q_paths=of_rows(call.q_paths),
        distances=of_rows(call.distances),
    )  # fmt: skip
    examples, at = jnp.arange(call.batch)[:, None], jnp.where(exist, places, q_len)
    attended = whole.attend_lse(rows, params)
    out, lse = (old.at[examples, at].set(new, mode="drop") for old, new in zip(merged, attended, strict=True))
    return out, lse


def _places(held: Array, batch: int, most: int) -> tuple[Array, Array]:
    """The places `[batch, most]` of an example's True entries, in order, and which of them exist."""
    held = jnp.broadcast_to(held, (batch, held.shape[1]))
    places = jnp.argsort(~held, axis=1, stable=True)[:, :most].astype(jnp.int32)
    return places, jnp.take_along_axis(held, places, 1)


def _take(x: Array, places: Array, axis: int) -> Array:
    """Entries of an axis, of every example `[batch or 1, ...]` its own `[batch, places]`."""
    index = places.reshape(len(places), *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1))
    x = jnp.broadcast_to(x, (len(places), *x.shape[1:]))
    return jnp.take_along_axis(x, index, axis, mode="clip")
