"""Plain dense attention: the definition that other implementations must equal, differentiable in both modes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.relative_tiles import RelativeTiles, ends_of
from xformer.attention.pattern import Pattern

Array = jax.Array


def relative_tiles(q_len: int, kv_len: int, radius: int) -> RelativeTiles:
    """The whole score matrix as one tile, with products with the whole table."""
    return RelativeTiles(q_len, kv_len, radius, math.inf)


def attend(inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> tuple[Array, Array]:
    """Output `[batch, q_len, kv_heads, groups, head_dim]` and weights `[batch, kv_heads, groups, q_len, kv_len]`.

    `controls.plan` is not read. Computes in float32, or in float64 for float64 inputs.
    """
    _, q_len, kv_heads, groups, _ = inputs.query.shape
    kv_len = inputs.key.shape[1]
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    query, key, value = (x.astype(dtype) for x in (inputs.query, inputs.key, inputs.value))
    einsum = functools.partial(jnp.einsum, precision=settings.precision)
    heads = lambda x: x.reshape(*((1, 1) if x.shape[0] == 1 else (kv_heads, groups)), *x.shape[1:])

    scores = einsum("bqkgd,bskd->bkgqs", query, key)
    relative = inputs.relative
    if relative is not None:
        tile = relative_tiles(q_len, kv_len, relative.radius)
        starts = tile.starts(jnp.asarray(controls.offset, jnp.int32), jnp.zeros((1, 1, 1), jnp.int32))
        if relative.key_table is not None:
            table = heads(relative.key_table).astype(dtype)
            ends, by_distance = (einsum("bqkgd,kgnd->bkgqn", query, x) for x in (ends_of(table, axis=2), table))
            scores = scores + tile.expand(ends, by_distance, starts)
    scores = scores * settings.scale
    if relative is not None and relative.bias_table is not None:
        scores = scores + tile.bias_scores(heads(relative.bias_table).astype(dtype), starts)
    if relative is not None and relative.slopes is not None:
        scores = scores + tile.slope_scores(heads(relative.slopes).astype(dtype), starts)
    if inputs.bias is not None:
        scores = scores + inputs.bias.astype(dtype)

    positions = controls.offset + jnp.arange(q_len), jnp.arange(kv_len)
    allowed = heads(jnp.asarray(pattern.allows(*positions)))[None]
    if controls.mask is not None:
        allowed &= controls.mask
    if controls.q_segments is not None and controls.kv_segments is not None:
        allowed &= controls.q_segments == controls.kv_segments
    weights = softmax(scores, allowed)
    if settings.dropout_rate:
        shape = (1, 1, 1, q_len, kv_len) if settings.broadcast_dropout else weights.shape
        assert controls.dropout_rng is not None
        keep = jax.random.bernoulli(controls.dropout_rng, 1.0 - settings.dropout_rate, shape)
        weights = jnp.where(keep, weights / (1.0 - settings.dropout_rate), 0.0)

    out = einsum("bkgqs,bskd->bqkgd", weights, value)
    if relative is not None and relative.value_table is not None:
        table = heads(relative.value_table).astype(dtype)
        sums = tile.collapse(weights, starts)
        out = out + einsum("bkgqn,kgnd->bqkgd", sums.by_distance, table)
        out = out + einsum("bkgqn,kgnd->bqkgd", sums.ends, ends_of(table, axis=2))
    return out, weights


def softmax(scores: Array, allowed: Array) -> Array:
    """Softmax over the last axis among the allowed; all zeros, with zero gradient, where nothing is."""
    lowest = -1e30
    scores = jnp.where(allowed, scores, lowest)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), lowest))
    weights = jnp.where(allowed, jnp.exp(scores - top), 0.0)
    norm = weights.sum(-1, keepdims=True)
    return weights / jnp.where(norm > 0, norm, 1.0)
