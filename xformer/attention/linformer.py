"""Linformer: keys and values projected along the length (Wang et al. 2020, section 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

import jax
import jax.numpy as jnp

from xformer.attention import slots
from xformer.attention.call import Call
from xformer.attention.cost import Cost, call_cost
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.full import Full
from xformer.attention.interface import Attention
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.checks import check_integer

Array = jax.Array
Sharing = Literal["none", "headwise", "key_value"]
Projection = Literal["learned", "mean", "conv"]


@dataclasses.dataclass(frozen=True)
class Linformer(Attention):
    """Queries attend to `rank` slots, projections E K and F V of the keys and values (equation 7).

    Padded keys and values are zeroed before the projection. Pooling windows are `ceil(max_len / rank)` tokens wide
    whatever the length; a slot whose window holds no real token is not attended. Slots mix the whole length, so there
    are no token pairs: causal attention, biases, segments, relative positions and masks that depend on the query
    cannot be honoured.

    Parameters, with `heads` = num_kv_heads without sharing and 1 otherwise: `key` and `value`, or just `shared` with
    `sharing="key_value"`; float32 `[heads, rank, max_len]` (learned; a shorter input uses its first columns) or
    `[heads, window, head_dim, head_dim]` (conv; in, out; that of values has their depth). "mean" has none.

    Attributes:
      rank: slots, k of the paper.
      max_len: the longest input, in tokens.
      sharing: "none": a projection for each head, for keys and for values; "headwise": one for all heads; "key_value":
        the same one for keys and values too (section 4, "parameter sharing"). For layerwise sharing, give one
        `xformer.nn.AttentionFn` to every layer.
      projection: "learned": any linear map; "mean": the mean of a window's real tokens; "conv": a convolution as wide
        as its stride (section 4, "general projections").
    """

    REFUSES: ClassVar[Mapping[str, str]] = slots.REFUSES

    rank: int = 256
    max_len: int = 1024
    sharing: Sharing = "none"
    projection: Projection = "learned"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank", "max_len"):
            check_integer(f"Linformer.{name}", getattr(self, name))
        if self.rank > self.max_len:
            raise ValueError(f"Linformer.rank must be at most max_len {self.max_len}, got {self.rank}")
        for name, choices in (("sharing", get_args(Sharing)), ("projection", get_args(Projection))):
            if getattr(self, name) not in choices:
                raise ValueError(f"Linformer.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.causal:
            raise NotImplementedError(
                "Linformer.causal must be False: Linformer cannot be causal, every slot mixes the whole length, future "
                "included"
            )

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """A quarter as many slots as positions, at most 256, and one projection for all heads, keys and values.

        `max_len` is the number of positions; a learned projection for each head would have as many parameters as the
        rest of a small model.
        """
        max_len = overrides.get("max_len", num_positions)
        rank = min(max(max_len // 4, 1), 256) if isinstance(max_len, int) else 1  # the constructor refuses the others
        return cls(**{"max_len": max_len, "rank": rank, "sharing": "key_value", **overrides})

    @property
    def window(self) -> int:
        """Tokens that a slot pools, for "mean" and "conv"."""
        return ceil_div(self.max_len, self.rank)

    def init(self, rng: Array, shape: Shape) -> Params:
        if self.projection == "mean":
            return {}
        heads = shape.kv_heads if self.sharing == "none" else 1
        depths = {"key": shape.head_dim, "value": shape.value_depth}
        if self.sharing == "key_value":
            if self.projection == "conv" and shape.value_depth != shape.head_dim:
                raise NotImplementedError(
                    'Linformer(sharing="key_value", projection="conv") cannot honour values of depth '
                    f"{shape.value_depth} beside keys of depth {shape.head_dim}: one kernel projects both"
                )
            depths = {"shared": shape.head_dim}

        def draw(rng: Array, depth: int) -> Array:
            if self.projection == "learned":
                return self.max_len**-0.5 * jax.random.normal(rng, (heads, self.rank, self.max_len))
            fan_in = self.window * depth
            return fan_in**-0.5 * jax.random.normal(rng, (heads, self.window, depth, depth))

        rngs = jax.random.split(rng, len(depths))
        return {name: draw(rng, depth) for rng, (name, depth) in zip(rngs, depths.items(), strict=True)}

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> None:
        return None

    def attend(self, call: Call, params: Params) -> Array:
        kv_len = call.lengths[1]
        if kv_len > self.max_len:
            raise ValueError(f"Linformer(max_len={self.max_len}) takes at most that many keys, got {kv_len}")
        real, key, value = slots.without_padding("Linformer", call)
        self.check_params(params, call)
        params = slots.for_heads(params, key.shape[2]) if real.shape[2] > 1 else params
        kernels = [params.get("shared", params.get(name)) for name in ("key", "value")]
        key, value = (self._project(x, w, real, call.precision) for x, w in zip((key, value), kernels, strict=True))
        mask = slots.as_mask(self._slots(real, key.shape[1]))
        query = call.query.astype(key.dtype)
        slot_call = dataclasses.replace(call, query=query, key=key, value=value, mask=mask)
        return Full(implementation=self.implementation).attend(slot_call, {})

    def _project(self, x: Array, kernel: Array | None, real: Array, precision: Any) -> Array:
        """`[batch, kv_len, heads, head_dim]` -> `[batch, slots, heads, head_dim]`."""
        if self.projection == "mean":
            count = slots.windows(real, self.window).sum(2)[..., None]
            return slots.windows(x, self.window).sum(2) / jnp.maximum(count, 1).astype(x.dtype)
        assert kernel is not None
        if self.projection == "conv":
            return slots.convolve(x, kernel, precision)
        kernel = kernel[:, :, : x.shape[1]].astype(x.dtype)
        if kernel.shape[0] == 1:
            return jnp.einsum("bshd,rs->brhd", x, kernel[0], precision=precision)
        return jnp.einsum("bshd,hrs->brhd", x, kernel, precision=precision)

    def _slots(self, real: Array, num_slots: int) -> Array:
        """Which slots hold a real token, bool `[batch or 1, slots, heads or 1]`."""
        if self.projection == "learned":
            return jnp.broadcast_to(real.any(1, keepdims=True), (real.shape[0], num_slots, real.shape[2]))
        return slots.windows(real, self.window).any(2)

    def cost(self, shape: Shape) -> Cost:
        if shape.kv_len > self.max_len:
            raise ValueError(f"Linformer(max_len={self.max_len}) takes at most that many keys, got {shape.kv_len}")
        num_slots, products, depths = self.rank, 0, (shape.head_dim, shape.value_depth)
        if self.projection == "learned":
            products = shape.kv_len * self.rank * sum(depths)
        else:
            num_slots = ceil_div(shape.kv_len, self.window)
            if self.projection == "conv":
                products = num_slots * self.window * sum(depth**2 for depth in depths)
        flops = 2 * shape.batch * shape.kv_heads * products
        inner = Full(implementation=self.implementation).cost(dataclasses.replace(shape, kv_len=num_slots))
        params = jax.eval_shape(lambda: self.init(jax.random.key(0), shape))
        return call_cost(shape, flops + inner.flops, params)
