"""Nystrom attention: a few landmarks stand between queries and keys (Xiong et al. 2021)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from xformer.attention import slots
from xformer.attention.call import Call
from xformer.attention.cost import Cost, call_cost
from xformer.attention.engine.dense import softmax
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.full import Full
from xformer.attention.interface import Attention
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.checks import check_integer

Array = jax.Array
LEAST_TILE, MOST_TILE = 32, 64  # positions of the convolution in one matrix product
SELF_ATTENTION = "its landmarks are means of all queries, which must stand at the same tokens as the keys"


@dataclasses.dataclass(frozen=True)
class Nystrom(Attention):
    """Softmax attention of rank `num_landmarks` for self-attention, by the Nystrom method (section 3, algorithm 1).

    `softmax(q K~^T) pinv(softmax(Q~ K~^T)) softmax(Q~ k^T) v`, with scaled scores, where the landmarks Q~ and K~ are
    the means of the queries and of the keys of `num_landmarks` segments. Segments share out each example's real tokens
    in order: token i of n is in segment `floor(i num_landmarks / n)`, so that padding changes nothing. With no more
    real tokens than landmarks each is one of its own, and the result is full attention's up to the pseudo-inverse.

    The pseudo-inverse is computed by `num_iterations` steps of `Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4`, from
    the transpose of A divided by its largest row sum (1) and its largest column sum, those of every example and head
    for itself. Segments mix the length: causal attention, biases, segments, relative positions and masks that depend on
    the query cannot be honoured. Queries and keys have equal lengths, and one mask says which of both are padding.
    Dropout acts on what the landmarks see of the tokens.

    Parameters: `conv`, float32 `[num_kv_heads, conv_size]`, with a `conv_size`; none otherwise.

    Attributes:
      num_landmarks: m of the paper.
      num_iterations: steps towards the pseudo-inverse.
      conv_size: width, in tokens, of a depthwise convolution of the values that is added to the output (the skip
        connection of figure 2): odd, one kernel for all dimensions of a head, zeros in place of padding. None or 0:
        no convolution.
    """

    REFUSES: ClassVar[Mapping[str, str]] = {**slots.REFUSES, "query_offset": SELF_ATTENTION}

    num_landmarks: int = 64
    num_iterations: int = 6
    conv_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_landmarks", "num_iterations"):
            check_integer(f"Nystrom.{name}", getattr(self, name))
        if self.conv_size is not None:
            check_integer("Nystrom.conv_size", self.conv_size, at_least=0)
        if self.conv_size and self.conv_size % 2 == 0:
            raise ValueError(f"Nystrom.conv_size must be odd (centred on the token), 0 or None, got {self.conv_size}")
        if self.causal:
            raise NotImplementedError(
                "Nystrom.causal must be False: Nystrom cannot be causal, its landmarks are means of segments and its "
                "pseudo-inverse mixes all of them, future included"
            )

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """A quarter as many landmarks as positions, at most 64."""
        return cls(**{"num_landmarks": min(max(num_positions // 4, 1), 64), **overrides})

    def init(self, rng: Array, shape: Shape) -> Params:
        if not self.conv_size:
            return {}
        return {"conv": self.conv_size**-0.5 * jax.random.normal(rng, (shape.kv_heads, self.conv_size))}

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> None:
        return None

    def attend(self, call: Call, params: Params) -> Array:
        q_len, kv_len = call.lengths
        if q_len != kv_len:
            raise ValueError(
                f"Nystrom needs queries and keys of one length, got {q_len} and {kv_len}: {SELF_ATTENTION}"
            )
        real, key, value = slots.without_padding("Nystrom", call)
        self.check_params(params, call)
        query = call.query.astype(key.dtype) * call.scale
        if call.head_scale is not None:
            query = query * call.head_scale[None, None, :, None]
        num_heads, precision = query.shape[2], call.precision
        call = dataclasses.replace(call, scale=1.0, head_scale=None)
        every_head = lambda x: jnp.repeat(x, num_heads // x.shape[2], axis=2)
        full = Full(implementation=self.implementation)

        shares, exists = self._segments(real, key.dtype)
        q_marks = jnp.einsum("bnhm,bnhd->bmhd", shares, jnp.where(real[..., None], query, 0), precision=precision)
        k_marks = every_head(jnp.einsum("bnhm,bnhd->bmhd", shares, key, precision=precision))
        pairs = exists[:, :, :, None] & exists[:, :, None]
        scores = jnp.einsum("bmhd,bnhd->bhmn", q_marks, k_marks, precision=precision)
        inverse = pseudo_inverse(softmax(scores, pairs)[0], self.num_iterations)

        seen = full.attend(dataclasses.replace(call, query=q_marks, key=key, value=value), {})
        seen = jnp.einsum("bhmn,bnhd->bmhd", inverse, seen, precision=precision)
        of_landmarks = dataclasses.replace(
            call, query=query, key=k_marks, value=seen, mask=exists[:, :, None], dropout_rate=0.0
        )
        out = full.attend(of_landmarks, {})
        if self.conv_size:
            kernel = slots.for_heads(params, value.shape[2])["conv"]
            out = out + every_head(depthwise_convolution(value, kernel, precision))
        return out

    def _segments(self, real: Array, dtype: Any) -> tuple[Array, Array]:
        """Each token's share in the mean of each segment `[batch or 1, kv_len, heads or 1, num_landmarks]`, and which
        segments have a token, bool `[batch or 1, heads or 1, num_landmarks]`.
        """
        count = real.sum(1, keepdims=True)
        number = (jnp.cumsum(real, axis=1) - 1) * self.num_landmarks // jnp.maximum(count, 1)
        within = (number[..., None] == jnp.arange(self.num_landmarks)[None, None, None]) & real[..., None]
        size = within.sum(1, keepdims=True)
        return within.astype(dtype) / jnp.maximum(size, 1).astype(dtype), size[:, 0] > 0

    def cost(self, shape: Shape) -> Cost:
        m, depth, heads = self.num_landmarks, shape.head_dim, shape.batch * shape.num_heads
        flops = 2 * shape.batch * (shape.num_heads + shape.kv_heads) * shape.kv_len * m * depth  # means
        flops += 2 * heads * m * m * (depth + 4 * self.num_iterations * m + shape.value_depth)
        full = Full(implementation=self.implementation)
        flops += full.cost(dataclasses.replace(shape, q_len=m)).flops
        flops += full.cost(dataclasses.replace(shape, kv_len=m)).flops
        if self.conv_size:
            convolved = shape.batch * shape.kv_heads
            flops += convolution_flops(self.conv_size, shape.kv_len, convolved, shape.value_depth)
        return call_cost(shape, flops, jax.eval_shape(lambda: self.init(jax.random.key(0), shape)))


def pseudo_inverse(x: Array, num_iterations: int, norm: Array | None = None) -> Array:
    """The Moore-Penrose inverse of softmax matrices `[..., m, m]` by iteration (algorithm 1).

    Rows and columns of zeros stay so. Rounding errors grow with the iterations: products have the highest precision.
    `norm` `[]` is what the transpose is divided by at the start; None: the largest column sum of each matrix.
    """
    if norm is None:
        norm = x.sum(-2).max(-1)[..., None, None]  # the largest row sum is 1
    inverse = jnp.swapaxes(x, -1, -2) / jnp.where(norm == 0, jnp.ones_like(norm), norm)
    one = jnp.eye(x.shape[-1], dtype=x.dtype).reshape((1,) * (x.ndim - 2) + x.shape[-2:])
    times = lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    for _ in range(num_iterations):
        product = times(x, inverse)
        inner = 15 * one - times(product, 7 * one - product)
        inverse = times(inverse, 13 * one - times(product, inner)) / 4
    return inverse


def convolution_flops(size: int, length: int, heads: int, depth: int) -> int:
    """Of `depthwise_convolution`, with `heads` those of all examples together."""
    tile, num_bands = _bands(size)
    return 2 * heads * ceil_div(length, tile) * tile * num_bands * tile * depth


def depthwise_convolution(x: Array, kernel: Array, precision: Any = None) -> Array:
    """`x [batch, length, heads, depth]` with `kernel [heads, size]`, one kernel a head, centred; zeros beyond the ends.

    As products of tiles of `x` with banded matrices, several times as fast on a CPU as XLA's grouped convolution.
    """
    length, size = x.shape[1], kernel.shape[1]
    tile, num_bands = _bands(size)
    num_tiles = ceil_div(length, tile)
    total = (num_tiles + num_bands - 1) * tile
    x = jnp.pad(x, [(0, 0), (size // 2, total - length - size // 2), (0, 0), (0, 0)])
    tiles = x.reshape(x.shape[0], -1, tile, *x.shape[2:])
    tap = jnp.arange(num_bands * tile)[None] - jnp.arange(tile)[:, None]
    band = jnp.take(kernel.astype(x.dtype), jnp.clip(tap, 0, size - 1), axis=1)
    band = jnp.where(((tap >= 0) & (tap < size))[None], band, 0)
    bands = jnp.split(band, num_bands, axis=2)
    product = lambda band, first: jnp.einsum(
        "hij,bnjhd->bnihd", band, tiles[:, first : first + num_tiles], precision=precision
    )
    out = functools.reduce(jnp.add, (product(band, first) for first, band in enumerate(bands)))
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length]


def _bands(size: int) -> tuple[int, int]:
    """Positions of a tile, and how many tiles from its own on a tile's outputs are made of."""
    tile = min(max(size - 1, LEAST_TILE), MOST_TILE)
    return tile, 1 + ceil_div(size - 1, tile)
