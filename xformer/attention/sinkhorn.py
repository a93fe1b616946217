"""Sinkhorn attention: blocks attend to themselves and to a block sorted to their side (Tay et al. 2020)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention import slots
from xformer.attention.call import Call
from xformer.attention.cost import Cost, call_cost
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.engine.tile_policy import tile_of_blocks
from xformer.attention.interface import Attention
from xformer.attention.pattern import Pattern, Tiles
from xformer.attention.pattern_attention import PatternAttention
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.attention.sizing import block_for_length
from xformer.attention.spans import Spans
from xformer.checks import check_integer

Array = jax.Array
LOWEST = -1e30  # the affinity of blocks that may not be sorted to each other
SELF_ATTENTION = "its blocks are compared by all their queries, which must stand at the same tokens as the keys"


@dataclasses.dataclass(frozen=True)
class Sinkhorn(Attention):
    """Each query attends to the keys of its own block and to those of one mixed for it from all blocks, in one softmax.

    The mixed block i is `sum_j R_ij block_j`, of keys and of values (section 3.1): R begins as the exponential of the
    affinities of blocks, `scale / temperature` times the product of the mean query of block i and the mean key of block
    j, and has its rows and then its columns divided by their sums `num_iterations` times (Sinkhorn's iteration, section
    3.1.1), so that it comes near a permutation. It is differentiable. The paper's sorting network, whose size is the
    number of blocks, and its Gumbel noise are left out.

    With `causal` block i is mixed of the blocks before it and nothing else (section 3.3): its query is the mean of
    those up to its own first token, rows and columns are summed over what lies before, the first block has none mixed,
    and the own block is cut at the query. Keys of padding are zeros in a mixed block, and blocks without a real token
    have no part. Mixed blocks mix tokens, so biases, segments, relative positions and masks that depend on the query
    cannot be honoured; and decoding from a cache, which has no earlier queries, cannot either.

    Attributes:
      block_size: tokens of a block.
      num_iterations: of the normalisation.
      temperature: lower makes the sorting harder.
    """

    REFUSES: ClassVar[Mapping[str, str]] = {**slots.REFUSES, "query_offset": SELF_ATTENTION}

    block_size: int = 64
    num_iterations: int = 8
    temperature: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("Sinkhorn.block_size", self.block_size)
        check_integer("Sinkhorn.num_iterations", self.num_iterations)
        known = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if not known or not 0 < self.temperature < float("inf"):
            raise ValueError(f"Sinkhorn.temperature must be a finite number above 0, got {self.temperature!r}")

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """About 32 blocks of 8 to 64 tokens."""
        return cls(**{"block_size": block_for_length(num_positions), **overrides})

    def init(self, rng: Array, shape: Shape) -> Params:
        return {}

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> None:
        return None

    def attend(self, call: Call, params: Params) -> Array:
        q_len, kv_len = call.lengths
        if q_len != kv_len:
            raise ValueError(
                f"Sinkhorn needs queries and keys of one length, got {q_len} and {kv_len}: {SELF_ATTENTION}"
            )
        real, key, value = slots.without_padding("Sinkhorn", call)
        self.check_params(params, call)
        query = call.query.astype(key.dtype) * call.scale
        if call.head_scale is not None:
            query = query * call.head_scale[None, None, :, None]
        num_heads, size = query.shape[2], self.block_size
        key, value = (jnp.repeat(x, num_heads // x.shape[2], axis=2) for x in (key, value))
        mix = self._mix(query, key, real, call.precision)
        keys, values = (self._with_mixed(x, mix, call.precision) for x in (key, value))
        seen = slots.windows(real, size)
        of_any = jnp.broadcast_to(seen.any(1, keepdims=True), seen.shape)
        if self.causal:
            of_any = _before(seen.astype(jnp.int32)) > 0
        seen = jnp.concatenate([of_any, seen], 2)
        mask = jnp.moveaxis(seen.reshape(seen.shape[0], -1, seen.shape[3]), 1, 2)[:, :, None]
        call = dataclasses.replace(
            call, query=query, key=keys, value=values, mask=mask, scale=1.0, head_scale=None, query_offset=0
        )
        return self._over_blocks().attend(call, {})

    def _mix(self, query: Array, key: Array, real: Array, precision: Any) -> Array:
        """R, `[batch, heads, num_blocks, num_blocks]`."""
        sums, count = (_block_sums(x, real, self.block_size) for x in (query, real[..., None].astype(query.dtype)))
        key_sums, some = _block_sums(key, real, self.block_size), count[..., 0] > 0
        keys = key_sums / jnp.maximum(count, 1)
        if self.causal:  # those of the blocks before, and the first of its own
            first = real[:, :: self.block_size, :, None]
            sums, count = (_before(x) for x in (sums, count))
            sums = sums + jnp.where(first, query[:, :: self.block_size], 0)
            count = count + first.astype(count.dtype)
        queries = sums / jnp.maximum(count, 1)
        scores = jnp.einsum("bihd,bjhd->bhij", queries, keys, precision=precision) / self.temperature
        some = jnp.moveaxis(some, 1, 2)
        numbers = jnp.arange(scores.shape[-1])
        allowed = some[:, :, None] & (numbers < numbers[:, None] if self.causal else some[..., None])

        def normalise(scores: Array, _: None) -> tuple[Array, None]:
            scores = jnp.where(allowed, scores - jax.nn.logsumexp(scores, -1, keepdims=True), LOWEST)
            columns = _sums_so_far(scores) if self.causal else jax.nn.logsumexp(scores, 2, keepdims=True)
            return jnp.where(allowed, scores - columns, LOWEST), None

        scores = jax.lax.scan(normalise, jnp.where(allowed, scores, LOWEST), None, length=self.num_iterations)[0]
        return jnp.where(allowed, jnp.exp(scores), 0)

    def _with_mixed(self, x: Array, mix: Array, precision: Any) -> Array:
        """Every block after the one mixed for it, `[batch, 2 * num_blocks * block_size, heads, depth]`."""
        blocks = slots.windows(x, self.block_size)
        mixed = jnp.einsum("bhij,bjwhd->biwhd", mix, blocks, precision=precision)
        return jnp.concatenate([mixed, blocks], 2).reshape(x.shape[0], -1, *x.shape[2:])

    def _over_blocks(self) -> MixedAndOwn:
        return MixedAndOwn(self.block_size, causal=self.causal, implementation=self.implementation)

    def cost(self, shape: Shape) -> Cost:
        num_blocks, depths = ceil_div(shape.kv_len, self.block_size), shape.head_dim + shape.value_depth
        flops = 2 * shape.batch * shape.num_heads * num_blocks**2 * (shape.head_dim + self.block_size * depths)
        inner = dataclasses.replace(
            shape, kv_len=2 * num_blocks * self.block_size, num_kv_heads=shape.num_heads, value_dim=shape.value_depth
        )
        return call_cost(shape, flops + self._over_blocks().cost(inner).flops, {})


def _block_sums(x: Array, real: Array, size: int) -> Array:
    """Sums of each block's real tokens, `[batch, num_blocks, heads, depth]`."""
    return slots.windows(jnp.where(real[..., None], x, 0), size).sum(2)


