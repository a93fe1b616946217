"""Attention weights of any op, dense: to look at, never to train with."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention import Attention

Array = jax.Array


def attention_weights(op: Attention, query: Array, key: Array, value: Array, **options: Any) -> Array:
    """The weight of every (query, key) pair before dropout, in O(q_len x kv_len) memory whatever the op.

    An op's output is affine in the values (a position term may add something of its own), so the weights are its
    derivative: one forward-mode pass marks `head_dim` keys at a time, each with a one-hot value.

    Args:
      op: an op over token pairs.
      query: `[*batch, q_len, num_heads, head_dim]`.
      key, value: `[*batch, kv_len, num_kv_heads, head_dim]`.
      options: the op's other arguments, without those of dropout.

    Returns:
      `[*batch, num_heads, q_len, kv_len]` in the output's dtype; rows sum to 1, or to 0 where nothing is attended.

    Raises:
      NotImplementedError: the op has no token pairs.
    """
    if op.pattern(1, 1, 1) is None:
        name = type(op).__name__
        raise NotImplementedError(f"{name} mixes the length dimension: no token pair has a weight to sow")
    dense = dataclasses.replace(op, implementation="reference")
    _, attend = jax.linearize(lambda v: dense(query, key, v, **options), value)

    kv_len, head_dim = value.shape[-3], value.shape[-1]
    num_chunks = -(-kv_len // head_dim)
    key_is_marked_CxDxS = jnp.eye(num_chunks * head_dim, kv_len, dtype=value.dtype).reshape(-1, head_dim, kv_len)
    mark_CxSx1xD = key_is_marked_CxDxS.swapaxes(1, 2)[:, :, None, :]
    out_CxBxTxHxD = jax.vmap(lambda mark: attend(jnp.broadcast_to(mark, value.shape)))(mark_CxSx1xD)
    weights_BxHxTxCxD = jnp.moveaxis(out_CxBxTxHxD, 0, -2).swapaxes(-4, -3)
    return weights_BxHxTxCxD.reshape(*weights_BxHxTxCxD.shape[:-2], -1)[..., :kv_len]
