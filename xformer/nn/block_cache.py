"""The keys and values of one block of tokens, for an op that sees no other."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from xformer.nn import cached_rows

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key_rows", "value_rows", "length"],
    meta_fields=["num_kv_heads", "max_len"],
)
@dataclasses.dataclass(frozen=True)
class BlockCache(cached_rows.Rows):
    """The keys and values of the block that the next token lies in, for an op that sees no other (a causal Local).

    Where the block begins counts for the op, and not which block it is: positions are places in the block. Those at and
    after the next token's are left from the block before, and no causal query sees them.

    Attributes:
      key_rows, value_rows, num_kv_heads: see `Rows`; each token at its place in the block.
      length: int32 `[]`, tokens seen so far, or `[batch]` where that differs between examples.
      max_len: tokens that may be seen in all.
    """

    length: Array
    max_len: int

    def attend(
        self, attention_fn: Any, query: Array, key: Array, value: Array, mask: Array | None, options: dict[str, Any]
    ) -> tuple[Array, BlockCache]:
        """As `Cache.attend` does; `mask` bool `[batch, new]` is True at real tokens, which come first."""
        query = cached_rows.check_length(query, self.length, self.max_len)
        block, new = self.capacity, key.shape[1]
        place = self.length % block
        positions = cached_rows.following(place, new)
        turn, op = attention_fn.op.turned()
        if turn is not None:  # by places, which those of the next block begin anew
            query, key = turn(query, positions % block), turn(key, positions % block)
        rows = [cached_rows.by_head(x) for x in cached_rows.kept(key, value, mask, self.key_rows.dtype)]
        pairs = list(zip((self.key_rows, self.value_rows), rows, strict=True))
        seen = cached_rows.seen_after(self.length, new, mask)
        if new == 1 and cached_rows.serves(op, new, options):
            keys, values = (cached_rows.put(old, x, place) for old, x in pairs)
            part = cached_rows.CachedKeys(keys, values, jnp.arange(block, dtype=jnp.int32)[None])
            out = attention_fn.attend_cached(op, query, [part], positions, kv_len=block)
            return out, dataclasses.replace(self, key_rows=keys, value_rows=values, length=seen)
        longer = lambda x, by: jnp.pad(x, ((0, 0), (0, by), (0, 0)))
        keys, values = (cached_rows.put(longer(old, new - 1), x, place) for old, x in pairs)
        by_token = [cached_rows.by_token(x, self.num_kv_heads) for x in (keys, values)]
        out = attention_fn.attend_by(op, query, *by_token, query_offset=place, **options)
        start = (place + seen - self.length) // block * block
        keys, values = (cached_rows.take_from(longer(x, block), start, block) for x in (keys, values))
        return out, dataclasses.replace(self, key_rows=keys, value_rows=values, length=seen)
