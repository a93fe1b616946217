"""What decoding step by step keeps of the tokens so far: their keys and values, or a state of one size."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax.typing import Dtype

from xformer.attention import Attention, Shape

Array = jax.Array


def check_length(query: Array, length: Array, max_len: int) -> Array:
    """Queries `[batch, new, num_heads, head_dim]` of the tokens that follow, NaN where they are beyond `max_len`.

    Raises ValueError where that is known when tracing.
    """
    new = query.shape[1]
    if not isinstance(length, jax.core.Tracer) and (seen := int(length.max())) + new > max_len:
        raise ValueError(f"cache: {seen} + {new} tokens, made for max_len {max_len}")
    within = _following(length, new) < max_len
    return jnp.where(within[:, :, None, None], query, jnp.asarray(jnp.nan, query.dtype))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["key", "value", "length"], meta_fields=["lookback", "max_len"]
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """The keys and values that later tokens can still see. A pytree of fixed size: `extend` gives the next one.

    Where an op sees `lookback` earlier keys at most and nothing but distances counts (a causal Window), the cache holds
    the last `lookback` keys, whatever the length, the newest at the end. Otherwise it holds all of `max_len`, each at
    its position.

    Attributes:
      key, value: `[batch, capacity, num_kv_heads, head_dim]`.
      length: int32 `[]`, tokens seen so far, or `[batch]` where that differs between examples.
      lookback: see above; None where all keys are kept.
      max_len: tokens that may be seen in all.
    """

    key: Array
    value: Array
    length: Array
    lookback: int | None
    max_len: int

    def attend(
        self, attention_fn: Any, query: Array, key: Array, value: Array, mask: Array | None, options: dict[str, Any]
    ) -> tuple[Array, Cache]:
        """The output for new tokens `[batch, new, heads, head_dim]` and the next cache; `mask` as in `extend`.

        `options` are the call's own. Outputs for tokens beyond `max_len` are NaN; ValueError where that is known when
        tracing.
        """
        query = check_length(query, self.length, self.max_len)
        following, key, value, own = self.extend(key, value, mask)
        return attention_fn(query, key, value, **options, **own), following

    def extend(self, key: Array, value: Array, mask: Array | None) -> tuple[Cache, Array, Array, dict[str, Any]]:
        """The cache with new tokens, and what their queries attend to.

        Args:
          key, value: `[batch, new, num_kv_heads, head_dim]`, of the tokens that follow.
          mask: bool `[batch, new]`, True at real tokens, which come first in each example; None: all are. What is not
            real is forgotten: the next token takes its place. From then on each example has a length of its own.

        Returns:
          The next cache; keys and values `[batch, kv_len, num_kv_heads, head_dim]` for this call's queries; and the
          arguments `query_offset` and `mask` of a causal op for them.
        """
        new = key.shape[1]
        seen = self.length + (new if mask is None else jnp.sum(mask > 0, axis=1, dtype=jnp.int32))
        key, value = key.astype(self.key.dtype), value.astype(self.value.dtype)
        if self.lookback is None:
            keys, values = (_put(old, x, self.length) for old, x in ((self.key, key), (self.value, value)))
            following = dataclasses.replace(self, key=keys, value=values, length=seen)
            return following, keys, values, {"query_offset": self.length}
        keys, values = (jnp.concatenate(both, axis=1) for both in ((self.key, key), (self.value, value)))
        capacity = self.key.shape[1]
        # Places before the first token are empty. Tokens that are not real come after all queries that are.
        filled = jnp.arange(capacity + new)[None] >= capacity - self.length.reshape(-1, 1)
        step = new if mask is None else seen - self.length
        last_keys, last_values = (_last(x, step, capacity) for x in (keys, values))
        following = dataclasses.replace(self, key=last_keys, value=last_values, length=seen)
        return following, keys, values, {"query_offset": capacity, "mask": filled[:, None, None, :]}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key", "value", "length"], meta_fields=["max_len"])
@dataclasses.dataclass(frozen=True)
class BlockCache:
    """The keys and values of the block that the next token lies in, for an op that sees no other (a causal Local).

    Attributes:
      key, value: `[batch, block, num_kv_heads, head_dim]`, each at its place in the block.
      length: int32 `[]`, tokens seen so far, or `[batch]` where that differs between examples.
      max_len: tokens that may be seen in all.
    """

    key: Array
    value: Array
    length: Array
    max_len: int

    def attend(
        self, attention_fn: Any, query: Array, key: Array, value: Array, mask: Array | None, options: dict[str, Any]
    ) -> tuple[Array, BlockCache]:
        """As `Cache.attend` does; `mask` bool `[batch, new]` is True at real tokens, which come first."""
        query, (block, new) = check_length(query, self.length, self.max_len), (self.key.shape[1], key.shape[1])
        seen = self.length + (new if mask is None else jnp.sum(mask > 0, axis=1, dtype=jnp.int32))
        place = self.length % block  # where the block begins counts for the op, and not which block it is
        longer = lambda x, by: jnp.pad(x, ((0, 0), (0, by), (0, 0), (0, 0)))
        pairs = ((self.key, key), (self.value, value))
        keys, values = (_put(longer(old, new - 1), x.astype(old.dtype), place) for old, x in pairs)
        out = attention_fn(query, keys, values, query_offset=place, **options)
        start = (place + seen - self.length) // block * block
        keys, values = (_last(longer(x, block), start, block) for x in (keys, values))
        return out, BlockCache(keys, values, seen, self.max_len)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["max_len"])
@dataclasses.dataclass(frozen=True)
class StateCache:
    """The state of an op that needs no earlier keys (`Attention.decode`). A pytree whose size no length changes.

    Attributes:
      state: what the op's `decode_state` or its last `decode` gave.
      max_len: tokens that may be seen in all.
    """

    state: Any
    max_len: int

    @property
    def length(self) -> Array:
        """int32 `[batch]`, tokens seen so far."""
        length: Array = self.state.length
        return length

    def attend(
        self, attention_fn: Any, query: Array, key: Array, value: Array, mask: Array | None, options: dict[str, Any]
    ) -> tuple[Array, StateCache]:
        """As `Cache.attend` does; `mask` bool `[batch, new]` is True at real tokens, which come first."""
        query = check_length(query, self.length, self.max_len)
        if options["dropout_rate"] and not options["deterministic"]:
            raise NotImplementedError(f"{attention_fn.op} cannot honour dropout_rate in decoding")
        out, state = attention_fn.decode(query, key, value, self.state, mask=mask)
        return out, dataclasses.replace(self, state=state)


AnyCache = Cache | BlockCache | StateCache


def init_cache(
    op: Attention,
    batch: int,
    max_len: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Dtype = jnp.float32,
    *,
    num_heads: int | None = None,
) -> AnyCache:
    """An empty cache for up to `max_len` tokens of `batch` sequences, as small as the op allows.

    `num_heads`, the heads of the queries, is `num_kv_heads` by default.

    Raises:
      ValueError: the op is not causal, so that later tokens would change what is computed already.
    """
    if not op.causal:
        raise ValueError(f"a cache needs a causal op, got {op}")
    state = op.decode_state(Shape(batch, 1, 1, num_heads or num_kv_heads, head_dim, num_kv_heads), dtype)
    if state is not None:
        return StateCache(state, max_len)
    empty = lambda capacity: jnp.zeros((batch, capacity, num_kv_heads, head_dim), dtype)
    if (block := op.own_block()) is not None and block < max_len:
        return BlockCache(empty(block), empty(block), jnp.zeros((), jnp.int32), max_len)
    lookback = op.lookback()
    lookback = None if lookback is None or lookback >= max_len else lookback
    capacity = max_len if lookback is None else lookback
    return Cache(empty(capacity), empty(capacity), jnp.zeros((), jnp.int32), lookback, max_len)


def _following(length: Array, new: int) -> Array:
    """The positions of the next `new` tokens, int32 `[1 or batch, new]`."""
    return length.reshape(-1, 1) + jnp.arange(new, dtype=jnp.int32)[None]


def _put(old: Array, new: Array, length: Array) -> Array:
    """`old` `[batch, capacity, ...]` with `new` `[batch, new, ...]` put in after `length`; what goes beyond is lost."""
    places = _following(length, new.shape[1])
    if len(places) == 1:
        return old.at[:, places[0]].set(new, mode="drop")
    return old.at[jnp.arange(len(old))[:, None], places].set(new, mode="drop")


def _last(x: Array, step: int | Array, capacity: int) -> Array:
    """The `capacity` entries from `step` (an int, `[]` or `[batch]`) on, of `x` `[batch, capacity + new, ...]`."""
    if isinstance(step, int):
        return x[:, step : step + capacity]
    if not step.ndim:
        return jax.lax.dynamic_slice_in_dim(x, step, capacity, axis=1)
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, capacity))(x, step)
