"""Memory-compressed attention: keys and values shortened by a strided convolution (Liu et al. 2018, section 4.2.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from xformer.attention import slots
from xformer.attention.call import Call
from xformer.attention.cost import Cost, call_cost
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.full import Full
from xformer.attention.interface import Attention
from xformer.attention.pattern import Pattern, Tiles
from xformer.attention.pattern_attention import PatternAttention
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.attention.spans import Spans
from xformer.checks import check_integer

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Compressed(Attention):
    """Queries attend to one slot for every `stride` tokens, made by a convolution as wide as its stride.

    In the paper its layers take turns with local ones: `{"name": "layers", "layers": ({"name": "local"}, {"name":
    "compressed"})}` describes such a stack. Here every key head has a kernel of its own, since an attention op is given
    heads; slots start at position 0, and the last one may reach past the end.

    Padded keys and values are zeroed before the convolution, and a slot without a real token is not attended. With
    `causal` a query sees the slots whose last token is at or before its own position: the first `stride - 1` queries
    see none, and have zeros for output. Slots mix tokens, so biases, segments, relative positions and masks that depend
    on the query cannot be honoured.

    Parameters: `key` and `value`, float32 `[num_kv_heads, stride, depth, depth]` (in, out), of their depths.

    Attributes:
      stride: tokens of a slot, 3 in the paper.
    """

    REFUSES: ClassVar[Mapping[str, str]] = slots.REFUSES

    stride: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("Compressed.stride", self.stride)

    def init(self, rng: Array, shape: Shape) -> Params:
        def draw(rng: Array, depth: int) -> Array:
            return (self.stride * depth) ** -0.5 * jax.random.normal(rng, (shape.kv_heads, self.stride, depth, depth))

        of_keys, of_values = jax.random.split(rng)
        return {"key": draw(of_keys, shape.head_dim), "value": draw(of_values, shape.value_depth)}

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> None:
        return None

    def attend(self, call: Call, params: Params) -> Array:
        offset = call.offset("Compressed") if self.causal else None
        real, key, value = slots.without_padding("Compressed", call)
        self.check_params(params, call)
        kernels = slots.for_heads(params, key.shape[2])
        key, value = (slots.convolve(x, kernels[name], call.precision) for name, x in (("key", key), ("value", value)))
        mask = slots.as_mask(slots.windows(real, self.stride).any(2))
        query = call.query.astype(key.dtype)
        call = dataclasses.replace(call, query=query, key=key, value=value, mask=mask, query_offset=offset)
        return self._over_slots().attend(call, {})

    def _over_slots(self) -> PatternAttention:
        if self.causal:
            return CompleteSlots(self.stride, implementation=self.implementation)
        return Full(implementation=self.implementation)

    def cost(self, shape: Shape) -> Cost:
        num_slots, depths = ceil_div(shape.kv_len, self.stride), (shape.head_dim, shape.value_depth)
        flops = 2 * shape.batch * shape.kv_heads * num_slots * self.stride * sum(depth**2 for depth in depths)
        inner = self._over_slots().cost(dataclasses.replace(shape, kv_len=num_slots))
        return call_cost(shape, flops + inner.flops, jax.eval_shape(lambda: self.init(jax.random.key(0), shape)))


@dataclasses.dataclass(frozen=True)
class CompleteSlots(PatternAttention):
    """Attention over slots of `stride` tokens each: a query sees those that end at or before its own position."""

    stride: int = 1

    def token_pattern(self, kv_len: int, num_heads: int) -> Pattern:
        return Complete(self.stride)

    def knows_offset(self, q_len: int, kv_len: int) -> bool:
        return ceil_div(q_len, self.stride) == kv_len


@dataclasses.dataclass(frozen=True)
class Complete(Pattern):
    """Keys that stand for `unit` tokens each, whose last token is at or before the query."""

    unit: int

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        key = k_positions.reshape(-1, 1, k_positions.shape[-1])
        return key < (q_positions[None, :, None] + 1) // self.unit

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        last = lambda query: (query + 1) // self.unit - 1
        return Spans.of((0, last(q_last))), Spans.of((0, last(q_first)))

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        distance = tiles.k_first * self.unit - tiles.q_first
        return [np.clip(distance, -tiles.kv_block * self.unit, tiles.q_block)]
