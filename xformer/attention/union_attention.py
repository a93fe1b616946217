"""Base of the variants that are a union of parts: each a pattern in an order of the tokens that makes it compact."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention import kernels
from xformer.attention.call import Call
from xformer.attention.cost import Cost, call_cost
from xformer.attention.engine import attend as engine
from xformer.attention.engine import sequence_parallel
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.query_tile import merge_heads
from xformer.attention.engine.relative_tiles import Relative
from xformer.attention.engine.tile_cost import tiled_flops
from xformer.attention.engine.tile_plan import TilePlan, ceil_div, round_up
from xformer.attention.engine.tile_policy import MAX_TILE, even_block, plan_tiles, tile_of_window
from xformer.attention.merge_parts import merge_parts
from xformer.attention.pattern import Pattern
from xformer.attention.pattern_attention import PatternAttention
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.attention.token_order import Classes, First, Order

Array = jax.Array


class Part(NamedTuple):
    """Pairs of the queries and keys of two orders.

    Attributes:
      pattern: which pairs, of places in the orders. No pair is in two parts of a head.
      queries: the order of the queries: one that has them all, or `First`.
      keys: the order of the keys.
      block: tile size that suits the pattern, in places; None where large tiles do.
    """

    pattern: Pattern
    queries: Order = Order()
    keys: Order = Order()
    block: int | None = None

    @property
    def step(self) -> int | None:
        """What distances of places are to be multiplied by to be those of positions; None where that is no constant."""
        return self.queries.step if self.queries.step == self.keys.step else None


class HeadParts(NamedTuple):
    """The parts of some heads; the first has every query.

    Attributes:
      heads: their indices; None for all.
      parts: the parts.
    """

    heads: tuple[int, ...] | None
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class UnionAttention(PatternAttention):
    """Attention over a union of disjoint parts, merged by their log-sum-exp.

    `token_pattern` says what the union is in the order of positions. Where queries and keys are the same tokens in
    order, from position 0 on, the tiled engine attends to part after part. It visits the union's tiles in the order of
    positions, for the same numbers at a higher cost, where queries start elsewhere (as in decoding) or have other
    lengths than keys, where positions are given, and where devices share out the length (dropout then draws
    another mask); so do accelerator kernels.
    """

    def parts(self, length: int, num_heads: int) -> tuple[HeadParts, ...]:
        """The parts, for heads in groups that together hold each head once."""
        raise NotImplementedError

    def _attend(self, call: Call, params: Params, *, with_lse: bool) -> tuple[Array, Array | None]:
        inputs, controls, settings, pattern = self._split(call, params)
        alike = controls.offset if isinstance(controls.offset, int) else None, inputs.key.shape[1]
        if alike != (0, inputs.query.shape[1]) or controls.q_positions is not None or controls.plan is not None:
            return super()._attend(call, params, with_lse=with_lse)
        chosen = kernels.choose(self.implementation, inputs, controls, settings, pattern, with_lse=with_lse)
        if chosen != "xla" or sequence_parallel.num_shards() > 1:
            return super()._attend(call, params, with_lse=with_lse)
        return self._attend_parts(inputs, controls, settings)

    def _attend_parts(self, inputs: Inputs, controls: Controls, settings: Settings) -> tuple[Array, Array]:
        length, num_heads = inputs.query.shape[1], inputs.query.shape[2] * inputs.query.shape[3]
        groups, number, outs = self.parts(length, num_heads), 0, []
        for heads, parts in groups:
            own, of_heads = (inputs, controls) if heads is None else of_some_heads(inputs, controls, heads)
            results: list[tuple[Array, Array]] = []
            for part in parts:
                one = own if not results else own._replace(sinks=None)
                rng = controls.dropout_rng
                rng = rng if rng is None else jax.random.fold_in(rng, number)
                results.append(self._attend_part(part, one, of_heads._replace(dropout_rng=rng), settings))
                number += 1
            outs.append(_merged(parts, results))
        if len(outs) == 1:
            return outs[0]
        # In the order of heads.
        order = jnp.argsort(jnp.asarray([head for heads, _ in groups for head in heads or ()]))
        out, lse = (jnp.take(jnp.concatenate(x, 2), order, axis=2) for x in zip(*outs, strict=True))
        return out, lse

    def _attend_part(self, part: Part, inputs: Inputs, controls: Controls, settings: Settings) -> tuple[Array, Array]:
        """Output and log-sum-exp of a part's queries, in order of position, `[batch, queries, heads, ...]`."""
        length, num_heads = inputs.query.shape[1], inputs.query.shape[2] * inputs.query.shape[3]
        plan = self._part_plan(part, length, num_heads)
        relative = inputs.relative
        step = part.step if relative is None or relative.entries_of is None else None
        inputs, controls = in_order(part, inputs), controls_in_order(part, controls)
        if relative is not None and step is None:
            positions = part.queries.positions(length), part.keys.positions(length)
            q_positions, kv_positions = (jnp.asarray(x) for x in positions)
            controls = controls._replace(
                q_positions=q_positions[None, None, None, :, None], kv_positions=kv_positions[None, None, None, None]
            )
        inputs = inputs._replace(relative=strided(relative, step))
        out, lse = engine.attend(inputs, controls._replace(plan=plan), settings)
        return tuple(part.queries.put(merge_heads(x), 1, length) for x in (out, lse))  # type: ignore[return-value]

    def _part_plan(self, part: Part, length: int, num_heads: int) -> TilePlan:
        terms: dict[str, Any] = {}
        if self.position is not None and part.step is not None:
            beyond = self.position.constant_beyond
            terms["num_embeddings"] = self.position.num_embeddings // part.step
            terms["constant_beyond"] = None if beyond is None else ceil_div(beyond, part.step)
        sizes = part.queries.length(length), part.keys.length(length)
        return plan_tiles(part.pattern, *sizes, num_heads, block=part.block, **terms)

    def cost(self, shape: Shape, *, positions: bool = False) -> Cost:
        params = jax.eval_shape(lambda: self.init(jax.random.key(0), shape))
        relative = jax.eval_shape(lambda p: self._relative(p, shape.num_heads, shape.kv_len), params)
        in_parts = not positions and shape.q_len == shape.kv_len and sequence_parallel.num_shards() == 1
        if not in_parts or self._implementation(shape, relative, positions) != "xla":
            return super().cost(shape, positions=positions)
        length, flops = shape.q_len, 0
        for heads, parts in self.parts(length, shape.num_heads):
            num_heads = shape.num_heads if heads is None else len(heads)
            for part in parts:
                plan, q_len = self._part_plan(part, length, num_heads), part.queries.length(length)
                terms = jax.eval_shape(lambda x, step=part.step: strided(x, step), relative)
                by_position = part.step is None
                depths = shape.head_dim, shape.value_depth
                flops += num_heads * tiled_flops(plan, q_len, *depths, terms, by_position=by_position)
        return call_cost(shape, shape.batch * flops, params)


