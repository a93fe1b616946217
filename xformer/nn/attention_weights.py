"""Attention weights of any op, dense: to look at, never to train with."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from xformer.attention import Attention
from xformer.attention.call import normalize
from xformer.attention.interface import by_example

Array = jax.Array


def attention_weights(
    op: Attention,
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    is_causal: bool = False,
    segment_ids: Any = None,
    query_offset: int | Array | None = None,
    scale: float | Array | None = None,
    dtype: Any = None,
    precision: Any = None,
    params: dict[str, Any] | None = None,
) -> Array:
    """The weight of every (query, key) pair before dropout, in O(q_len x kv_len) memory whatever the op.

    Args:
      op: an op over token pairs.
      query: `[*batch, q_len, num_heads, head_dim]`.
      key, value: `[*batch, kv_len, num_kv_heads, head_dim]`.
      bias, ..., params: the op's other arguments.

    Returns:
      `[*batch, num_heads, q_len, kv_len]` in the output's dtype; rows sum to 1, or to 0 where nothing is attended.

    Raises:
      NotImplementedError: the op has no token pairs.
    """
    if is_causal:
        op = dataclasses.replace(op, causal=True)
    call = normalize(
        query, key, value, bias, mask, segment_ids, query_offset, scale, None, 0.0, True, True, dtype, precision
    )
    return call.restore(by_example(op.weights, call, params or {}))
