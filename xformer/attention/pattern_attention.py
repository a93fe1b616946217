"""Base of the variants that keep token pairs: a pattern, a position term, and the choice of an implementation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention import kernels, layer_plans
from xformer.attention.call import Call, normalize
from xformer.attention.cost import Cost, call_cost
from xformer.attention.dtypes import exact
from xformer.attention.engine import dense as dense_engine
from xformer.attention.engine import few_queries, listed_tiles, sequence_parallel
from xformer.attention.engine.few_queries import CachedKeys
from xformer.attention.engine.keys_in_reach import keys_in_reach
from xformer.attention.engine.listed_tiles import ListedTiles
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.query_tile import merge_heads
from xformer.attention.engine.relative_tiles import Relative
from xformer.attention.engine.tile_cost import dense_flops, tiled_flops
from xformer.attention.engine.tile_plan import TilePlan
from xformer.attention.engine.tile_policy import plan_tiles
from xformer.attention.interface import Attention
from xformer.attention.pattern import Causal, Full, Heads, Pattern, dense
from xformer.attention.position import Position
from xformer.attention.shape import Shape
from xformer.attention.signature import Options, Params
from xformer.attention.split_heads import split_heads, with_pairs

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PatternAttention(Attention):
    """Attention over the token pairs of a pattern. Subclasses give the pattern.

    Attributes:
      position: a relative position term, or None.
    """

    position: Position | None = dataclasses.field(default=None, kw_only=True)

    POSITIONAL: ClassVar[bool] = True  # whether the pattern depends on positions even without a causal cut
    # Whether single pairs follow from positions, and their scores from queries, keys and the position term alone.
    PAIRS_BY_POSITION: ClassVar[bool] = True
    PLAN_FIELDS: ClassVar[tuple[str, ...]] = ()  # integer fields that only choose which blocks a plan lists

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

    def listed_tiles(self, call: Call) -> ListedTiles | None:
        """The tiles that a call visits, where they depend on its data; None where the pattern alone says so.

        A variant that lists tiles gives a pattern too, often `Full`, which single pairs are tested by. Nothing is
        differentiated through the choice. Matrix products made for it are counted by `listing_flops`.
        """
        return None

    def listing_flops(self, shape: Shape) -> int:
        """FLOPs of the matrix products of `listed_tiles`."""
        return 0

    def knows_offset(self, q_len: int, kv_len: int) -> bool:
        """Whether the first query of a plain call stands at 0, or it does not matter where.

        Fewer queries than keys are those of decoding, at an offset that is known at run time.
        """
        return q_len == kv_len or not (self.POSITIONAL or self.causal or self.position is not None)

    def num_positions(self, kv_len: int) -> int | None:
        """How many positions, from 0, the pattern has for queries; None where there is no end."""
        return None

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
        return self._attend(call, params, with_lse=False)[0]

    def attend_lse(self, call: Call, params: Params) -> tuple[Array, Array]:
        out, lse = self._attend(call, params, with_lse=True)
        assert lse is not None
        return out, lse

    def _attend(self, call: Call, params: Params, *, with_lse: bool) -> tuple[Array, Array | None]:
        inputs, controls, settings, pattern = self._split(call, params)
        listed = self.listed_tiles(call)
        if listed is not None:
            return self._attend_listed(listed, inputs, controls, settings, pattern)
        offset, plan = controls.offset if isinstance(controls.offset, int) else None, controls.plan
        if plan is not None and (offset != 0 or self.implementation not in (None, "xla")):
            raise NotImplementedError(f"{self._name}: a plan serves the tiled engine and queries from position 0 on")
        if plan is None:
            chosen = kernels.choose(self.implementation, inputs, controls, settings, pattern, with_lse=with_lse)
        else:
            tiled = "scanned layers share one program, of which tiles are an input"
            chosen = self.implementation or kernels.only_tiled(tiled)
        if chosen in kernels.KERNELS:
            return kernels.attend(chosen, inputs, controls, settings, pattern), None
        if chosen == "reference":
            out, lse, _ = dense_engine.attend(inputs, controls, settings, pattern)
            return merge_heads(out), merge_heads(lse)
        by_position = controls.q_positions is not None
        if plan is None:
            sizes = *call.lengths, call.query.shape[2]
            # Where positions are given any tile may hold a pair.
            tiles = self._tiles(pattern, *sizes, None if by_position else controls.offset)
            (plan,) = sequence_parallel.share([tiles], *call.lengths)
        if offset is None or (by_position and not isinstance(pattern, Full)):
            settings = dataclasses.replace(settings, pattern=pattern)
        out, lse = sequence_parallel.attend(inputs, controls._replace(plan=plan), settings)
        return merge_heads(out), merge_heads(lse)

    def _attend_listed(
        self, listed: ListedTiles, inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern
    ) -> tuple[Array, Array]:
        if self.implementation not in (None, "xla", "reference"):
            raise NotImplementedError(
                f'implementation="{self.implementation}" cannot do this call: the tiles of {self._name} depend on data'
            )
        if self.implementation == "reference":
            controls = with_pairs(controls, listed.pairs(inputs.query.shape[1], inputs.key.shape[1]), inputs)
            out, lse, _ = dense_engine.attend(inputs, controls, settings, pattern)
        else:
            if not isinstance(pattern, Full):
                settings = dataclasses.replace(settings, pattern=pattern)
            if self.implementation is None:
                kernels.only_tiled(f"the tiles of {self._name} depend on data")
            out, lse = listed_tiles.attend(inputs, controls, settings, listed)
        return merge_heads(out), merge_heads(lse)

    @property
    def reads_trees(self) -> bool:
        return self.position is not None and self.position.reads_trees

    @property
    def _by_position(self) -> bool:
        """Whether nothing but positions decides which pairs attend: neither what keys hold nor a subclass's own way."""
        alike = (getattr(type(self), name) is getattr(PatternAttention, name) for name in ("attend", "listed_tiles"))
        return self.PAIRS_BY_POSITION and all(alike)

    def reads_cached(self, num_queries: int) -> bool:
        tiled = self.implementation in (None, "xla") and (self.position is None or self.position.by_distance)
        return self._by_position and self.causal and tiled and num_queries <= few_queries.MOST_QUERIES

    def attend_cached(
        self,
        query: Array,
        parts: Sequence[CachedKeys],
        q_positions: Array,
        *,
        kv_len: int,
        params: Params | None = None,
    ) -> Array:
        if not self.reads_cached(query.shape[1]):
            return super().attend_cached(query, parts, q_positions, kv_len=kv_len, params=params)
        batch, q_len, num_heads, head_dim = query.shape
        for end in (self.num_positions(kv_len), None if self.position is None else self.position.num_positions):
            if end is not None:
                within = (q_positions >= 0) & (q_positions < end)
                query = jnp.where(within[:, :, None, None], query, jnp.asarray(jnp.nan, query.dtype))
        if self.position is not None and self.position.turns:
            query = self.position.rotate(query, q_positions)
            turn = functools.partial(few_queries.turned, turn=self.position.rotate, batch=batch)
            parts = [turn(part) for part in parts]
        relative = self._relative(params or {}, num_heads, kv_len)
        pattern = self._pattern(kv_len, num_heads)
        if len(parts) == 1 and parts[0].in_order and (relative is None or relative.value_table is None):
            parts = [keys_in_reach(parts[0], pattern, q_positions, batch, num_heads) or parts[0]]
        split = query.reshape(batch, q_len, parts[0].key.shape[0] // batch, -1, head_dim)
        out = few_queries.attend(split, parts, q_positions, pattern, relative, head_dim**-0.5)
        return out.astype(query.dtype)

    def turned(self) -> tuple[Callable[[Array, Array], Array] | None, Attention]:
        position = self.position
        if position is None or not (position.only_turns and self._by_position):
            return None, self
        return position.rotate, dataclasses.replace(self, position=None)

    def pattern_of(
        self,
        query: Array,
        key: Array,
        *,
        mask: Array | None = None,
        is_causal: bool = False,
        segment_ids: Array | tuple[Array, Array] | None = None,
    ) -> Array:
        options = Options(mask=mask, is_causal=is_causal, segment_ids=segment_ids)
        op, call = self._prepare(query, key, key, options)
        assert isinstance(op, PatternAttention)
        (q_len, kv_len), num_heads = call.lengths, call.query.shape[2]
        pairs = jnp.asarray(dense(op._pattern(kv_len, num_heads), q_len, kv_len))[None]
        listed = op.listed_tiles(call)
        if listed is not None:
            pairs = pairs & listed.pairs(q_len, kv_len)
        pairs = jnp.broadcast_to(pairs, (call.batch, *pairs.shape[1:]))
        return pairs.reshape(*call.batch_shape, *pairs.shape[1:])

    def weights(self, call: Call, params: Params) -> Array:
        inputs, controls, settings, pattern = self._split(call, params)
        if controls.plan is not None:
            controls = with_pairs(controls, layer_plans.pairs(controls.plan, *call.lengths)[None], inputs)
            pattern = Full()
        listed = self.listed_tiles(call)
        if listed is not None:
            controls = with_pairs(controls, listed.pairs(*call.lengths), inputs)
        weights = dense_engine.attend(inputs, controls, settings, pattern).weights
        return weights.reshape(weights.shape[0], -1, *weights.shape[3:])

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
        return layer_plans.stacked(self, tiles, shape, num_layers)

    def cost(self, shape: Shape, *, positions: bool = False) -> Cost:
        """What a plain call of this shape costs; with `positions`, one in which they are given."""
        if positions and "positions" in self.REFUSES:
            raise NotImplementedError(f"{self._name} cannot honour positions: {self.REFUSES['positions']}")
        q_len, kv_len, depths = shape.q_len, shape.kv_len, (shape.head_dim, shape.value_depth)
        params = jax.eval_shape(lambda: self.init(jax.random.key(0), shape))
        relative = jax.eval_shape(lambda p: self._relative(p, shape.num_heads, kv_len), params)
        listed = self._listed_plan(shape)
        if listed is not None:
            tiled = self.implementation != "reference"
            flops = (
                tiled_flops(listed, q_len, *depths, relative)
                if tiled
                else dense_flops(q_len, kv_len, *depths, relative)
            )
            return call_cost(shape, shape.batch * shape.num_heads * flops + self.listing_flops(shape), params)
        implementation = self._implementation(shape, relative, positions)
        if implementation in kernels.KERNELS:
            pattern = self._pattern(kv_len, shape.num_heads)
            flops = kernels.KERNELS[implementation].flops(pattern, q_len, kv_len, shape.head_dim)
        elif implementation == "reference":
            flops = dense_flops(q_len, kv_len, *depths, relative)
        else:
            known = self.knows_offset(q_len, kv_len)
            sizes = q_len, kv_len, shape.num_heads
            plan = (
                self._tiles(Full(), *sizes, None)
                if positions
                else self.tile_plan(*sizes, query_offset=0 if known else None)
            )
            flops = tiled_flops(plan, q_len, *depths, relative, by_position=positions)
        return call_cost(shape, shape.batch * shape.num_heads * flops, params)

    def _listed_plan(self, shape: Shape) -> TilePlan | None:
        """One example's plan of a variant that lists tiles, with shapes for arrays."""
        array = lambda *sizes: jax.ShapeDtypeStruct((1, *sizes), jnp.float32)
        query, key = (
            array(shape.q_len, shape.num_heads, shape.head_dim),
            array(shape.kv_len, shape.kv_heads, shape.head_dim),
        )
        sizes = shape.q_len, shape.kv_len, shape.num_heads

        def plan(query: Array, key: Array) -> TilePlan | None:
            offset = None if self.knows_offset(shape.q_len, shape.kv_len) else jnp.zeros((), jnp.int32)
            listed = self.listed_tiles(normalize(query, key, key, Options(query_offset=offset)))
            return None if listed is None else jax.tree.map(lambda x: x[0], listed).plan(*sizes)

        return jax.eval_shape(plan, query, key)

    def tile_plan(self, q_len: int, kv_len: int, num_heads: int, *, query_offset: int | None = 0) -> TilePlan:
        """The tiles that the engine visits.

        Where the offset is known only at run time (None) the plan has shapes for arrays. It lists as many tiles around
        each query tile as that needs wherever it stands, if the pattern bounds what a query sees, and all of them else.
        """
        plan = functools.partial(self._tiles, self._pattern(kv_len, num_heads), q_len, kv_len, num_heads)
        if query_offset is None:
            return jax.eval_shape(plan, jax.ShapeDtypeStruct((), jnp.int32))
        return plan(query_offset)

    def _tiles(
        self, pattern: Pattern, q_len: int, kv_len: int, num_heads: int, query_offset: int | Array | None = 0
    ) -> TilePlan:
        terms: dict[str, Any] = {}
        if self.position is not None:
            terms = {
                "num_embeddings": self.position.num_embeddings,
                "constant_beyond": self.position.constant_beyond,
            }
        block = self.block(kv_len)
        return plan_tiles(pattern, q_len, kv_len, num_heads, block=block, query_offset=query_offset, **terms)

    # What the implementations are given.

    def _implementation(self, shape: Shape, relative: Any, positions: bool) -> str:
        """What runs a plain call of this shape in float32 (in bfloat16 for cuDNN, which knows no other)."""
        dtype = jnp.bfloat16 if self.implementation == "cudnn" else jnp.float32
        array = lambda *sizes: jax.ShapeDtypeStruct((shape.batch, *sizes), dtype)
        query = array(shape.q_len, shape.kv_heads, shape.num_heads // shape.kv_heads, shape.head_dim)
        key, value = (array(shape.kv_len, shape.kv_heads, depth) for depth in (shape.head_dim, shape.value_depth))
        inputs = Inputs(query, key, value, None, relative)  # type: ignore
        pattern = self._pattern(shape.kv_len, shape.num_heads)
        controls = Controls(None, q_positions=query if positions else None)  # type: ignore
        return kernels.choose(self.implementation, inputs, controls, Settings(1.0), pattern, anywhere=True)

    def _pattern(self, kv_len: int, num_heads: int) -> Pattern:
        pattern = self.token_pattern(kv_len, num_heads)
        if not self.causal:
            return pattern
        return Causal() if isinstance(pattern, Full) else pattern & Causal()

    def _relative(self, params: Params, num_heads: int, kv_len: int) -> Relative | None:
        if self.position is None:
            return None
        own = jax.tree.map(exact, params.get("position", {}))  # shared by all: gradients are summed in float32
        return self.position.relative(own, num_heads=num_heads, causal=self.causal, kv_len=kv_len)

    def _split(self, call: Call, params: Params) -> tuple[Inputs, Controls, Settings, Pattern]:
        """The call as the engine has it: heads split, queries and keys rotated, the plan checked."""
        (q_len, kv_len), num_heads = call.lengths, call.query.shape[2]
        self.check_params(params, call)
        if self.reads_trees and call.q_paths is None and call.distances is None:
            raise ValueError(f"{self.position} needs the trees of the tokens: give paths or distances, got neither")
        offset: int | Array = 0
        query, key, relative = call.query, call.key, None
        if call.q_positions is not None and call.kv_positions is not None:
            query, key = self._at_positions(call)
            relative = self._relative(params, num_heads, 1)  # lengths say nothing of distances
        elif self.POSITIONAL or self.causal or self.position is not None:
            offset = call.offset(self._name)
            query = self._within_positions(query, offset, kv_len)
            if self.position is not None:
                query = self.position.rotate(query, offset + jnp.arange(q_len))
                key = self.position.rotate(key, jnp.arange(kv_len))
                relative = self._relative(params, num_heads, kv_len)
        inputs, controls, settings = split_heads(call, query, key, call.value)
        if call.plan is not None:
            controls = controls._replace(plan=layer_plans.tiles_of(call.plan, self, q_len, kv_len, num_heads))
        inputs = inputs._replace(relative=relative)
        return inputs, controls._replace(offset=offset), settings, self._pattern(kv_len, num_heads)

    def _at_positions(self, call: Call) -> tuple[Array, Array]:
        """Queries and keys at the positions that were given, rotated; NaN beyond the last position of the term."""
        query, key, position = call.query, call.key, self.position
        q_positions, kv_positions = call.q_positions, call.kv_positions
        assert q_positions is not None and kv_positions is not None
        if position is None:
            return query, key
        if position.num_positions is not None:
            last = position.num_positions - 1
            if call.position_range is not None and not 0 <= call.position_range[0] <= call.position_range[1] <= last:
                reach = " to ".join(map(str, call.position_range))
                raise ValueError(f"{position} has positions 0 to {last}: those given reach from {reach}")
            known = lambda x: ((x >= 0) & (x <= last))[:, :, None, None]
            query = jnp.where(known(q_positions), query, jnp.asarray(jnp.nan, query.dtype))
            key = jnp.where(known(kv_positions), key, jnp.asarray(jnp.nan, key.dtype))
        return position.rotate(query, q_positions), position.rotate(key, kv_positions)

    def _within_positions(self, query: Array, offset: int | Array, kv_len: int) -> Array:
        """The queries, NaN where they stand beyond the last position. ValueError where that is known when tracing."""
        q_len = query.shape[1]
        ends = [(self._name, self.num_positions(kv_len))]
        if self.position is not None:
            ends.append((repr(self.position), self.position.num_positions))
        for name, num_positions in ends:
            if num_positions is None:
                continue
            if isinstance(offset, int):
                if offset + q_len > num_positions:
                    raise ValueError(
                        f"{name} has positions 0 to {num_positions - 1}: query_offset {offset} and q_len {q_len} reach "
                        f"{offset + q_len - 1}"
                    )
                continue
            positions = offset + jnp.arange(q_len)
            known = (positions >= 0) & (positions < num_positions)
            query = jnp.where(known[None, :, None, None], query, jnp.asarray(jnp.nan, query.dtype))
        return query