def _before(x: Array) -> Array:
    """Sums along axis 1 of what comes before each entry, into which later ones do not even round."""
    return jnp.pad(jnp.cumsum(x[:, :-1], axis=1), [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))


def _sums_so_far(scores: Array) -> Array:
    """The log-sum-exp of each column up to each row; row by row, which is exact and small to compile."""
    step = lambda total, row: (total := jnp.logaddexp(total, row), total)
    rows = jnp.moveaxis(scores, 2, 0)
    return jnp.moveaxis(jax.lax.scan(step, jnp.full_like(rows[0], LOWEST), rows)[1], 0, 2)


@dataclasses.dataclass(frozen=True)
class MixedAndOwn(PatternAttention):
    """Attention over pairs of blocks: the one mixed for a query's block, and its own."""

    size: int = 1

    def token_pattern(self, kv_len: int, num_heads: int) -> Pattern:
        return BlockPair(self.size, self.causal)

    def _pattern(self, kv_len: int, num_heads: int) -> Pattern:
        return BlockPair(self.size, self.causal)  # keys have no positions that a cut could go by

    def knows_offset(self, q_len: int, kv_len: int) -> bool:
        return True

    def block(self, kv_len: int) -> int | None:
        return tile_of_blocks(self.size)


@dataclasses.dataclass(frozen=True)
class BlockPair(Pattern):
    """Keys in pairs of blocks of `unit` tokens, a pair for each block of queries: all of the first, and of the second
    all or, with `causal`, those up to the query's place.
    """

    unit: int
    causal: bool

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = q_positions[None, :, None], k_positions.reshape(-1, 1, k_positions.shape[-1])
        own = key // (2 * self.unit) == query // self.unit
        return own & (key % (2 * self.unit) - self.unit <= query % self.unit) if self.causal else own

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        pair, low, high = 2 * self.unit, q_first // self.unit, q_last // self.unit
        last = low * pair + (self.unit + q_first % self.unit if self.causal else pair - 1)
        return Spans.of((low * pair, (high + 1) * pair - 1)), Spans.of((low * pair, np.where(low == high, last, -1)))

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        from_pair = tiles.k_first - tiles.q_first // self.unit * 2 * self.unit
        most = 2 * (tiles.q_block + 2 * self.unit)
        return [tiles.q_first % self.unit, np.clip(from_pair, -tiles.kv_block, most)]
