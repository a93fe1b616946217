"""Plain dense attention: the definition that other implementations must equal, differentiable in both modes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention.bernoulli import bernoulli
from xformer.attention.dtypes import compute_dtype
from xformer.attention.engine.gradient_guard import guard
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.query_tile import HIDDEN, allowed_by_position, soft_cap
from xformer.attention.engine.relative_by_entries import places, reader
from xformer.attention.engine.relative_tiles import Relative, RelativeTiles, ends_of
from xformer.attention.engine.trees import pair_distances
from xformer.attention.pattern import Full, Pattern

Array = jax.Array


def relative_tiles(relative: Relative, q_len: int, kv_len: int, controls: Controls) -> tuple[RelativeTiles, Any]:
    """The whole score matrix as one tile, with products with the whole table, and its `starts`."""
    tile: Any = reader(relative, q_len, kv_len, by_position=controls.q_positions is not None)
    offset = jnp.asarray(controls.offset, jnp.int32)
    if controls.q_positions is not None and controls.kv_positions is not None:
        positions = controls.q_positions, controls.kv_positions
    elif relative.entries_of is None:
        return tile, tile.starts(offset, jnp.zeros((1, 1, 1), jnp.int32))
    else:
        of_queries, of_keys = offset + jnp.arange(q_len), jnp.arange(kv_len)
        positions = of_queries[None, None, None, :, None], of_keys[None, None, None, None]
    return tile, places(tile, relative, *positions, lambda: _distances(relative, controls))


def _distances(relative: Relative, controls: Controls) -> Array:
    """Distances of pairs in their trees, int `[batch or 1, 1, 1, q_len, kv_len]`."""
    if controls.distances is not None:
        return controls.distances
    assert relative.trees is not None and controls.q_paths is not None and controls.kv_paths is not None
    return pair_distances(controls.q_paths, controls.kv_paths, relative.trees.through_root)


class Attended(NamedTuple):
    """What dense attention gives.

    Attributes:
      out: `[batch, q_len, kv_heads, groups, value depth]`.
      lse: the log-sum-exp of the scores, a sink counted, `[batch, q_len, kv_heads, groups]`; -inf where a query has
        nothing to attend to.
      weights: `[batch, kv_heads, groups, q_len, kv_len]`.
    """

    out: Array
    lse: Array
    weights: Array


def attend(inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> Attended:
    """Attends by the definition.

    `controls.plan` is not read. Computes in float32, or in float64 for float64 inputs.
    """
    _, q_len, kv_heads, groups, _ = inputs.query.shape
    kv_len = inputs.key.shape[1]
    dtype = compute_dtype(inputs.query.dtype)
    query, key, value = (x.astype(dtype) for x in (inputs.query, inputs.key, inputs.value))
    # As in `QueryTiles`: zeros stand in for what is not finite, and a NaN in the scores shows it to whoever sees it.
    finite_keys = jnp.isfinite(key).all(-1, keepdims=True) & jnp.isfinite(value).all(-1, keepdims=True)
    finite_queries = jnp.isfinite(query).all(-1, keepdims=True)
    key, value = (jnp.where(finite_keys, x, jnp.zeros_like(x)) for x in (key, value))
    query = jnp.where(finite_queries, query, jnp.zeros_like(query))
    key_marks = jnp.moveaxis(marks(finite_keys, dtype), (2, 3), (1, 2))[:, :, None]  # [batch, kv_heads, 1, 1, kv_len]
    query_marks = jnp.moveaxis(marks(finite_queries, dtype), 1, 3)  # [batch, kv_heads, groups, q_len, 1]
    einsum = functools.partial(jnp.einsum, precision=settings.precision)
    heads = lambda x: x.reshape(*((1, 1) if x.shape[0] == 1 else (kv_heads, groups)), *x.shape[1:])

    scores = einsum("bqkgd,bskd->bkgqs", query, key)
    relative = inputs.relative
    if relative is not None:
        tile, starts = relative_tiles(relative, q_len, kv_len, controls)
        if relative.key_table is not None:
            table = heads(relative.key_table).astype(dtype)
            ends, by_distance = (einsum("bqkgd,kgnd->bkgqn", query, x) for x in (ends_of(table, axis=2), table))
            scores = scores + tile.expand(ends, by_distance, starts)
    scores = soft_cap(scores * settings.scale, settings.softcap)[0] + key_marks + query_marks
    if relative is not None and relative.bias_table is not None:
        scores = scores + tile.bias_scores(heads(relative.bias_table).astype(dtype), starts)
    if relative is not None and relative.slopes is not None:
        scores = scores + tile.slope_scores(heads(relative.slopes).astype(dtype), starts)
    if inputs.bias is not None:
        scores = scores + inputs.bias.astype(dtype)

    if controls.q_positions is not None and controls.kv_positions is not None and not isinstance(pattern, Full):
        allowed = allowed_by_position(pattern, controls.q_positions, controls.kv_positions, (kv_heads, groups))
    else:
        positions = controls.offset + jnp.arange(q_len), jnp.arange(kv_len)
        allowed = heads(jnp.asarray(pattern.allows(*positions)))[None]
    if controls.mask is not None:
        allowed = allowed & controls.mask
    if controls.q_segments is not None and controls.kv_segments is not None:
        allowed = allowed & (controls.q_segments == controls.kv_segments)
    sinks = None if inputs.sinks is None else inputs.sinks.astype(dtype)[None, :, :, None, None]
    weights, lse = softmax(scores, allowed, sinks)
    if settings.dropout_rate:
        shape = (1, 1, 1, q_len, kv_len) if settings.broadcast_dropout else weights.shape
        assert controls.dropout_rng is not None
        keep = bernoulli(controls.dropout_rng, 1.0 - settings.dropout_rate, shape)
        weights = jnp.where(keep, weights / (1.0 - settings.dropout_rate), 0.0)

    out = einsum("bkgqs,bskd->bqkgd", weights, value)
    if relative is not None and relative.value_table is not None:
        table = heads(relative.value_table).astype(dtype)
        sums = tile.collapse(weights, starts)
        out = out + einsum("bkgqn,kgnd->bqkgd", sums.by_distance, table)
        out = out + einsum("bkgqn,kgnd->bqkgd", sums.ends, ends_of(table, axis=2))
    of_keys = jnp.moveaxis(key.sum(-1) + value.sum(-1), 1, 2)[:, :, None, None]
    of_queries = jnp.moveaxis(query.sum(-1), 1, 3)[..., None]
    seen = jnp.where(allowed, of_keys + of_queries, jnp.zeros((), dtype)).sum(-1)  # [batch, kv_heads, groups, q_len]
    out = guard(out, jnp.broadcast_to(jnp.moveaxis(seen, 3, 1)[..., None], out.shape))
    return Attended(out, jnp.moveaxis(lse, 3, 1), weights)


def marks(finite: Array, dtype: Any) -> Array:
    """What is added to the scores of a key or a query: NaN where it was not finite, 0 elsewhere."""
    return jnp.where(finite, jnp.zeros((), dtype), jnp.full((), jnp.nan, dtype))


def softmax(scores: Array, allowed: Array, sinks: Array | None = None) -> tuple[Array, Array]:
    """Softmax over the last axis among the allowed; all zeros, with zero gradient, where nothing is.

    Also gives the log-sum-exp, without the last axis. `sinks` are logits that are counted and get no weight.
    """
    zero = jnp.zeros((), scores.dtype)
    scores = jnp.where(allowed, scores, jnp.asarray(HIDDEN, scores.dtype))
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    if sinks is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    top = jnp.where(top == HIDDEN, zero, top)
    weights = jnp.where(allowed, jnp.exp(scores - top), zero)
    norm = weights.sum(-1, keepdims=True)
    if sinks is not None:
        norm = norm + jnp.exp(sinks - top)
    attended = norm != 0
    norm = jnp.where(attended, norm, jnp.ones_like(norm))
    lse = jnp.where(attended, top + jnp.log(norm), jnp.asarray(HIDDEN, scores.dtype))[..., 0]
    # Selected once more, for a row whose norm is NaN.
    return jnp.where(allowed, weights / norm, zero), lse
