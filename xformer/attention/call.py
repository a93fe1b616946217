"""Checks the arguments of an attention call and brings them to one form."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.dtypes import compute_dtype, exact
from xformer.attention.signature import Options
from xformer.checks import is_integer

Array = jax.Array
MAX_POSITION = 2**30  # positions and their differences are 32-bit integers
MAX_GIVEN = 2**29  # of positions that are given: there are negative ones too


@dataclasses.dataclass(frozen=True)
class Call:
    """One call with a single batch axis; every array that may broadcast has all its axes.

    Attributes:
      query: `[batch, q_len, num_heads, head_dim]`; key: `[batch, kv_len, num_kv_heads, head_dim]`; value: likewise, of
        any depth.
      bias: `[batch or 1, num_heads or 1, q_len or 1, kv_len or 1]` or None; mask: bool of such a shape or None.
      q_segments, kv_segments: int `[batch or 1, length]` or None.
      query_offset: None where it was not given; an int; an int32 array `[]` or `[batch]`.
      q_positions, kv_positions: int32 `[batch or 1, length]` where positions were given, else None.
      position_range: the least and the largest of them, if they are known when tracing, else None.
      scale: where it is a number; 1.0 where it is an array.
      head_scale: where it is an array, `[1]` or `[num_heads]`, float32 (float64 for float64 queries); None otherwise.
      softcap: a number above 0, or None.
      sinks: `[num_heads]`, float32 (float64 for float64 queries), or None.
      dropout_rate: 0.0 when deterministic.
      plan: the plan that the caller gave, or None.
      global_tokens: bool `[batch or 1, kv_len]` or None.
      q_paths, kv_paths: int32 `[batch or 1, length, levels]` or None.
      distances: int32 `[batch or 1, q_len, kv_len]` or None.
      out_dtype, batch_shape: what `restore` gives back.
    """

    BATCHED: ClassVar = ("query", "key", "value", "bias", "mask", "q_segments", "kv_segments", "query_offset",
                         "global_tokens", "q_paths", "kv_paths", "distances")  # fmt: skip

    query: Array
    key: Array
    value: Array
    bias: Array | None
    mask: Array | None
    q_segments: Array | None
    kv_segments: Array | None
    query_offset: int | Array | None
    q_positions: Array | None
    kv_positions: Array | None
    position_range: tuple[int, int] | None
    scale: float
    head_scale: Array | None
    softcap: float | None
    sinks: Array | None
    dropout_rng: Array | None
    dropout_rate: float
    broadcast_dropout: bool
    precision: Any
    plan: Any
    out_dtype: Any
    batch_shape: tuple[int, ...]
    global_tokens: Array | None = None
    q_paths: Array | None = None
    kv_paths: Array | None = None
    distances: Array | None = None

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


def normalize(query: Array, key: Array, value: Array, options: Options) -> Call:
    """Checks shapes and gives a `Call`. Raises ValueError with one line."""
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    _check_shapes(query, key, value)
    if options.dtype is not None:
        if not _is_floating(options.dtype):
            raise ValueError(f"dtype must be a floating point type, got {options.dtype!r}")
        query, key, value = (x.astype(options.dtype) for x in (query, key, value))
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(f"query must be floating point, got {query.dtype}; give dtype= to cast")
    batch_shape, (q_len, num_heads) = query.shape[:-3], query.shape[-3:-1]
    kv_len = key.shape[-3]
    pair_shape = (*batch_shape, num_heads, q_len, kv_len)
    bias, mask = options.bias, options.mask
    if mask is not None:
        mask = jnp.asarray(mask)
        mask = _with_all_axes(mask if mask.dtype == bool else mask > 0, pair_shape, "mask")
    if bias is not None:
        bias = _with_all_axes(jnp.asarray(bias), pair_shape, "bias")
    scale, head_scale = _scale(options.scale, query)
    flat = lambda x: x.reshape(math.prod(batch_shape), *x.shape[len(batch_shape) :])
    q_segments, kv_segments = _of_tokens("segment_ids", options.segment_ids, batch_shape, q_len, kv_len)
    q_positions, kv_positions, position_range = _positions(options, batch_shape, q_len, kv_len)
    q_paths, kv_paths = _paths(options.paths, batch_shape, q_len, kv_len)
    dropout_rate = 0.0 if options.deterministic else options.dropout_rate
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1), got {dropout_rate}")
    if dropout_rate and options.dropout_rng is None:
        raise ValueError(f"dropout_rate {dropout_rate} with deterministic=False needs dropout_rng, got None")
    return Call(
        query=flat(query),
        key=flat(key.astype(query.dtype)),
        value=flat(value.astype(query.dtype)),
        bias=bias,
        mask=mask,
        q_segments=q_segments,
        kv_segments=kv_segments,
        query_offset=_offset(options.query_offset, batch_shape),
        q_positions=q_positions,
        kv_positions=kv_positions,
        position_range=position_range,
        scale=scale,
        head_scale=head_scale,
        softcap=_softcap(options.softcap),
        sinks=_sinks(options.sinks, query),
        dropout_rng=options.dropout_rng if dropout_rate else None,
        dropout_rate=float(dropout_rate),
        broadcast_dropout=options.broadcast_dropout,
        precision=options.precision,
        plan=options.plan,
        out_dtype=query.dtype,
        batch_shape=batch_shape,
        global_tokens=_global_tokens(options.global_tokens, batch_shape, q_len, kv_len),
        q_paths=q_paths,
        kv_paths=kv_paths,
        distances=_distances(options, batch_shape, q_len, kv_len),
    )


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or key.ndim != query.ndim or value.ndim != query.ndim:
        raise ValueError(f"query, key and value must be [*batch, length, heads, head_dim] of equal rank, got {shapes}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must agree in all axes but the last, the depth, got {shapes}")
    if query.shape[:-3] != key.shape[:-3] or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must agree in batch axes and head_dim, got {shapes}")
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        raise ValueError(f"attention needs at least one token, head, dimension and example, got {shapes}")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(f"the number of query heads must be a multiple of the number of key heads, got {shapes}")


def _scale(scale: Any, query: Array) -> tuple[float, Array | None]:
    """(the number, the array); the one that was not given is 1 or None."""
    if scale is None:
        return float(query.shape[-1] ** -0.5), None
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        return float(scale), None
    num_heads = query.shape[-2]
    if isinstance(scale, bool) or not hasattr(scale, "dtype") or jnp.shape(scale) not in ((), (num_heads,)):
        given = f"shape {jnp.shape(scale)}" if hasattr(scale, "dtype") else repr(scale)
        raise ValueError(f"scale must be a number or an array [] or [num_heads] = [{num_heads}], got {given}")
    return 1.0, jnp.asarray(scale, compute_dtype(query.dtype)).reshape(-1)


def _softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    # The comparison is False for NaN too.
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real) or not 0 < float(softcap) < math.inf:
        raise ValueError(f"softcap must be a finite number above 0, or None, got {softcap!r}")
    return float(softcap)


def _sinks(sinks: Any, query: Array) -> Array | None:
    if sinks is None:
        return None
    num_heads, dtype = query.shape[-2], getattr(sinks, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or jnp.shape(sinks) != (num_heads,):
        given = repr(sinks) if dtype is None else f"{dtype} {list(jnp.shape(sinks))}"
        raise ValueError(f"sinks must be a floating point array [num_heads] = [{num_heads}], got {given}")
    return jnp.asarray(sinks, compute_dtype(query.dtype))


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
    if lead != batch_shape:
        x = jnp.broadcast_to(exact(x), (*batch_shape, *rest))
    return x.reshape(math.prod(batch_shape), *rest)


def _positions(options: Options, batch_shape: tuple[int, ...], q_len: int, kv_len: int) -> Any:
    """(of the queries, of the keys, the least and largest of both or None)."""
    positions = options.positions
    if positions is None:
        return None, None, None
    for name in ("query_offset", "plan"):
        if getattr(options, name) is not None:
            raise ValueError(f"positions say where every token stands: give them without {name}")
    known: list[tuple[int, int]] = []
    pair = positions if isinstance(positions, tuple) else (positions, positions)
    for x in pair:
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"positions must be int arrays [*batch, length], got {getattr(x, 'dtype', repr(x))}")
        if not isinstance(x, jax.core.Tracer) and x.size and getattr(x, "is_fully_addressable", True):
            known.append((int(x.min()), int(x.max())))
    for end in (min(least for least, _ in known), max(most for _, most in known)) if known else ():
        if abs(end) >= MAX_GIVEN:
            raise ValueError(f"positions must be below {MAX_GIVEN:,} in size, got {end:,}")

    def within(x: Any) -> Array:
        if x.dtype.itemsize > 2:  # as for offsets
            ends = (0 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else -MAX_GIVEN), MAX_GIVEN
            x = x.clip(*(np.asarray(end, x.dtype) for end in ends))
        return jnp.asarray(x, jnp.int32)

    own = _of_tokens("positions", tuple(within(x) for x in pair), batch_shape, q_len, kv_len)
    ends = (min(x for x, _ in known), max(x for _, x in known)) if len(known) == 2 else None
    return *own, ends


def _of_tokens(name: str, arrays: Any, batch_shape: tuple[int, ...], q_len: int, kv_len: int) -> Any:
    """The arrays of the queries and of the keys, `[batch or 1, length]`; None where they were not given."""
    if arrays is None:
        return None, None
    pair = arrays if isinstance(arrays, tuple) else (arrays, arrays)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an array or a tuple (of queries, of keys), got {len(pair)} entries")
    out = []
    for ids, length, side in zip(pair, (q_len, kv_len), ("query", "key"), strict=True):
        ids = jnp.asarray(ids)
        wide = ids.reshape((1,) * (len(batch_shape) + 1 - ids.ndim) + ids.shape)
        want = (*batch_shape, length)
        if (
            wide.ndim != len(want)
            or wide.shape[-1] != length
            or any(have not in (1, size) for have, size in zip(wide.shape, want, strict=True))
        ):
            raise ValueError(f"{name} of the {side} must be [*batch, length] = {want}, got {ids.shape}")
        out.append(_one_batch_axis(wide, batch_shape))
    return tuple(out)


def _paths(paths: Any, batch_shape: tuple[int, ...], q_len: int, kv_len: int) -> Any:
    """Those of the queries and of the keys; None where they were not given."""
    if paths is None:
        return None, None
    pair = paths if isinstance(paths, tuple) else (paths, paths)
    levels = next((jnp.shape(x)[-1] for x in pair if jnp.shape(x)), 0)
    if len(pair) != 2 or not levels:
        raise ValueError("paths must be an int array [*batch, length, levels] or a tuple (of queries, of keys) of them")
    sides = (pair[0], q_len, "paths of the query"), (pair[1], kv_len, "paths of the key")
    return tuple(_integers(name, x, batch_shape, (length, levels)) for x, length, name in sides)


def _distances(options: Options, batch_shape: tuple[int, ...], q_len: int, kv_len: int) -> Array | None:
    if options.distances is None:
        return None
    if options.paths is not None:
        raise ValueError("distances are in place of paths: give one of them")
    return _integers("distances", options.distances, batch_shape, (q_len, kv_len))


def _integers(name: str, x: Any, batch_shape: tuple[int, ...], own: tuple[int, ...]) -> Array:
    """Integers `[*batch, *own]`, of which the batch may broadcast, as int32 with one batch axis."""
    want = (*batch_shape, *own)
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be an int array {list(want)}, got {getattr(x, 'dtype', repr(x))}")
    x = jnp.asarray(x, jnp.int32)
    wide = x.reshape((1,) * (len(want) - x.ndim) + x.shape)
    fits = wide.shape[-len(own) :] == own and wide.ndim == len(want)
    if not fits or any(have not in (1, size) for have, size in zip(wide.shape, want, strict=True)):
        raise ValueError(f"{name} must be [*batch, ...] = {list(want)}, got {list(x.shape)}")
    return _one_batch_axis(wide, batch_shape)


def _global_tokens(tokens: Any, batch_shape: tuple[int, ...], q_len: int, kv_len: int) -> Array | None:
    if tokens is None:
        return None
    if not hasattr(tokens, "dtype") or not (tokens.dtype == bool or jnp.issubdtype(tokens.dtype, jnp.integer)):
        given = getattr(tokens, "dtype", repr(tokens))
        raise ValueError(f"global_tokens must be a bool array [*batch, kv_len] = {(*batch_shape, kv_len)}, got {given}")
    anything = np.zeros(q_len, bool)
    return _of_tokens("global_tokens", (anything, tokens), batch_shape, q_len, kv_len)[1] > 0


def _offset(offset: Any, batch_shape: tuple[int, ...]) -> int | Array | None:
    if offset is None:
        return None
    if isinstance(offset, np.ndarray) and not offset.ndim:
        offset = offset[()]
    if is_integer(offset):
        _check_range(offset, offset)
        return int(offset)
    wanted = f"query_offset must be an int or an int array [] or {list(batch_shape)}"
    if not hasattr(offset, "dtype"):
        raise ValueError(f"{wanted}, got {offset!r}")
    if not jnp.issubdtype(offset.dtype, jnp.integer) or offset.shape not in ((), batch_shape):
        raise ValueError(f"{wanted}, got {offset.dtype} {offset.shape}")
    if isinstance(offset, np.ndarray):
        _check_range(offset.min(), offset.max())
    if offset.dtype.itemsize > 2:  # what is farther away than any key stays so, and its 32-bit differences are right
        offset = offset.clip(*(np.asarray(end, offset.dtype) for end in _ends(offset.dtype)))
    return jnp.asarray(offset, jnp.int32).reshape(() if offset.ndim == 0 else (-1,))


def _check_range(least: int, most: int) -> None:
    if least < 0:
        raise ValueError(f"query_offset must not be negative, got {least}")
    if most >= MAX_POSITION:
        raise ValueError(f"query_offset must be below {MAX_POSITION:,}, got {most:,}")


def _ends(dtype: Any) -> tuple[int, int]:
    """The range that offsets of a dtype are clipped to."""
    return (0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -MAX_POSITION), MAX_POSITION


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
