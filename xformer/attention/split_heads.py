"""A call in the engine's terms: query heads are split into `kv_heads` and the `groups` of query heads of each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xformer.attention.call import Call
from xformer.attention.dtypes import exact
from xformer.attention.engine.operands import Controls, Inputs, Settings

Array = jax.Array


def split_heads(call: Call, query: Array, key: Array, value: Array) -> tuple[Inputs, Controls, Settings]:
    """The engine's form of a call: query heads split into `kv_heads` and `groups`."""
    num_heads, kv_heads = query.shape[2], key.shape[2]

    def pairs(x: Array | None) -> Array | None:
        if x is None:
            return None
        heads = (kv_heads, num_heads // kv_heads) if x.shape[1] > 1 else (1, 1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    if call.head_scale is not None:
        query = exact(query) * call.head_scale[None, None, :, None]
    q_segments = None if call.q_segments is None else call.q_segments[:, None, None, :, None]
    kv_segments = None if call.kv_segments is None else call.kv_segments[:, None, None, None, :]
    q_positions = None if call.q_positions is None else call.q_positions[:, None, None, :, None]
    kv_positions = None if call.kv_positions is None else call.kv_positions[:, None, None, None, :]
    controls = Controls(
        None, pairs(call.mask), q_segments, kv_segments, 0, call.dropout_rng, q_positions=q_positions,
        kv_positions=kv_positions, q_paths=None if call.q_paths is None else call.q_paths[:, None, None],
        kv_paths=None if call.kv_paths is None else jnp.swapaxes(call.kv_paths, 1, 2)[:, None, None],
        distances=None if call.distances is None else call.distances[:, None, None],
    )  # fmt: skip
    settings = Settings(
        call.scale, call.dropout_rate, call.broadcast_dropout, precision=call.precision, softcap=call.softcap
    )
    query = query.reshape(*query.shape[:2], kv_heads, -1, query.shape[-1])
    sinks = None if call.sinks is None else call.sinks.reshape(kv_heads, -1)
    return Inputs(query, key, value, pairs(call.bias), sinks=sinks), controls, settings


def with_pairs(controls: Controls, pairs: Array, inputs: Inputs) -> Controls:
    """The controls with a mask of pairs `[batch or 1, num_heads or 1, q_len, kv_len]` as well."""
    heads = inputs.query.shape[2:4] if pairs.shape[1] > 1 else (1, 1)
    pairs = pairs.reshape(pairs.shape[0], *heads, *pairs.shape[2:])
    return controls._replace(mask=pairs if controls.mask is None else controls.mask & pairs)
