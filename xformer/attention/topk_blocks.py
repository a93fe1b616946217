"""Mixture of block attention: every query picks the blocks of keys that it attends to (Lu et al. 2025, MoBA)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

import jax
import jax.numpy as jnp

from xformer.attention import kernels, pattern, slots
from xformer.attention.call import Call
from xformer.attention.chosen_blocks import Sorting, attend_chosen
from xformer.attention.cost import Cost, call_cost
from xformer.attention.dtypes import exact
from xformer.attention.engine.listed_tiles import ListedTiles
from xformer.attention.engine.relative_tiles import LONGEST_ROW
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.local import Local
from xformer.attention.merge_parts import merge_parts
from xformer.attention.pattern_attention import PatternAttention
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.attention.sizing import block_for_length
from xformer.checks import check_integer

Array = jax.Array
Gate = Literal["query", "block"]
GATES = "its gates are means of the keys of a block, the same for all queries"


@dataclasses.dataclass(frozen=True)
class TopKBlocks(PatternAttention):
    """Each query attends to its own block of keys and to the `num_blocks - 1` others with the largest gates.

    The gate of a block is the product of the query with the mean of the block's real keys (section 2.2), before rotary
    embeddings turn either; nothing is differentiated through the choice. A block without a real key is not chosen. With
    `causal` only blocks before the query's own are candidates (they have ended, so that their means hold no later key),
    and the own block is cut at the query.

    What a query sees depends on data: `pattern` is None and `pattern_of` gives the pairs of given inputs. Hidden keys
    must not move a mean, so masks that depend on the query and segments are refused. A query stands among the keys:
    positions are those of the keys.

    With gates by query the tiled engine goes block by block, for all queries that chose one (`chosen_blocks`). A list
    for each query serves few queries, as in decoding, a bias that differs by query, and what would make a tile of
    queries meet too much: a table of distances, position terms with more than 1,024 embeddings.

    Attributes:
      block_size: tokens in a block.
      num_blocks: blocks that a query attends to, its own included; the paper's top-k.
      gate: "query": every query chooses for itself, as in the paper. "block": the queries of a block choose together,
        by the mean of the real ones in the call, and share their tiles; such a mean holds later queries, so it is
        refused with `causal`.
    """

    REFUSES: ClassVar[Mapping[str, str]] = {
        "segment_ids": GATES,
        "positions": "its blocks are of tokens in order",
        "plan": "its tiles depend on data",
    }

    block_size: int = 64
    num_blocks: int = 4
    gate: Gate = "query"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block_size", "num_blocks"):
            check_integer(f"TopKBlocks.{name}", getattr(self, name))
        if self.gate not in get_args(Gate):
            raise ValueError(f"TopKBlocks.gate must be one of {', '.join(get_args(Gate))}, got {self.gate!r}")
        if self.causal and self.gate == "block":
            raise NotImplementedError(
                'TopKBlocks(gate="block") cannot be causal: a block of queries chooses by all of them, later ones '
                'included; gate="query" can'
            )

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """About 32 blocks of 8 to 64 tokens, of which a query attends to 4."""
        return cls(**{"block_size": block_for_length(num_positions), **overrides})

    def token_pattern(self, kv_len: int, num_heads: int) -> pattern.Pattern:
        return pattern.Full()

    def sees_all(self, num_positions: int) -> bool:
        return ceil_div(num_positions, self.block_size) <= self.num_blocks

    def num_positions(self, kv_len: int) -> int:
        return kv_len

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> None:  # type: ignore[override]
        return None

    def _attend(self, call: Call, params: Params, *, with_lse: bool) -> tuple[Array, Array | None]:
        by_query = call.distances is not None or (call.bias is not None and call.bias.shape[2] > 1)
        if by_query or not self._sorts(*call.lengths):
            return super()._attend(call, params, with_lse=with_lse)
        if self.implementation is None:
            kernels.only_tiled(f"the tiles of {self._name} depend on data")
        inputs, controls, settings, _ = self._split(call, params)
        listed = self.listed_tiles(call)
        others = dataclasses.replace(listed, key_tiles=listed.key_tiles[..., 1:], valid=listed.valid[..., 1:])
        if call.dropout_rng is not None:
            call = dataclasses.replace(call, dropout_rng=jax.random.fold_in(call.dropout_rng, 1))
        own = self._own_block.attend_lse(call, params)
        return merge_parts([own, attend_chosen(others, inputs, controls, settings)])

    def _sorts(self, q_len: int, kv_len: int) -> bool:
        """Whether the tiled engine goes block by block, not query by query: where choices fill enough of its tiles."""
        sorting, position = self._sorting(q_len, kv_len), self.position
        if self.gate != "query" or self.implementation not in (None, "xla") or not sorting.count:
            return False
        if position is not None and position.num_embeddings > LONGEST_ROW:  # every tile would meet the whole table
            return False
        return sorting.num_places <= 2 * q_len * sorting.count

    def _sorting(self, q_len: int, kv_len: int) -> Sorting:
        num_blocks = ceil_div(kv_len, self.block_size)
        return Sorting(q_len, min(self.num_blocks, num_blocks) - 1, num_blocks, self.block_size)

    @property
    def _own_block(self) -> Local:
        return Local(self.block_size, causal=self.causal, position=self.position, implementation="xla")

    def listed_tiles(self, call: Call) -> ListedTiles:
        (q_len, kv_len), num_heads, size = call.lengths, call.query.shape[2], self.block_size
        num_blocks, offset = ceil_div(kv_len, size), call.offset("TopKBlocks")
        if call.mask is not None and call.mask.shape[2] != 1:
            raise NotImplementedError(
                f"TopKBlocks cannot honour a mask with query dimension {call.mask.shape[2]} (only 1, a padding mask, "
                f"works): {GATES}"
            )
        query, key = (exact(jax.lax.stop_gradient(x)) for x in (call.query, call.key))
        real = jnp.ones((1, kv_len, 1), bool)
        if call.mask is not None:
            batch, heads = call.mask.shape[:2]
            real = jnp.broadcast_to(jnp.moveaxis(call.mask[:, :, 0], 1, 2), (batch, kv_len, heads))
            if heads > 1:
                key = jnp.repeat(key, heads // key.shape[2], axis=2)
        at = offset + jnp.arange(q_len)
        own, q_block = at // size, 1
        if self.gate == "block":
            of_queries = jnp.take(real, at, axis=1, mode="fill", fill_value=True)
            if isinstance(offset, int) and offset % size == 0:
                query, q_block, own = _means(query, of_queries, size)[0], size, own[::size]
            else:
                query = _means_by_block(query, of_queries, own, ceil_div(q_len, size) + 1)
        listed, valid = own[None, None, :, None], jnp.ones((1, 1, len(own), 1), bool)
        count = min(self.num_blocks, num_blocks) - 1
        if count:
            means, some_real = _means(key, real, size)
            query = query.reshape(*query.shape[:2], means.shape[2], -1, query.shape[-1])
            gates = jnp.einsum("bqkgd,bnkd->bkgqn", query, means, precision=call.precision)
            gates = gates.reshape(call.batch, num_heads, *gates.shape[3:])
            others = jnp.arange(num_blocks)[None]
            others = others < own[:, None] if self.causal else others != own[:, None]
            candidates = others[None, None] & slots.as_mask(some_real)
            best, chosen = jax.lax.top_k(jnp.where(candidates, gates, -jnp.inf), count)
            every = lambda x: jnp.broadcast_to(x, (*chosen.shape[:3], 1))
            listed = jnp.concatenate([every(listed), chosen], -1)
            valid = jnp.concatenate([every(valid), best != -jnp.inf], -1)
        wide = lambda x: jnp.broadcast_to(x, (call.batch, *x.shape[1:]))
        return ListedTiles(wide(listed), wide(valid), q_block, size)

    def cost(self, shape: Shape, *, positions: bool = False) -> Cost:
        if positions or not self._sorts(shape.q_len, shape.kv_len):
            return super().cost(shape, positions=positions)
        params = jax.eval_shape(lambda: self.init(jax.random.key(0), shape))
        relative = jax.eval_shape(lambda p: self._relative(p, shape.num_heads, shape.kv_len), params)
        chosen = shape.batch * shape.num_heads * self._sorting(shape.q_len, shape.kv_len).flops(shape, relative)
        return call_cost(shape, self._own_block.cost(shape).flops + chosen + self.listing_flops(shape), params)

    def listing_flops(self, shape: Shape) -> int:
        num_blocks = ceil_div(shape.kv_len, self.block_size)
        choices = shape.q_len if self.gate == "query" else ceil_div(shape.q_len, self.block_size)
        if min(self.num_blocks, num_blocks) == 1:
            return 0
        return 2 * shape.batch * shape.num_heads * choices * num_blocks * shape.head_dim


def _means(x: Array, real: Array, size: int) -> tuple[Array, Array]:
    """Means `[batch, num_blocks, heads, depth]` over the real tokens of each block, and which blocks have one.

    `real` and the second are bool `[batch or 1, length or num_blocks, heads or 1]`. What is not real may be NaN.
    """
    count = slots.windows(real, size).sum(2)
    sums = slots.windows(jnp.where(real[..., None], x, 0), size).sum(2)
    return sums / jnp.maximum(count, 1)[..., None].astype(x.dtype), count > 0


def _means_by_block(x: Array, real: Array, block: Array, num_blocks: int) -> Array:
    """For every token the mean over the real tokens of its block; `block` int `[length]`, in ascending order."""
    within = (block[:, None] - block[:1] == jnp.arange(num_blocks)[None]).astype(x.dtype)
    sums = jnp.einsum("ln,blhd->bnhd", within, jnp.where(real[..., None], x, 0))
    count = jnp.einsum("ln,blh->bnh", within, real.astype(x.dtype))
    means = sums / jnp.maximum(count, 1)[..., None]
    return jnp.take(means, block - block[0], axis=1)
