"""Checks the arguments of an attention call and brings them to one form."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
    """One call with a single batch axis; every array that may broadcast has all its axes.

    Attributes:
      query: `[batch, q_len, num_heads, head_dim]`; key, value: `[batch, kv_len, num_kv_heads, head_dim]`.
      bias: `[batch or 1, num_heads or 1, q_len or 1, kv_len or 1]` or None; mask: bool of such a shape or None.
      q_segments, kv_segments: int `[batch or 1, length]` or None.
      query_offset: None where it was not given; an int; an int array `[]` or `[batch]`.
      dropout_rate: 0.0 when deterministic.
      plan: a layer's tiles where the caller gives them; None: those of the op.
      out_dtype, batch_shape: what `restore` gives back.
    """

    BATCHED: ClassVar = ("query", "key", "value", "bias", "mask", "q_segments", "kv_segments", "query_offset")

    query: Array
    key: Array
    value: Array
    bias: Array | None
    mask: Array | None
    q_segments: Array | None
    kv_segments: Array | None
    query_offset: int | Array | None
    scale: float
    dropout_rng: Array | None
    dropout_rate: float
    broadcast_dropout: bool
    precision: Any
    out_dtype: Any
    batch_shape: tuple[int, ...]
    plan: Any = None

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def lengths(self) -> tuple[int, int]:
        """(q_len, kv_len)."""
        return self.query.shape[1], self.key.shape[1]

    def offset(self, needed_by: str) -> int | Array:
        """The first query's position. Raises ValueError when it was not given and the lengths differ."""
        if self.query_offset is not None:
            return self.query_offset
        q_len, kv_len = self.lengths
        if q_len != kv_len:
            raise ValueError(
                f"{needed_by} depends on positions: with q_len {q_len} and kv_len {kv_len} give query_offset, the "
                "position of the first query"
            )
        return 0

    def restore(self, out: Array) -> Array:
        """The output in the caller's dtype and batch axes."""
        return out.astype(self.out_dtype).reshape(*self.batch_shape, *out.shape[1:])


def normalize(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    segment_ids: Any,
    query_offset: Any,
    scale: float | Array | None,
    dropout_rng: Array | None,
    dropout_rate: float,
    broadcast_dropout: bool,
    deterministic: bool,
    dtype: Any,
    precision: Any,
) -> Call:
    """Checks shapes and gives a `Call`. Raises ValueError with one line."""
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    _check_shapes(query, key, value)
    if dtype is not None:
        if not _is_floating(dtype):
            raise ValueError(f"dtype must be a floating point type, got {dtype!r}")
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(f"query must be floating point, got {query.dtype}; give dtype= to cast")
    batch_shape, (q_len, num_heads, head_dim) = query.shape[:-3], query.shape[-3:]
    kv_len = key.shape[-3]
    pair_shape = (*batch_shape, num_heads, q_len, kv_len)
    if mask is not None:
        mask = jnp.asarray(mask)
        mask = _with_all_axes(mask if mask.dtype == bool else mask > 0, pair_shape, "mask")
    if bias is not None:
        bias = _with_all_axes(jnp.asarray(bias), pair_shape, "bias")
    if scale is not None and not isinstance(scale, int | float | np.number):
        if jnp.shape(scale) != ():
            raise ValueError(f"scale must be a number or an array [], got shape {jnp.shape(scale)}")
        query, scale = query * jnp.asarray(scale, query.dtype), 1.0  # an array, known only at run time
    flat = lambda x: x.reshape(math.prod(batch_shape), *x.shape[len(batch_shape) :])
    q_segments, kv_segments = _segments(segment_ids, batch_shape, q_len, kv_len)
    if deterministic:
        dropout_rate = 0.0
    elif not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1), got {dropout_rate}")
    elif dropout_rate and dropout_rng is None:
        raise ValueError(f"dropout_rate {dropout_rate} with deterministic=False needs dropout_rng, got None")
    return Call(
        query=flat(query),
        key=flat(key.astype(query.dtype)),
        value=flat(value.astype(query.dtype)),
        bias=bias,
        mask=mask,
        q_segments=q_segments,
        kv_segments=kv_segments,
        query_offset=_offset(query_offset, batch_shape),
        scale=float(head_dim**-0.5 if scale is None else scale),
        dropout_rng=dropout_rng if dropout_rate else None,
        dropout_rate=float(dropout_rate),
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        out_dtype=query.dtype,
        batch_shape=batch_shape,
    )


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or key.ndim != query.ndim or value.ndim != query.ndim:
        raise ValueError(f"query, key and value must be [*batch, length, heads, head_dim] of like rank, got {shapes}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have one shape, got {shapes}")
    if query.shape[:-3] != key.shape[:-3] or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must agree in batch axes and head_dim, got {shapes}")
    if 0 in query.shape or 0 in key.shape:
        raise ValueError(f"attention needs at least one token, head, dimension and example, got {shapes}")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(f"the number of query heads must be a multiple of the number of key heads, got {shapes}")


def _with_all_axes(x: Array, shape: tuple[int, ...], name: str) -> Array:
    """`x`, broadcastable to `[*batch, heads, q_len, kv_len]`, with one batch axis (of size 1 where all are)."""
    wide = x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
    if wide.ndim != len(shape) or any(have not in (1, want) for have, want in zip(wide.shape, shape, strict=True)):
        raise ValueError(f"{name} must be broadcastable to [*batch, heads, q_len, kv_len] = {shape}, got {x.shape}")
    return _one_batch_axis(wide, shape[:-3])


def _one_batch_axis(x: Array, batch_shape: tuple[int, ...]) -> Array:
    lead, rest = x.shape[: len(batch_shape)], x.shape[len(batch_shape) :]
    if all(size == 1 for size in lead):
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*batch_shape, *rest)).reshape(-1, *rest)


def _segments(segment_ids: Any, batch_shape: tuple[int, ...], q_len: int, kv_len: int) -> Any:
    if segment_ids is None:
        return None, None
    pair = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(f"segment_ids must be an array or a (query, key) pair, got {len(pair)} entries")
    out = []
    for ids, length, name in zip(pair, (q_len, kv_len), ("query", "key"), strict=True):
        ids = jnp.asarray(ids)
        wide = ids.reshape((1,) * (len(batch_shape) + 1 - ids.ndim) + ids.shape)
        want = (*batch_shape, length)
        if (
            wide.ndim != len(want)
            or wide.shape[-1] != length
            or any(have not in (1, size) for have, size in zip(wide.shape, want, strict=True))
        ):
            raise ValueError(f"segment_ids of the {name} must be [*batch, length] = {want}, got {ids.shape}")
        out.append(_one_batch_axis(wide, batch_shape))
    return tuple(out)


def _offset(offset: Any, batch_shape: tuple[int, ...]) -> int | Array | None:
    if offset is None:
        return None
    if isinstance(offset, bool) or not (isinstance(offset, int | np.integer) or hasattr(offset, "dtype")):
        raise ValueError(f"query_offset must be an int or an int array, got {offset!r}")
    if isinstance(offset, int | np.integer) or (isinstance(offset, np.ndarray) and not offset.ndim):
        if offset < 0:
            raise ValueError(f"query_offset must not be negative, got {offset}")
        return int(offset)
    if not jnp.issubdtype(offset.dtype, jnp.integer) or offset.shape not in ((), batch_shape):
        raise ValueError(
            f"query_offset must be an int array [] or {list(batch_shape)}, got {offset.dtype} {offset.shape}"
        )
    return jnp.asarray(offset).reshape(() if offset.ndim == 0 else (-1,))


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
