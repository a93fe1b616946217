"""Rows of a cache: keys and values heads first, `[batch * num_kv_heads, capacity, head_dim]`, where they are put."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.typing import Dtype

from xformer.attention import Attention
from xformer.attention.engine.few_queries import CachedKeys

__all__ = ["CachedKeys"]

Array = jax.Array
MOST_WRITES = 16  # of one row each, one after the other; more are one scatter


@dataclasses.dataclass(frozen=True)
class Rows:
    """The arrays of a cache of keys and values.

    Attributes:
      key_rows, value_rows: `[batch * num_kv_heads, capacity, head_dim]`, the shape that products read them in: XLA
        copies an array in every step that is written in one shape and read in another.
      num_kv_heads: heads of keys and values.
    """

    key_rows: Array
    value_rows: Array
    num_kv_heads: int

    @property
    def capacity(self) -> int:
        """Tokens that there are places for."""
        return int(self.key_rows.shape[1])

    @property
    def key(self) -> Array:
        """`[batch, capacity, num_kv_heads, head_dim]`."""
        return by_token(self.key_rows, self.num_kv_heads)

    @property
    def value(self) -> Array:
        """`[batch, capacity, num_kv_heads, head_dim]`."""
        return by_token(self.value_rows, self.num_kv_heads)


def check_length(query: Array, length: Array, max_len: int) -> Array:
    """Queries `[batch, new, num_heads, head_dim]` of the tokens that follow, NaN where they are beyond `max_len`.

    Raises ValueError where that is known when tracing.
    """
    new = query.shape[1]
    if not isinstance(length, jax.core.Tracer) and (seen := int(length.max())) + new > max_len:
        raise ValueError(f"cache: {seen} + {new} tokens, made for max_len {max_len}")
    within = following(length, new) < max_len
    return jnp.where(within[:, :, None, None], query, jnp.asarray(jnp.nan, query.dtype))


def following(length: Array, new: int) -> Array:
    """The positions of the next `new` tokens, int32 `[1 or batch, new]`."""
    return length.reshape(-1, 1) + jnp.arange(new, dtype=jnp.int32)[None]


def seen_after(length: Array, new: int, mask: Array | None) -> Array:
    """Tokens seen after `new` more, those that the mask bool `[batch, new]` says are real; None: all are."""
    return length + (new if mask is None else jnp.sum(mask > 0, axis=1, dtype=jnp.int32))


def serves(op: Attention, new: int, options: dict[str, Any]) -> bool:
    """Whether `op.attend_cached` does a call of so many queries with such options."""
    return op.reads_cached(new) and not (options["dropout_rate"] and not options["deterministic"])


def kept(key: Array, value: Array, mask: Array | None, dtype: Dtype) -> tuple[Array, Array]:
    """New keys and values as a cache holds them; see `CachedKeys`. What is not real, by the mask, is zeros."""
    key, value = key.astype(dtype), value.astype(dtype)
    zero = jnp.zeros((), dtype)
    if mask is not None:
        real = (mask > 0)[:, :, None, None]
        key, value = jnp.where(real, key, zero), jnp.where(real, value, zero)
    finite = jnp.isfinite(value)
    key = jnp.where(finite.all(-1, keepdims=True), key, jnp.asarray(jnp.nan, dtype))
    return key, jnp.where(finite, value, zero)


def by_head(x: Array) -> Array:
    """`[batch, length, num_kv_heads, depth]` as rows."""
    return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], x.shape[3])


def by_token(rows: Array, num_kv_heads: int) -> Array:
    """The transpose of `by_head`."""
    return jnp.moveaxis(rows.reshape(len(rows) // num_kv_heads, num_kv_heads, *rows.shape[1:]), 1, 2)


def put(old: Array, new: Array, length: Array) -> Array:
    """`old` rows with new rows put in after `length`, `[]` or `[batch]`; of several, what goes beyond is lost.

    A single one that is beyond takes the last place.
    """
    count, zero = new.shape[1], jnp.zeros((), jnp.int32)
    if not length.ndim:
        if count == 1:
            return jax.lax.dynamic_update_slice(old, new, (zero, length, zero))
        longer = jnp.pad(old, ((0, 0), (0, count), (0, 0)))
        return jax.lax.dynamic_update_slice(longer, new, (zero, length, zero))[:, : old.shape[1]]
    batch = len(length)
    heads = len(old) // batch
    if count == 1 and batch <= MOST_WRITES:
        for row in range(batch):
            own = new[row * heads : (row + 1) * heads]
            old = jax.lax.dynamic_update_slice(old, own, (zero + row * heads, length[row], zero))
        return old
    places = following(jnp.repeat(length, heads), count)
    return old.at[jnp.arange(len(old))[:, None], places].set(new, mode="drop")


def take_from(rows: Array, start: Array, count: int) -> Array:
    """The `count` entries from `start`, `[]` or `[batch]`, on."""
    if not start.ndim:
        return jax.lax.dynamic_slice_in_dim(rows, start, count, axis=1)
    starts = jnp.repeat(start, len(rows) // len(start))
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, count))(rows, starts)


# Rings, in which position p has the place `p mod capacity`.


def positions_in_ring(length: Array, capacity: int) -> Array:
    """The position at each place after `length` tokens, int32 `[1 or batch, capacity]`; negative where it is empty."""
    last = length.reshape(-1, 1) - 1
    return last - (last - jnp.arange(capacity, dtype=jnp.int32)[None]) % capacity


def in_order(rows: Array, length: Array) -> Array:
    """The entries of a ring, the newest at the end."""
    capacity = rows.shape[1]
    if not capacity:
        return rows
    return _take(rows, (length.reshape(-1, 1) + jnp.arange(capacity, dtype=jnp.int32)[None]) % capacity)


def put_in_ring(old: Array, new: Array, length: Array, seen: Array) -> Array:
    """A ring after `length` tokens with those of `new` that make it `seen` tokens, both `[]` or `[batch]`."""
    capacity, count = old.shape[1], new.shape[1]
    if not capacity:
        return old
    number = positions_in_ring(seen, capacity) - length.reshape(-1, 1)  # among the new ones
    taken = _take(new, jnp.clip(number, 0, count - 1))
    is_new = jnp.repeat(number >= 0, len(old) // len(number), axis=0)[..., None]
    return jnp.where(is_new, taken, old)


def after(out: Array, rows: list[Array], length: Array) -> list[Array]:
    """The rows, which are there when `out` is."""
    never = (length < 0).any()
    return [jnp.where(never, out.reshape(-1)[0].astype(x.dtype), x) for x in rows]


def _take(rows: Array, places: Array) -> Array:
    """Entries of every row at places `[1 or batch, count]`."""
    if len(places) == 1:
        return jnp.take(rows, places[0], axis=1)
    places = jnp.repeat(places, len(rows) // len(places), axis=0)
    return jnp.take_along_axis(rows, places[..., None], axis=1)
