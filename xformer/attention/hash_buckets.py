"""Locality-sensitive hashing: tokens in buckets, and which of them share a chunk (Kitaev et al. 2020, section 2)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine.operands import CodePairs
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.token_rows import sorted_by

Array = jax.Array
FAR = 2**29  # a code that is near no other


class Buckets(NamedTuple):
    """The tokens of every example and head, sorted by bucket and position, in every round.

    Attributes:
      order, inverse: int32 `[batch, heads, rounds, length]`, the tokens in order and the place of each token.
      bucket: int32 likewise, the bucket of each token; padding comes last, in a bucket of its own.
      real: bool `[batch, heads, length]`, which tokens are no padding.
    """

    order: Array
    inverse: Array
    bucket: Array
    real: Array


def sorted_by_bucket(turned: Array, real: Array) -> Buckets:
    """Buckets by the largest of `[x R; -x R]`.

    Args:
      turned: x R of every round, `[batch, heads, rounds, length, num_buckets / 2]`.
      real: bool `[batch, heads, length]`.
    """
    num_buckets = 2 * turned.shape[4]
    widest = jnp.argmax(jnp.abs(turned), -1).astype(jnp.int32)
    positive = jnp.take_along_axis(turned, widest[..., None], -1, mode="clip")[..., 0] >= 0
    bucket = jnp.where(positive, widest, widest + num_buckets // 2)
    bucket = jnp.where(real[:, :, None], bucket, num_buckets)
    return Buckets(*sorted_by(bucket, num_buckets + 1), bucket, real)


@dataclasses.dataclass(frozen=True)
class Near:
    """Codes of a query and a key that differ by `least` to `most`."""

    least: int
    most: int

    def of(self, of_query: Array, of_key: Array) -> Array:
        """Whether they do."""
        apart = of_query - of_key
        return (apart >= self.least) & (apart <= self.most)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Which tokens, sorted by bucket and position, see each other in a round.

    Those of a bucket in the same chunk of `size` and in the one before, in a ring; with `causal` those up to `size`
    before in the bucket.
    """

    size: int
    causal: bool

    @property
    def near(self) -> Near:
        """How codes of a query and a key differ where a round has the pair."""
        return Near(1, self.size) if self.causal else Near(0, 1)

    def codes(self, buckets: Buckets) -> tuple[Array, Array, Array]:
        """Numbers of the tokens, `[batch, heads, rounds, length]`: a round has the pairs in which they are `near`.

        Those of queries; of keys; and of keys of the last chunk, as the one before the first.
        """
        kv_len = buckets.order.shape[-1]
        size, real, place = self.size, buckets.real[:, :, None], buckets.inverse
        of_query = lambda code: jnp.where(real, code, -FAR)
        of_key = lambda code: jnp.where(real, code, FAR)
        if self.causal:
            code = place + buckets.bucket * (size + 1)
            return of_query(code), of_key(code), jnp.full_like(code, FAR)
        chunk, apart = place // size, ceil_div(kv_len, size) + 3
        code = chunk + buckets.bucket * apart
        last = self.last(buckets)[:, :, None, None]
        before = jnp.where((chunk == last) & (last > 0), buckets.bucket * apart - 1, FAR)
        return of_query(code), of_key(code), of_key(before)

    def last(self, buckets: Buckets) -> Array:
        """The last chunk with a real token, int32 `[batch, heads]`."""
        return jnp.maximum(buckets.real.sum(-1, dtype=jnp.int32) - 1, 0) // self.size

    def alone(self, buckets: Buckets) -> Array:
        """Real tokens that no round gives another key, bool `[batch, heads, length]`.

        Those of a bucket stand side by side.
        """
        kv_len = buckets.order.shape[-1]
        size, place = self.size, jnp.arange(kv_len)
        sorted_buckets = jnp.take_along_axis(buckets.bucket, buckets.order, -1, mode="clip")
        same = sorted_buckets[..., 1:] == sorted_buckets[..., :-1]
        none = jnp.zeros_like(sorted_buckets[..., :1], dtype=bool)
        seen = jnp.concatenate([none, same], -1)  # the one before
        if not self.causal:
            within = (place[1:] // size) == (place[:-1] // size)
            seen |= jnp.concatenate([same & within, none], -1)
            end = jnp.maximum(buckets.real.sum(-1, dtype=jnp.int32) - 1, 0)[:, :, None, None]
            at_end = jnp.take_along_axis(sorted_buckets, jnp.broadcast_to(end, none.shape), -1, mode="clip")
            seen |= (place < size) & (end >= size) & (sorted_buckets == at_end)
        return ~jnp.take_along_axis(seen, buckets.inverse, -1, mode="clip").any(2) & buckets.real

    def pairs(self, buckets: Buckets, at: Array) -> Array:
        """The pairs of all rounds, bool `[batch, heads, queries, length]`, of queries at the positions `at`."""
        kv_len = buckets.order.shape[-1]
        (of_query, of_key, before), tokens = self.codes(buckets), jnp.arange(kv_len)
        rows = lambda x: jnp.take(x, at, axis=-1, mode="clip")[..., None]
        pairs = self.near.of(rows(of_query), of_key[..., None, :]) | self.near.of(rows(of_query), before[..., None, :])
        own = at[:, None] == tokens
        pairs = (pairs.any(2) & ~own) | (own & rows(self.alone(buckets)))
        return pairs & ((at >= 0) & (at < kv_len))[:, None]


@dataclasses.dataclass(frozen=True)
class RoundPairs(CodePairs):
    """The pairs of a round that no round before it has; codes as `Reformer` lists them."""

    near: Near
    num_before: int
    causal: bool

    def allows(self, q_codes: Array, kv_codes: Array) -> Array:
        query, key = (lambda index: q_codes[:, index, None]), (lambda index: kv_codes[:, index, None])
        each = 1 if self.causal else 2
        pairs = self.near.of(query(0), key(0))
        token = 1 + each * self.num_before
        if not self.causal:
            pairs &= query(self.num_before + 2) != key(token)
        for index in range(self.num_before):
            for part in range(each):
                pairs &= ~self.near.of(query(1 + index), key(1 + each * index + part))
        return pairs | (query(self.num_before + 1) == key(token))


@functools.lru_cache(maxsize=64)
def drawn_rotations(seed: int, *sizes: int) -> np.ndarray:
    """Standard normal numbers of these sizes, float32."""
    drawn = np.random.default_rng(seed).standard_normal(math.prod(sizes))
    return drawn.astype(np.float32).reshape(sizes)
