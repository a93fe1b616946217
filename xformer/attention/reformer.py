"""Reformer: tokens attend to those in the same bucket of a locality-sensitive hash (Kitaev et al. 2020)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.call import Call
from xformer.attention.chosen_pairs import ChosenPairs, Lists, attend_lists, list_flops, list_plan, real_tokens
from xformer.attention.dtypes import exact
from xformer.attention.engine.operands import CodePairs, Controls, Inputs, Settings
from xformer.attention.engine.query_tile import merge_heads
from xformer.attention.engine.tile_plan import TilePlan, ceil_div, round_up
from xformer.attention.engine.tile_policy import MIN_TILE, tile_of_blocks
from xformer.attention.merge_parts import merge_parts
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.attention.sizing import block_for_length
from xformer.attention.token_rows import inverse_of, take_tokens, to_order, to_tokens
from xformer.checks import check_integer

Array = jax.Array
FEW_QUERIES = 16  # so many or fewer, as in decoding, see all keys at once
CAUSAL_TILE = 16  # queries and keys of a tile: every bucket begins at one
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


@dataclasses.dataclass(frozen=True)
class Reformer(ChosenPairs):
    """Each query attends to the keys near it in its bucket, in `num_hashes` rounds of hashing (section 2).

    A round sorts an example's real tokens by bucket and position and cuts the order in chunks of `bucket_size`: a query
    sees the keys of its own bucket in its own chunk and in the one before, where the first chunk comes after the last
    one that has a real token (equations 3 to 6). With `causal` it sees the `bucket_size` tokens before it in its bucket
    instead: where chunks begin depends on later tokens, and how many came before does not. No query sees itself, unless
    it has no other key in any round. The rounds are one softmax over the union of their pairs: a pair of several rounds
    counts once (appendix, "multi-round"), which merges rounds by their log-sum-exp.

    The bucket of a token is that of its query, the largest of `[x R; -x R]` (section 2, "locality sensitive hashing"),
    and scores take keys of length 1, k / |k| ("shared-QK attention"). So keys are meant to be the queries, which
    `xformer.nn`'s layers make so with `share_qk=True` and else refuse; called bare, an op takes any keys. Tokens whose
    query a call does not have, as in decoding, are hashed by their key: the same where both are one. Rotary positions
    turn queries and keys after that. Scores are scaled as those of every op, by 1 / sqrt(head_dim): with keys of length
    1 they are small; the released code's are those of `scale=1.0`.

    The rotations R are drawn from `seed` once, for every round its own, where the paper draws new ones at each step:
    heads, layers and steps share them, and the same inputs always get the same buckets.

    Up to 16 queries that do not stand for all keys (decoding) are compared with every key; more cost what a call with
    all tokens does.

    Attributes:
      num_hashes: rounds.
      num_buckets: buckets of a round, even.
      bucket_size: tokens of a chunk; about `length / num_buckets` or more.
      seed: of the rotations.
    """

    SHARES_QK: ClassVar[bool] = True

    num_hashes: int = 2
    num_buckets: int = 64
    bucket_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_hashes", "num_buckets", "bucket_size"):
            check_integer(f"Reformer.{name}", getattr(self, name))
        check_integer("Reformer.seed", self.seed, at_least=0)
        if self.num_buckets % 2:
            raise ValueError(f"Reformer.num_buckets must be even (two for each direction), got {self.num_buckets}")

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """Two rounds; chunks of 8 to 64 tokens, and as many buckets as chunks."""
        size = overrides.get("bucket_size", block_for_length(num_positions))
        return cls(**{"bucket_size": size, "num_buckets": max(2 * ceil_div(num_positions, 2 * size), 2), **overrides})

    def sees_all(self, num_positions: int) -> bool:
        return num_positions == 1

    def rotations(self, head_dim: int) -> np.ndarray:
        """R of every round, float32 `[num_hashes, head_dim, num_buckets / 2]`."""
        return _rotations(self.seed, self.num_hashes, head_dim, self.num_buckets // 2)

    # Which tokens share a bucket.

    def choose(self, call: Call, params: Params) -> Buckets:
        (q_len, kv_len), num_heads = call.lengths, call.query.shape[2]
        offset = call.offset("Reformer")
        query, tokens = exact(call.query), exact(call.query)
        if not self._is_whole(call):
            at = offset + jnp.arange(q_len)
            tokens = jnp.repeat(exact(call.key), num_heads // call.key.shape[2], axis=2)
            tokens = tokens.at[:, jnp.where(at < 0, kv_len, at)].set(query, mode="drop")
        rotations = jnp.asarray(self.rotations(tokens.shape[-1]), tokens.dtype)
        turned = jnp.einsum("blhd,rdn->bhrln", tokens, rotations, precision=jax.lax.Precision.HIGHEST)
        widest = jnp.argmax(jnp.abs(turned), -1).astype(jnp.int32)
        positive = jnp.take_along_axis(turned, widest[..., None], -1, mode="clip")[..., 0] >= 0
        real = real_tokens(call)
        bucket = jnp.where(positive, widest, widest + self.num_buckets // 2)
        bucket = jnp.where(real[:, :, None], bucket, self.num_buckets)
        if (self.num_buckets + 1) * kv_len < 2**31:  # one number says both: much the faster to sort
            places = jnp.arange(kv_len, dtype=jnp.int32)
            order = jnp.sort(bucket * kv_len + places, axis=-1) % kv_len
        else:
            order = jnp.argsort(bucket, axis=-1, stable=True).astype(jnp.int32)
        return Buckets(order, inverse_of(order, kv_len), bucket, real)

    def _is_whole(self, call: Call) -> bool:
        """Whether the queries are those of all tokens, as far as it is known."""
        offset = call.offset("Reformer")
        return call.lengths[0] == call.lengths[1] and isinstance(offset, int) and offset == 0

    def choice_flops(self, shape: Shape) -> int:
        products = shape.kv_len * self.num_hashes * shape.head_dim * (self.num_buckets // 2)
        return 2 * shape.batch * shape.num_heads * products

    def _near(self, kv_len: int) -> Near:
        return Near(1, self._size(kv_len)) if self.causal else Near(0, 1)

    def _size(self, kv_len: int) -> int:
        """Tokens of a chunk; longer ones than the length are no different."""
        return min(self.bucket_size, kv_len)

    def _layout(self, buckets: Buckets) -> tuple[Array, Array]:
        """The token at each place of the lists `[..., places]`, `length` where none is; the place of each token."""
        length, num_places = buckets.order.shape[-1], self._num_places(buckets.order.shape[-1])
        if not self.causal:
            empty = [(0, 0)] * 3 + [(0, num_places - length)]
            return jnp.pad(buckets.order, empty, constant_values=length), buckets.inverse
        # Every bucket begins at a tile: where in a tile a token stands, and so how its sums are rounded, is decided by
        # the tokens before it.
        align, ids = self._blocks(length)[0], jnp.arange(self.num_buckets + 1, dtype=jnp.int32)
        in_order = jnp.take_along_axis(buckets.bucket, buckets.order, -1, mode="clip")
        find = functools.partial(jnp.searchsorted, v=ids)
        for _ in range(3):
            find = jax.vmap(find)
        start = find(in_order).astype(jnp.int32)
        fill = -jnp.diff(start, axis=-1) % align
        shift = jnp.pad(jnp.cumsum(fill, -1, dtype=jnp.int32), [(0, 0)] * 3 + [(1, 0)])
        places = buckets.inverse + jnp.take_along_axis(shift, buckets.bucket, -1, mode="clip")
        return inverse_of(places, num_places, length), places

    def _codes(self, buckets: Buckets) -> tuple[Array, Array, Array]:
        """Numbers of the tokens, `[batch, heads, rounds, length]`: a round has the pairs in which they are `_near`.

        Those of queries; of keys; and of keys of the last chunk, as the one before the first.
        """
        kv_len = buckets.order.shape[-1]
        size, real, place = self._size(kv_len), buckets.real[:, :, None], buckets.inverse
        of_query = lambda code: jnp.where(real, code, -FAR)
        of_key = lambda code: jnp.where(real, code, FAR)
        if self.causal:
            code = place + buckets.bucket * (size + 1)
            return of_query(code), of_key(code), jnp.full_like(code, FAR)
        chunk, apart = place // size, ceil_div(kv_len, size) + 3
        code = chunk + buckets.bucket * apart
        last = self._last_chunk(buckets)[:, :, None, None]
        before = jnp.where((chunk == last) & (last > 0), buckets.bucket * apart - 1, FAR)
        return of_query(code), of_key(code), of_key(before)

    def _last_chunk(self, buckets: Buckets) -> Array:
        """The last chunk with a real token, int32 `[batch, heads]`."""
        return jnp.maximum(buckets.real.sum(-1, dtype=jnp.int32) - 1, 0) // self._size(buckets.real.shape[-1])

    def _alone(self, buckets: Buckets) -> Array:
        """Real tokens that no round gives another key, bool `[batch, heads, length]`.

        Those of a bucket stand side by side.
        """
        kv_len = buckets.order.shape[-1]
        size, place = self._size(kv_len), jnp.arange(kv_len)
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

    def chosen_pairs(self, chosen: Buckets, call: Call) -> Array:
        q_len, kv_len = call.lengths
        near, (of_query, of_key, before) = self._near(kv_len), self._codes(chosen)
        at, tokens = call.offset("Reformer") + jnp.arange(q_len), jnp.arange(kv_len)
        rows = lambda x: jnp.take(x, at, axis=-1, mode="clip")[..., None]
        pairs = near.of(rows(of_query), of_key[..., None, :]) | near.of(rows(of_query), before[..., None, :])
        own = at[:, None] == tokens
        pairs = (pairs.any(2) & ~own) | (own & rows(self._alone(chosen)))
        return pairs & ((at >= 0) & (at < kv_len))[:, None]

    # Attention, chunk by chunk.

    def is_dense(self, q_len: int, kv_len: int) -> bool:
        return self.implementation == "reference" or (q_len <= FEW_QUERIES and q_len != kv_len)

    def _split(self, call: Call, params: Params) -> Any:
        key = exact(call.key)
        finite = jnp.isfinite(key).all(-1, keepdims=True)  # a hidden NaN must not meet a gradient of zero
        length = jnp.square(jnp.where(finite, key, 0)).sum(-1, keepdims=True)
        known = (length > 0) & jnp.isfinite(length)
        key = key * jnp.where(known, jax.lax.rsqrt(jnp.where(known, length, 1)), 1)
        return super()._split(dataclasses.replace(call, key=key.astype(call.key.dtype)), params)

    def attend_chosen(
        self, chosen: Buckets, call: Call, inputs: Inputs, controls: Controls, settings: Settings
    ) -> tuple[Array, Array]:
        query, sinks = merge_heads(inputs.query), inputs.sinks
        at: Any = None
        if not self._is_whole(call):  # the others are queries of zero, which nobody asks for
            kv_len, at = call.lengths[1], controls.offset + jnp.arange(call.lengths[0])
            at = jnp.where(at < 0, kv_len, at)
            query = jnp.zeros((query.shape[0], kv_len, *query.shape[2:]), query.dtype).at[:, at].set(query, mode="drop")
            bias = inputs.bias
            if bias is not None and bias.shape[3] > 1:
                whole = jnp.zeros((*bias.shape[:3], kv_len, bias.shape[4]), bias.dtype)
                inputs = inputs._replace(bias=whole.at[:, :, :, at].set(bias, mode="drop"))
        length, (order, places) = chosen.order.shape[-1], self._layout(chosen)
        plan, lists = self._plan(length), self._lists(chosen, order, places, query, inputs)
        pairs = ReformerPairs(self._near(length), self.num_hashes - 1, self.causal)
        out, lse = attend_lists(lists, plan, pairs, inputs, controls._replace(offset=0), settings)
        out, lse = to_tokens(out, order, places), to_tokens(lse[..., None], order, places)[..., 0]
        parts = [(out[:, :, :, index], lse[:, :, :, index]) for index in range(self.num_hashes)]
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.reshape(-1).astype(lse.dtype), parts[0][1].shape)
            parts.append((jnp.zeros_like(parts[0][0]), sink))
        out, lse = merge_parts(parts) if len(parts) > 1 else parts[0]
        if at is None:
            return out, lse
        out, lse = (jnp.take(x, at, axis=1, mode="clip") for x in (out, lse))
        known = (controls.offset + jnp.arange(len(at)) >= 0) & (at < length)
        return jnp.where(known[:, None, None], out, jnp.nan), jnp.where(known[:, None], lse, jnp.nan)

    def _lists(self, buckets: Buckets, order: Array, places: Array, query: Array, inputs: Inputs) -> Lists:
        """Queries in order; keys in order after those of the last chunk, so that the chunk before stands before each.

        With `causal` no chunk is before the first, and nothing stands there.
        """
        length = buckets.order.shape[-1]
        last = jnp.full((*order.shape[:3], 1), length, jnp.int32)
        if not self.causal:
            last = jnp.broadcast_to(self._last_chunk(buckets)[:, :, None, None] * self._size(length), last.shape)
        before = last + jnp.arange(self._before(length), dtype=jnp.int32)
        before = jnp.take_along_axis(order, before, -1, mode="fill", fill_value=length)
        of_query, of_key, as_before = self._codes(buckets)
        pick = lambda x, tokens, none: jnp.take_along_axis(x, tokens, -1, mode="fill", fill_value=none)
        joined = lambda first, then: jnp.concatenate([first, then], 3)
        keys = lambda x: joined(take_tokens(x, before), to_order(x, order, places))
        tokens = joined(before, order)
        # The round's own codes.
        q_codes = [pick(of_query, order, -FAR)]
        kv_codes = [joined(pick(as_before, before, FAR), pick(of_key, order, FAR))]
        # Those of the rounds before it, whose pairs are not to be counted again.
        rounds = jnp.arange(self.num_hashes)[:, None]
        for index in range(self.num_hashes - 1):
            every = lambda x, index=index: jnp.broadcast_to(x[:, :, index : index + 1], x.shape)
            q_codes.append(jnp.where(index < rounds, pick(every(of_query), order, -FAR), -FAR))
            kv_codes.append(pick(every(of_key), tokens, FAR))
            if not self.causal:
                kv_codes.append(pick(every(as_before), tokens, FAR))
        # Itself: never, but for tokens that are alone, in the first round.
        alone = jnp.broadcast_to(self._alone(buckets)[:, :, None], buckets.order.shape)
        q_codes += [jnp.where(pick(alone, order, False) & (rounds == 0), order, -1), order]
        kv_codes.append(joined(jnp.full_like(before, -2), order))
        some = lambda tokens: jnp.minimum(tokens, length - 1)
        return Lists(
            to_order(query, order, places), keys(inputs.key), keys(inputs.value), jnp.stack(q_codes, 3),
            jnp.stack(kv_codes, 3), some(order), some(tokens),
        )  # fmt: skip

    def _blocks(self, length: int) -> tuple[int, int]:
        """Queries and keys of a tile."""
        size = self._size(length)
        if self.causal:
            block = min(CAUSAL_TILE, 8 * ceil_div(size, 8)) if size >= 2 * CAUSAL_TILE else 8
            return block, block
        if size >= MIN_TILE:
            return (tile_of_blocks(size),) * 2
        return size * min(ceil_div(MIN_TILE, size), ceil_div(length, size)), size

    def _before(self, length: int) -> int:
        """Places for keys before the first."""
        return round_up(self._size(length), self._blocks(length)[1])

    def _num_places(self, length: int) -> int:
        block = self._blocks(length)[0]
        return round_up(length + (self.num_buckets * (block - 1) if self.causal else 0), block)

    def _plan(self, length: int) -> TilePlan:
        q_block, kv_block = self._blocks(length)
        size = kv_block if self.causal else self._size(length)
        chunks, each = max(q_block // size, 1), size // kv_block  # chunks of a query tile, key tiles of a chunk
        first = np.arange(self._num_places(length) // q_block) * q_block // size * each
        return list_plan(
            first[:, None] + np.arange(self._before(length) // kv_block + chunks * each), q_block, kv_block
        )

    def chosen_flops(self, shape: Shape, relative: Any) -> int:
        plan, num_places = self._plan(shape.kv_len), self._num_places(shape.kv_len)
        return self.num_hashes * list_flops(plan, num_places, shape, relative)


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
class ReformerPairs(CodePairs):
    """The pairs of a round that no round before it has; codes as `Reformer._lists` orders them."""

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
def _rotations(seed: int, *sizes: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(math.prod(sizes))
    return drawn.astype(np.float32).reshape(sizes)
