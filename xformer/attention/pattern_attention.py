"""What the variants that keep token pairs share: a pattern, a position term, and the choice of an implementation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention import kernels
from xformer.attention.call import Call
from xformer.attention.cost import Cost
from xformer.attention.engine import attend as engine
from xformer.attention.engine import dense as dense_engine
from xformer.attention.engine import sequence_parallel
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.plan_making import make_band_plan, make_tile_plan
from xformer.attention.engine.relative_tiles import LONGEST_ROW, Relative, RelativeTiles
from xformer.attention.engine.tile_plan import TilePlan, ceil_div, round_up
from xformer.attention.interface import Attention, Params, Shape
from xformer.attention.pattern import Causal, Full, Heads, Pattern, dense
from xformer.attention.position import Position

Array = jax.Array
MAX_TILE = 512, 256  # queries and keys; on CPUs faster than others (benchmarks/README.md)


@dataclasses.dataclass(frozen=True)
class PatternAttention(Attention):
    """Attention over the token pairs of a pattern. Subclasses give the pattern.

    Attributes:
      position: a relative position term, or None.
    """

    position: Position | None = dataclasses.field(default=None, kw_only=True)

    POSITIONAL: ClassVar[bool] = True  # whether the pattern depends on positions even without a causal cut

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position is not None and not isinstance(self.position, Position):
            raise ValueError(f"{self._name}.position must be a position term or None, got {self.position!r}")

    def token_pattern(self, kv_len: int, num_heads: int) -> Pattern:
        """The pattern for keys at `[0, kv_len)`; the causal cut comes on top, so most need not look at `causal`."""
        raise NotImplementedError

    def sees_all(self, num_positions: int) -> bool:
        """Whether every query sees every key (causal: at or before it) where both stand at `[0, num_positions)`."""
        return False

    def block(self, kv_len: int) -> int | None:
        """Tile size that suits the pattern, in tokens; None where large tiles do."""
        return None

    def check_positions(self, first: int, q_len: int, kv_len: int) -> None:
        """Raises ValueError for query positions, known when tracing, that the pattern does not have."""

    # The contract.

    def remarks(self, num_positions: int) -> tuple[str, ...]:
        if not self.sees_all(num_positions):
            return ()
        keys = "every key up to its own" if self.causal else "every key"
        return (f"{self}: of {num_positions} positions every query sees {keys}, which is full attention",)

    def init(self, rng: Array, shape: Shape) -> Params:
        params = {} if self.position is None else self.position.init(rng, shape)
        return {"position": params} if params else {}

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> np.ndarray:
        return dense(self._pattern(kv_len, num_heads), q_len, kv_len)

    def attend(self, call: Call, params: Params) -> Array:
        inputs, controls, settings, pattern = split = self._split(call, params)
        offset, plan = controls.offset if isinstance(controls.offset, int) else None, call.plan
        if plan is not None and (offset != 0 or self.implementation not in (None, "xla")):
            raise NotImplementedError(f"{self._name}: a plan serves the tiled engine and queries from position 0 on")
        chosen = "xla" if plan is not None else kernels.choose(self.implementation, *split)
        if chosen in kernels.KERNELS:
            return kernels.KERNELS[chosen].attend(*split)
        if chosen == "reference":
            return _merge(dense_engine.attend(*split)[0])
        if plan is None:
            tiles = self.tile_plan(*call.lengths, call.query.shape[2], query_offset=offset)
            tiles = tiles.at_offset(controls.offset, call.lengths[1])
            (plan,) = sequence_parallel.share([tiles], *call.lengths)
        if offset is None:
            settings = dataclasses.replace(settings, pattern=pattern)
        return _merge(sequence_parallel.attend(inputs, controls._replace(plan=plan), settings))

    def plans(self, shape: Shape, num_layers: int) -> Any:
        ops: list[Any] = [self.at_layer(index) for index in range(num_layers)]
        patterns = [op._pattern(shape.kv_len, shape.num_heads) for op in ops]
        if all(pattern == patterns[0] for pattern in patterns):
            return None
        if self.implementation not in (None, "xla"):
            raise NotImplementedError(
                f"{self._name}.implementation {self.implementation!r} has its layer in its program: "
                "layers can't share a trace; None and 'xla' can"
            )
        # Layers are so many more heads: one list of tiles, so that all have the same shapes.
        tiles = self._tiles(Heads(tuple(patterns)), shape.q_len, shape.kv_len, shape.num_heads)
        layers = sequence_parallel.share(tiles.by_layer(num_layers), shape.q_len, shape.kv_len)
        return jax.tree.map(lambda *arrays: np.stack(arrays), *layers)

    def weights(self, call: Call, params: Params) -> Array:
        weights = dense_engine.attend(*self._split(call, params))[1]
        return weights.reshape(weights.shape[0], -1, *weights.shape[3:])

    def cost(self, shape: Shape) -> Cost:
        q_len, kv_len, head_dim = shape.q_len, shape.kv_len, shape.head_dim
        params = jax.eval_shape(lambda: self.init(jax.random.key(0), shape))
        implementation = self._implementation(shape, params)
        if implementation in kernels.KERNELS:
            pattern = self._pattern(kv_len, shape.num_heads)
            flops = kernels.KERNELS[implementation].flops(pattern, q_len, kv_len, head_dim)
            return finish_cost(shape, shape.batch * shape.num_heads * flops, params)
        if implementation == "reference":
            q_block, kv_block, num_rows, num_tiles, near_per_query_tile = q_len, kv_len, 1, 1, math.inf
        else:
            # Fewer queries than keys are those of decoding, at an offset that is known at run time.
            known = q_len == kv_len or not (self.POSITIONAL or self.causal or self.position is not None)
            plan = self.tile_plan(q_len, kv_len, shape.num_heads, query_offset=0 if known else None)
            q_block, kv_block, num_tiles = plan.q_block, plan.kv_block, plan.num_tiles
            num_rows, near_per_query_tile = ceil_div(q_len, q_block), plan.near_per_query_tile
        flops = 4 * num_tiles * q_block * kv_block * head_dim
        if self.position is not None:
            relative = jax.eval_shape(lambda p: self._relative(p, shape.num_heads, kv_len), params)
            tables = sum(table is not None for table in (relative.key_table, relative.value_table)) if relative else 0
            if relative is not None and tables:
                tile = RelativeTiles(q_block, kv_block, relative.radius, near_per_query_tile)
                flops += tables * tile.flops(num_rows, head_dim)
        return finish_cost(shape, shape.batch * shape.num_heads * flops, params)

    def tile_plan(self, q_len: int, kv_len: int, num_heads: int, *, query_offset: int | None = 0) -> TilePlan:
        """The tiles that the engine visits.

        Where the offset is known only at run time (None) these are so many around each query tile, if the pattern is
        within a band (`TilePlan.at_offset` places them), and all of them else.
        """
        pattern = self._pattern(kv_len, num_heads)
        if query_offset is None and (math.inf in pattern.band() or sequence_parallel.num_shards() > 1):
            pattern = Full()
        return self._tiles(pattern, q_len, kv_len, num_heads, query_offset)

    def _tiles(
        self, pattern: Pattern, q_len: int, kv_len: int, num_heads: int, query_offset: int | None = 0
    ) -> TilePlan:
        reach = None if self.position is None or query_offset is None else self.position.constant_beyond
        if isinstance(pattern, Full) and reach is None:
            query_offset = 0  # of no consequence
        block = None if isinstance(pattern, Full) else self.block(kv_len)
        # A tile has as many distances as queries and keys: where each needs a product, tiles had better be wide.
        by_tile = self.position is not None and self.position.num_embeddings > LONGEST_ROW
        most_queries, most_keys = MAX_TILE[::-1] if by_tile else MAX_TILE
        if block is None:
            # Devices that share out the queries need a tile each at least.
            most_queries = min(most_queries, max(ceil_div(q_len, sequence_parallel.num_shards()), 16))
            q_block, kv_block = even_block(q_len, most_queries), even_block(kv_len, most_keys)
        else:
            q_block, kv_block = min(block, q_len), min(block, kv_len)
        # Tiles too small to be worth a step are attended several at a time.
        several = min(max(engine.STEP_SCORES // (num_heads * q_block), 512), 2048)
        chunk_tokens = kv_block if 2 * kv_block > most_keys else several
        if query_offset is None:
            before, after = (int(reach) for reach in pattern.band())
            return make_band_plan(before, after, q_len, kv_len, q_block, kv_block, chunk_tokens)
        return make_tile_plan(pattern, q_len, kv_len, q_block, kv_block, chunk_tokens, query_offset, reach)

    # What the implementations are given.

    def _implementation(self, shape: Shape, params: Params) -> str:
        """What runs a plain call of this shape in float32 (in bfloat16 for cuDNN, which knows no other)."""
        dtype = jnp.bfloat16 if self.implementation == "cudnn" else jnp.float32
        array = lambda *sizes: jax.ShapeDtypeStruct((shape.batch, *sizes, shape.head_dim), dtype)
        query = array(shape.q_len, shape.kv_heads, shape.num_heads // shape.kv_heads)
        key = array(shape.kv_len, shape.kv_heads)
        relative = None
        if self.position is not None:
            relative = jax.eval_shape(lambda p: self._relative(p, shape.num_heads, shape.kv_len), params)
        inputs: Any = Inputs(query, key, key, None, relative)  # type: ignore
        pattern = self._pattern(shape.kv_len, shape.num_heads)
        return kernels.choose(self.implementation, inputs, Controls(None), Settings(1.0), pattern, anywhere=True)

    def _pattern(self, kv_len: int, num_heads: int) -> Pattern:
        pattern = self.token_pattern(kv_len, num_heads)
        if not self.causal:
            return pattern
        return Causal() if isinstance(pattern, Full) else pattern & Causal()

    def _relative(self, params: Params, num_heads: int, kv_len: int) -> Relative | None:
        assert self.position is not None
        own = params.get("position", {})
        return self.position.relative(own, num_heads=num_heads, causal=self.causal, kv_len=kv_len)

    def _split(self, call: Call, params: Params) -> tuple[Inputs, Controls, Settings, Pattern]:
        """The call with split heads, rotated, and without a plan."""
        (q_len, kv_len), num_heads = call.lengths, call.query.shape[2]
        self.check_params(params, call)
        offset: int | Array = 0
        if self.POSITIONAL or self.causal or self.position is not None:
            offset = call.offset(self._name)
            if isinstance(offset, int):
                self.check_positions(offset, q_len, kv_len)
        query, key, relative = call.query, call.key, None
        if self.position is not None:
            query = self.position.rotate(query, offset + jnp.arange(q_len))
            key = self.position.rotate(key, jnp.arange(kv_len))
            relative = self._relative(params, num_heads, kv_len)
        inputs, controls, settings = split_heads(call, query, key, call.value)
        inputs = inputs._replace(relative=relative)
        return inputs, controls._replace(offset=offset), settings, self._pattern(kv_len, num_heads)


def split_heads(call: Call, query: Array, key: Array, value: Array) -> tuple[Inputs, Controls, Settings]:
    """The engine's form of a call: query heads split into `kv_heads` and `groups`."""
    num_heads, kv_heads = query.shape[2], key.shape[2]

    def pairs(x: Array | None) -> Array | None:
        if x is None:
            return None
        heads = (kv_heads, num_heads // kv_heads) if x.shape[1] > 1 else (1, 1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    mask = pairs(call.mask)
    if mask is not None and mask.shape[1:4] == (1, 1, 1):
        # A padding mask: what stands in padded places must not matter, not even if it is infinite.
        real = mask.reshape(mask.shape[0], -1, 1, 1)
        key, value = jnp.where(real, key, 0), jnp.where(real, value, 0)
    q_segments = None if call.q_segments is None else call.q_segments[:, None, None, :, None]
    kv_segments = None if call.kv_segments is None else call.kv_segments[:, None, None, None, :]
    controls = Controls(None, mask, q_segments, kv_segments, 0, call.dropout_rng)
    settings = Settings(call.scale, call.dropout_rate, call.broadcast_dropout, None, call.precision)
    query = query.reshape(*query.shape[:2], kv_heads, -1, query.shape[-1])
    return Inputs(query, key, value, pairs(call.bias)), controls, settings


def _merge(out: Array) -> Array:
    """`[batch, q_len, kv_heads, groups, head_dim]` -> `[batch, q_len, num_heads, head_dim]`."""
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def finish_cost(shape: Shape, flops: int, params: Params) -> Cost:
    """Adds the bytes of arguments and result, in float32, and the number of parameters."""
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    tokens = 2 * shape.q_len * shape.num_heads + 2 * shape.kv_len * shape.kv_heads
    return Cost(flops, 4 * (shape.batch * tokens * shape.head_dim + num_params), num_params)


def even_block(length: int, most: int) -> int:
    """The tile size of at most about `most` tokens that cuts a length into like tiles with little padding."""
    if length <= most:
        return length
    return round_up(ceil_div(length, ceil_div(length, most)), 8)
