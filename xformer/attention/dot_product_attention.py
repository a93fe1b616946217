"""`jax.nn.dot_product_attention` with any op's pairs: the same arguments, in memory linear in the length."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.full import Full
from xformer.attention.interface import Attention, Implementation
from xformer.attention.signature import Options, Params
from xformer.attention.window import Window
from xformer.checks import is_integer

Array = jax.Array


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    op: Attention | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: bool = True,
    dtype: Any = None,
    precision: Any = None,
    params: Params | None = None,
) -> Array | tuple[Array, Array]:
    """Attends as `jax.nn.dot_product_attention` does, over the pairs of `op`.

    What differs from JAX's function: a query with nothing to attend to gets zeros, where JAX's gets the mean of the
    values; masks may have any dtype (`mask > 0` attends); values may have another depth than keys; the residual is
    differentiable.

    Args:
      query: `[batch, q_len, num_heads, head_dim]`, or without the batch axis, as key and value then are too.
      key, value: `[batch, kv_len, num_kv_heads, head_dim]`; values may have another depth.
      bias, mask: broadcastable to `[batch, num_heads, q_len, kv_len]`.
      scale: a number, or an array `[]` or `[num_heads]`; 1 / sqrt(head_dim) by default.
      is_causal: queries attend to no later position. With different lengths the first query stands at position 0.
      query_seq_lengths: int `[batch]`; queries from this length on attend to nothing.
      key_value_seq_lengths: int `[batch]`; keys from this length on are not attended.
      local_window_size: (left, right), keys so many places before and after a query, itself included; an int is both.
        It makes the default op a `Window`, which computes the pairs within it only.
      implementation: the op's, see `Attention`; None leaves the op's own.
      return_residual: also return the log-sum-exp of the scores.
      op: which pairs; `Full()` by default.
      softcap, sinks, dropout_rng, dropout_rate, broadcast_dropout, deterministic, dtype, precision, params: as in a
        call of the op.

    Returns:
      Output, like query and as deep as the values. With `return_residual` a tuple of it and the log-sum-exp
      `[batch, q_len, num_heads]` in the output's dtype, -inf where a query has nothing to attend to.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a window together with an op that has a pattern already.
      NotImplementedError: an argument that the op cannot honour.
    """
    op = _with_window(Full() if op is None else op, local_window_size)
    if implementation is not None:
        op = dataclasses.replace(op, implementation=implementation)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    single = query.ndim == 3
    if single:
        query, key, value = (x[None] if x.ndim == 3 else x for x in (query, key, value))
    lengths = (
        _lengths("query_seq_lengths", query_seq_lengths, query),
        _lengths("key_value_seq_lengths", key_value_seq_lengths, key),
    )
    mask, segment_ids = _mask_or_segments(op, mask, lengths, query.shape[-3], key.shape[-3])
    same_length = query.shape[-3] == key.shape[-3]
    options = Options(
        bias=bias, mask=mask, is_causal=is_causal, segment_ids=segment_ids, query_offset=None if same_length else 0,
        scale=scale, softcap=softcap, sinks=sinks, dropout_rng=dropout_rng, dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout, deterministic=deterministic, dtype=dtype, precision=precision,
        params=params,
    )  # fmt: skip
    if not return_residual:
        out = op.attend_with(query, key, value, options)
        return out[0] if single else out
    out, residual = op.attend_with_lse(query, key, value, options)
    residual = residual.astype(out.dtype)
    return (out[0], residual[0]) if single else (out, residual)


def _with_window(op: Attention, window: Any) -> Attention:
    if window is None:
        return op
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2 or not all(is_integer(side) and side >= 0 for side in sides):
        raise ValueError(f"local_window_size must be an int or (left, right), none negative, got {window!r}")
    if not isinstance(op, Full):
        raise ValueError(f"local_window_size makes a Window of Full(); {op} has a pattern of its own, got {window!r}")
    same = {name: getattr(op, name) for name in ("position", "causal", "implementation")}
    return Window(*(int(side) for side in sides), **same)


def _lengths(name: str, lengths: Any, x: Array) -> Array | None:
    """The lengths as an array `[*batch, 1]`."""
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape != x.shape[:-3]:
        wanted = f"{name} must be an int array [batch] = {list(x.shape[:-3])}"
        raise ValueError(f"{wanted}, got {lengths.dtype} {list(lengths.shape)}")
    return lengths[..., None]


def _mask_or_segments(op: Attention, mask: Any, lengths: Any, q_len: int, kv_len: int) -> tuple[Any, Any]:
    """Sequence lengths as a padding mask where they are one, and as segments, linear too, where they are more."""
    queries, keys = lengths
    if keys is not None and (mask is None or jnp.ndim(mask) < 2 or jnp.shape(mask)[-2] == 1):
        real = (jnp.arange(kv_len) < keys)[..., None, None, :]
        mask = real if mask is None else (jnp.asarray(mask) > 0) & real
        keys = None
    if queries is None and keys is None:
        return mask, None
    if "segment_ids" in op.REFUSES:
        name = "query_seq_lengths" if queries is not None else "key_value_seq_lengths beside a mask of pairs"
        raise NotImplementedError(f"{type(op).__name__} cannot honour {name}: {op.REFUSES['segment_ids']}")
    # Real queries and keys share segment 0; what is beyond the lengths is in segments of no other kind.
    past = lambda length, end, segment: jnp.where(jnp.arange(length) < end, 0, segment)
    q_segments = jnp.zeros(q_len, jnp.int32) if queries is None else past(q_len, queries, 1)
    kv_segments = jnp.zeros(kv_len, jnp.int32) if keys is None else past(kv_len, keys, 2)
    return mask, (q_segments, kv_segments)
