"""Linear attention pair by pair, in plain arithmetic that JAX differentiates in both modes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.dtypes import exact
from xformer.attention.state import attend as engine
from xformer.attention.state.chunk import NOTHING
from xformer.attention.state.features import Operands, PositiveRandom
from xformer.attention.state.operands import Controls, Inputs, Settings

Array = jax.Array


def attend(settings: Settings, inputs: Inputs, operands: Operands, controls: Controls) -> tuple[Array, Array | None]:
    """What `state.attend.attend` gives."""
    weights = pair_weights(settings, inputs, operands, controls)
    total = jnp.einsum("bkgts,bske->btkge", weights, exact(inputs.value), precision=settings.precision)
    return total, jnp.moveaxis(weights.sum(-1), 3, 1) if settings.normalized else None


def pair_weights(settings: Settings, inputs: Inputs, operands: Operands, controls: Controls) -> Array:
    """The weight of every pair before the normalisation, `[batch, kv_heads, groups, q_len, kv_len]`."""
    (q_len, kv_len), features = (inputs.query.shape[1], inputs.key.shape[1]), settings.features
    if isinstance(features, PositiveRandom) and not engine.ordered(settings, controls):
        operands = operands | {"top": engine.largest_exponents(settings, inputs.key, operands, controls.real)}
    query = features.queries(jnp.moveaxis(exact(inputs.query), 1, 3), operands, settings.precision)
    key, logs = features.keys(jnp.moveaxis(exact(inputs.key), 1, 2), operands, settings.precision)
    weights = jnp.einsum("bkgtf,bksf->bkgts", query, key, precision=settings.precision)
    visible, distance = _visible(settings, q_len, kv_len, controls)
    if logs is not None:
        seen = jnp.where(visible, logs[:, :, None], jnp.asarray(NOTHING, logs.dtype))
        weights = weights * jnp.exp(seen - seen.max(-1, keepdims=True))[:, :, None]
    if settings.decays is not None:
        rates = jnp.asarray(np.log(np.asarray(settings.decays)), weights.dtype)
        weights = weights * jnp.exp(rates[:, None, None] * jnp.abs(distance).astype(weights.dtype)[None])[None, :, None]
    return jnp.where(visible[:, :, None], weights, jnp.zeros((), weights.dtype))


def seen(settings: Settings, query: Array, key: Array, value: Array, controls: Controls) -> Array:
    """Sums `[batch, q_len, num_heads]` over what each query sees and itself: their gradient reaches nothing else."""
    visible, _ = _visible(settings, query.shape[1], key.shape[1], controls)
    visible = jnp.repeat(visible, query.shape[2] // key.shape[2], axis=1) if visible.shape[1] > 1 else visible
    of_keys = jnp.repeat(key.sum(-1) + value.sum(-1), query.shape[2] // key.shape[2], axis=2)
    pairs = jnp.where(visible, jnp.moveaxis(of_keys, 1, 2)[:, :, None], jnp.zeros((), of_keys.dtype))
    return jnp.moveaxis(pairs.sum(-1), 1, 2) + query.sum(-1)


def _visible(settings: Settings, q_len: int, kv_len: int, controls: Controls) -> tuple[Array, Array]:
    """Which pairs are visible, bool `[batch or 1, kv_heads or 1, q_len, kv_len]`, and how far back each key lies."""
    offset = jnp.int32(0) if controls.offset is None else controls.offset
    distance = offset + jnp.arange(q_len)[:, None] - jnp.arange(kv_len)[None]
    visible = ((distance >= 0) if settings.causal else jnp.ones_like(distance, bool))[None, None]
    if controls.real is not None:
        visible = visible & jnp.moveaxis(controls.real, 1, 2)[:, :, None]
    if controls.q_segments is not None and controls.kv_segments is not None:
        visible = visible & (controls.q_segments[:, None, :, None] == controls.kv_segments[:, None, None])
    return visible, distance
