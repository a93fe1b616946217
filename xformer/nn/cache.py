"""What decoding step by step keeps of the tokens so far: their keys and values, or a state of one size."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.typing import Dtype

from xformer.attention import Attention, Shape
from xformer.nn import cached_rows
from xformer.nn.block_cache import BlockCache
from xformer.nn.cached_rows import check_length

Array = jax.Array


class _New(NamedTuple):
    """New tokens and the op that reads them; `rows` are keys and values heads first, `seen` tokens there are then."""

    op: Attention
    query: Array
    rows: list[Array]
    mask: Array | None
    positions: Array
    seen: Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key_rows", "value_rows", "length"],
    meta_fields=["num_kv_heads", "lookback", "max_len"],
)
@dataclasses.dataclass(frozen=True)
class Cache(cached_rows.Rows):
    """The keys and values that later tokens can still see. A pytree of fixed size: `attend` gives the next one.

    Where an op sees `lookback` earlier keys at most and nothing but distances counts (a causal Window), the cache is a
    ring of the last `lookback` keys, whatever the length. Otherwise it holds all of `max_len`. Either way the key at
    position p has the place `p mod capacity`, and a step writes one row where it stands. Keys are kept turned by their
    positions where that is all the op's position term does (Rotary).

    Attributes:
      key_rows, value_rows, num_kv_heads: see `Rows`.
      length: int32 `[]`, tokens seen so far, or `[batch]` where that differs between examples.
      lookback: see above; None where all keys are kept.
      max_len: tokens that may be seen in all.
    """

    length: Array
    lookback: int | None
    max_len: int

    def attend(
        self, attention_fn: Any, query: Array, key: Array, value: Array, mask: Array | None, options: dict[str, Any]
    ) -> tuple[Array, Cache]:
        """The output for new tokens and the next cache.

        A few queries of an op that reads cached keys meet the cache as it stands. Else its keys are put in the order of
        tokens, and the op is called.

        Args:
          attention_fn: an `xformer.nn.AttentionFn`.
          query: `[batch, new, num_heads, head_dim]`; key, value: `[batch, new, num_kv_heads, head_dim]`, of the tokens
            that follow.
          mask: bool `[batch, new]`, True at real tokens, which come first in each example; None: all are. What is not
            real is forgotten: the next token takes its place. From then on each example has a length of its own.
          options: of the call.

        Returns:
          `[batch, new, num_heads, head_dim]`, NaN for tokens beyond `max_len`, and the next cache.

        Raises:
          ValueError: tokens beyond `max_len`, where that is known when tracing.
        """
        query = check_length(query, self.length, self.max_len)
        positions = cached_rows.following(self.length, key.shape[1])
        turn, op = attention_fn.op.turned()
        if turn is not None:
            query, key = turn(query, positions), turn(key, positions)
        key, value = cached_rows.kept(key, value, mask, self.key_rows.dtype)
        rows = [cached_rows.by_head(x) for x in (key, value)]
        seen = cached_rows.seen_after(self.length, key.shape[1], mask)
        keep = self._keep_all if self.lookback is None else self._keep_last
        return keep(_New(op, query, rows, mask, positions, seen), attention_fn, options)

    def _keep_all(self, tokens: _New, attention_fn: Any, options: dict[str, Any]) -> tuple[Array, Cache]:
        op, query, rows, _, positions, seen = tokens
        keys, values = (
            cached_rows.put(old, x, self.length) for old, x in zip((self.key_rows, self.value_rows), rows, strict=True)
        )
        after = dataclasses.replace(self, key_rows=keys, value_rows=values, length=seen)
        if cached_rows.serves(op, query.shape[1], options):
            # Places beyond the newest query are ahead of all: a causal op does not see them.
            part = cached_rows.CachedKeys(keys, values, jnp.arange(keys.shape[1], dtype=jnp.int32)[None], in_order=True)
            return attention_fn.attend_cached(op, query, [part], positions, kv_len=self.max_len), after
        keys, values = (cached_rows.by_token(x, self.num_kv_heads) for x in (keys, values))
        return attention_fn.attend_by(op, query, keys, values, query_offset=self.length, **options), after

    def _keep_last(self, tokens: _New, attention_fn: Any, options: dict[str, Any]) -> tuple[Array, Cache]:
        op, query, rows, mask, positions, seen = tokens
        new, capacity = query.shape[1], self.capacity
        if cached_rows.serves(op, new, options):
            parts = [cached_rows.CachedKeys(rows[0], rows[1], positions, positions[:, 0])]
            if capacity:
                held = cached_rows.positions_in_ring(self.length, capacity)
                parts.insert(0, cached_rows.CachedKeys(self.key_rows, self.value_rows, held))
            out = attention_fn.attend_cached(op, query, parts, positions, kv_len=self.max_len)
        else:
            pairs = zip((self.key_rows, self.value_rows), rows, strict=True)
            ordered = (jnp.concatenate([cached_rows.in_order(old, self.length), x], axis=1) for old, x in pairs)
            keys, values = (cached_rows.by_token(x, self.num_kv_heads) for x in ordered)
            # Places before the first token are empty. Tokens that are not real come after all queries that are.
            filled = jnp.arange(capacity + new)[None] >= capacity - self.length.reshape(-1, 1)
            own = {"query_offset": capacity, "mask": filled[:, None, None, :]}
            out = attention_fn.attend_by(op, query, keys, values, **options, **own)
        if new == 1 and mask is None and capacity:
            # What is written waits for what is read: else XLA copies the ring.
            rows = cached_rows.after(out, rows, self.length)
            put = lambda old, x: cached_rows.put(old, x, self.length % capacity)
        else:
            put = lambda old, x: cached_rows.put_in_ring(old, x, self.length, seen)
        keys, values = (put(old, x) for old, x in zip((self.key_rows, self.value_rows), rows, strict=True))
        return out, dataclasses.replace(self, key_rows=keys, value_rows=values, length=seen)


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
    rows = lambda capacity: jnp.zeros((batch * num_kv_heads, capacity, head_dim), dtype)
    # What is kept of the last tokens alone is attended as if they were the first.
    by_distance = getattr(getattr(op, "position", None), "by_distance", True)
    if by_distance and (block := op.own_block()) is not None and block < max_len:
        return BlockCache(rows(block), rows(block), num_kv_heads, jnp.zeros((), jnp.int32), max_len)
    lookback = op.lookback() if by_distance else None
    lookback = None if lookback is None or lookback >= max_len else lookback
    capacity = max_len if lookback is None else lookback
    return Cache(rows(capacity), rows(capacity), num_kv_heads, jnp.zeros((), jnp.int32), lookback, max_len)