def class_window(left: int, right: int, stride: int, length: int) -> tuple[Classes, int]:
    """The order in which a window dilated by `stride` is one, and the tile size that suits it there."""
    each = ceil_div(length, stride)
    block = tile_of_window(min(left, length) + min(right, length) + 1, each) or even_block(each, MAX_TILE[1])
    return Classes(stride, round_up(each, block)), block


def in_order(part: Part, inputs: Inputs) -> Inputs:
    """The inputs of a part, but for the position term."""
    return inputs._replace(
        query=part.queries.take(inputs.query, 1),
        key=part.keys.take(inputs.key, 1),
        value=part.keys.take(inputs.value, 1),
        bias=_pairs_in_order(part, inputs.bias),
        relative=None,
    )


def controls_in_order(part: Part, controls: Controls) -> Controls:
    """The controls of a part."""
    q_segments, kv_segments = controls.q_segments, controls.kv_segments
    return controls._replace(
        mask=_pairs_in_order(part, controls.mask),
        q_segments=None if q_segments is None else part.queries.take(q_segments, 3),
        kv_segments=None if kv_segments is None else part.keys.take(kv_segments, 4),
        q_paths=None if controls.q_paths is None else part.queries.take(controls.q_paths, 3),
        kv_paths=None if controls.kv_paths is None else part.keys.take(controls.kv_paths, 4),
        distances=_pairs_in_order(part, controls.distances),
    )


def _pairs_in_order(part: Part, x: Array | None) -> Array | None:
    if x is None:
        return None
    x = part.queries.take(x, 3) if x.shape[3] > 1 else x
    return part.keys.take(x, 4) if x.shape[4] > 1 else x


def strided(relative: Relative | None, step: int | None) -> Relative | None:
    """The term of tokens whose positions differ by `step` from one place to the next."""
    if relative is None or relative.entries_of is not None or step is None or step == 1:
        return relative
    radius = ceil_div(relative.radius, step)
    index = jnp.clip(jnp.arange(-radius, radius + 1) * step, -relative.radius, relative.radius) + relative.radius
    pick = lambda table: None if table is None else jnp.take(table, index, axis=1)
    slopes = None if relative.slopes is None else relative.slopes * step
    return Relative(pick(relative.key_table), pick(relative.value_table), pick(relative.bias_table), slopes, radius)


def of_some_heads(inputs: Inputs, controls: Controls, heads: Sequence[int]) -> tuple[Inputs, Controls]:
    """The call of some of its query heads."""
    kv_heads, groups = inputs.query.shape[2:4]
    of_keys = [head // groups for head in heads]
    used = sorted(set(of_keys))
    even = of_keys == [head for head in used for _ in range(len(of_keys) // len(used))]
    # Heads that do not share keys evenly have each its own.
    kv_index, split = (used, (len(used), len(of_keys) // len(used))) if even else (of_keys, (len(of_keys), 1))
    index = jnp.asarray(heads)

    def pick(x: Array | None, axis: int) -> Array | None:
        if x is None or x.shape[axis : axis + 2] == (1, 1) != (kv_heads, groups):
            return x
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        x = jnp.take(x, index, axis=axis)
        return x.reshape(*x.shape[:axis], *split, *x.shape[axis + 1 :])

    key, value = inputs.key, inputs.value
    if kv_index != list(range(kv_heads)):
        key, value = (jnp.take(x, jnp.asarray(kv_index), axis=2) for x in (key, value))
    # Tables `[heads or 1, ...]`.
    of_head = lambda x: x if x.shape[0] == 1 else jnp.take(x, index, axis=0)
    relative = jax.tree.map(of_head, inputs.relative)
    query: Any = pick(inputs.query, 2)
    inputs = Inputs(query, key, value, pick(inputs.bias, 1), relative, pick(inputs.sinks, 0))
    return inputs, controls._replace(mask=pick(controls.mask, 1))


def _merged(parts: Sequence[Part], results: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The union's output and log-sum-exp; parts of the first queries only are merged there."""
    every = [result for part, result in zip(parts, results, strict=True) if not isinstance(part.queries, First)]
    some = [result for part, result in zip(parts, results, strict=True) if isinstance(part.queries, First)]
    out, lse = merge_parts(every) if len(every) > 1 else every[0]
    for first_out, first_lse in some:
        count = first_out.shape[1]
        first = merge_parts([(out[:, :count], lse[:, :count]), (first_out, first_lse)])
        out, lse = (jnp.concatenate([new, old[:, count:]], 1) for new, old in zip(first, (out, lse), strict=True))
    return out, lse
