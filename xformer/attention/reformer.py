"""Reformer: tokens attend to those in the same bucket of a locality-sensitive hash (Kitaev et al. 2020)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.call import Call
from xformer.attention.chosen_pairs import ChosenPairs, Lists, attend_lists, list_flops, list_plan, real_tokens
from xformer.attention.dtypes import exact
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.query_tile import merge_heads
from xformer.attention.engine.tile_plan import TilePlan, ceil_div, round_up
from xformer.attention.engine.tile_policy import MIN_TILE, tile_of_blocks
from xformer.attention.hash_buckets import FAR, Buckets, Chunks, RoundPairs, drawn_rotations, sorted_by_bucket
from xformer.attention.merge_parts import merge_parts
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.attention.sizing import block_for_length
from xformer.attention.token_rows import at_tiles, num_places, take_tokens, to_order, to_tokens
from xformer.checks import check_integer

Array = jax.Array
FEW_QUERIES = 16  # so many or fewer, as in decoding, see all keys at once
CAUSAL_TILE = 16  # queries and keys of a tile: every bucket begins at one


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
        return drawn_rotations(self.seed, self.num_hashes, head_dim, self.num_buckets // 2)

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
        return sorted_by_bucket(turned, real_tokens(call))

    def _is_whole(self, call: Call) -> bool:
        """Whether the queries are those of all tokens, as far as it is known."""
        offset = call.offset("Reformer")
        return call.lengths[0] == call.lengths[1] and isinstance(offset, int) and offset == 0

    def choice_flops(self, shape: Shape) -> int:
        products = shape.kv_len * self.num_hashes * shape.head_dim * (self.num_buckets // 2)
        return 2 * shape.batch * shape.num_heads * products

    def _chunks(self, kv_len: int) -> Chunks:
        """Chunks longer than the length are no different."""
        return Chunks(min(self.bucket_size, kv_len), self.causal)

    def _layout(self, buckets: Buckets) -> tuple[Array, Array]:
        """The token at each place of the lists `[..., places]`, `length` where none is; the place of each token."""
        length = buckets.order.shape[-1]
        if not self.causal:
            empty = [(0, 0)] * 3 + [(0, self._num_places(length) - length)]
            return jnp.pad(buckets.order, empty, constant_values=length), buckets.inverse
        # Every bucket begins at a tile, so that the future does not round the past.
        tile = self._blocks(length)[0]
        return at_tiles(buckets.order, buckets.inverse, buckets.bucket, self.num_buckets + 1, tile)

    def chosen_pairs(self, chosen: Buckets, call: Call) -> Array:
        return self._chunks(call.lengths[1]).pairs(chosen, call.offset("Reformer") + jnp.arange(call.lengths[0]))

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
        pairs = RoundPairs(self._chunks(length).near, self.num_hashes - 1, self.causal)
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
        chunks = self._chunks(length)
        last = jnp.full((*order.shape[:3], 1), length, jnp.int32)
        if not self.causal:
            last = jnp.broadcast_to(chunks.last(buckets)[:, :, None, None] * chunks.size, last.shape)
        before = last + jnp.arange(self._before(length), dtype=jnp.int32)
        before = jnp.take_along_axis(order, before, -1, mode="fill", fill_value=length)
        of_query, of_key, as_before = chunks.codes(buckets)
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
        alone = jnp.broadcast_to(chunks.alone(buckets)[:, :, None], buckets.order.shape)
        q_codes += [jnp.where(pick(alone, order, False) & (rounds == 0), order, -1), order]
        kv_codes.append(joined(jnp.full_like(before, -2), order))
        some = lambda tokens: jnp.minimum(tokens, length - 1)
        return Lists(
            to_order(query, order, places), keys(inputs.key), keys(inputs.value), jnp.stack(q_codes, 3),
            jnp.stack(kv_codes, 3), some(order), some(tokens),
        )  # fmt: skip

    def _blocks(self, length: int) -> tuple[int, int]:
        """Queries and keys of a tile."""
        size = self._chunks(length).size
        if self.causal:
            block = min(CAUSAL_TILE, 8 * ceil_div(size, 8)) if size >= 2 * CAUSAL_TILE else 8
            return block, block
        if size >= MIN_TILE:
            return (tile_of_blocks(size),) * 2
        return size * min(ceil_div(MIN_TILE, size), ceil_div(length, size)), size

    def _before(self, length: int) -> int:
        """Places for keys before the first."""
        return round_up(self._chunks(length).size, self._blocks(length)[1])

    def _num_places(self, length: int) -> int:
        block = self._blocks(length)[0]
        return num_places(length, self.num_buckets + 1, block) if self.causal else round_up(length, block)

    def _plan(self, length: int) -> TilePlan:
        q_block, kv_block = self._blocks(length)
        size = kv_block if self.causal else self._chunks(length).size
        chunks, each = max(q_block // size, 1), size // kv_block  # chunks of a query tile, key tiles of a chunk
        first = np.arange(self._num_places(length) // q_block) * q_block // size * each
        return list_plan(
            first[:, None] + np.arange(self._before(length) // kv_block + chunks * each), q_block, kv_block
        )

    def chosen_flops(self, shape: Shape, relative: Any) -> int:
        plan, num_places = self._plan(shape.kv_len), self._num_places(shape.kv_len)
        return self.num_hashes * list_flops(plan, num_places, shape, relative)
