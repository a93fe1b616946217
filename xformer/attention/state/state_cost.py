"""FLOPs of the chunked sums, in closed form: what `attend` and `dense` execute for a plain call."""

from __future__ import annotations

from xformer.attention.engine.tile_plan import round_up
from xformer.attention.kernels import running_state
from xformer.attention.shape import Shape
from xformer.attention.state import attend as engine
from xformer.attention.state.features import PositiveRandom
from xformer.attention.state.operands import Controls, Settings


def chunked_flops(settings: Settings, shape: Shape, *, kv_heads: int, groups: int) -> int:
    """FLOPs of `state.attend.attend`; fewer queries than keys stand anywhere among them."""
    size, features, depth = sizes(settings, shape)
    enter, read = features + 2 * size * depth, groups * (features + 2 * size * depth)
    padded = lambda length, chunk: round_up(length, min(chunk, length))
    total = 0
    if not engine.ordered(settings, Controls()):
        total += features * _exponents(settings, shape)
        total += padded(shape.kv_len, engine.LONG_CHUNK) * enter + padded(shape.q_len, engine.LONG_CHUNK) * read
        return shape.batch * kv_heads * total
    chunk = min(engine.CHUNK, shape.q_len)
    loop = padded(shape.q_len, engine.CHUNK) * (enter + read)
    loop += 0 if shape.q_len == shape.kv_len else padded(shape.kv_len, engine.LONG_CHUNK) * enter
    pairs = padded(shape.q_len, engine.CHUNK) * groups * 2 * chunk * (size + depth)
    total += pairs + (1 if settings.causal else 2) * loop
    return shape.batch * kv_heads * total


def kernel_flops(settings: Settings, shape: Shape, *, kv_heads: int, groups: int) -> int:
    """FLOPs of `kernels.running_state.attend`, for as many queries as keys."""
    size, features, depth = sizes(settings, shape)
    of_features = shape.batch * kv_heads * features * (groups * shape.q_len + shape.kv_len)
    products = running_state.kernel_flops(settings, shape.batch, shape.kv_len, kv_heads, groups, size, depth)
    return of_features + products


def dense_flops(settings: Settings, shape: Shape, *, kv_heads: int, groups: int) -> int:
    """FLOPs of `state.dense.attend`."""
    size, features, depth = sizes(settings, shape)
    pairs = groups * shape.q_len * shape.kv_len * 2 * (size + depth)
    total = pairs + features * (groups * shape.q_len + shape.kv_len + _exponents(settings, shape))
    return shape.batch * kv_heads * total


def sizes(settings: Settings, shape: Shape) -> tuple[int, int, int]:
    """Features, FLOPs of those of one vector, depth of the values."""
    return settings.features.size(shape.head_dim), settings.features.flops(shape.head_dim), shape.value_depth


def _exponents(settings: Settings, shape: Shape) -> int:
    """Keys that a pass over the exponents looks at before the features are made."""
    if engine.ordered(settings, Controls()) or not isinstance(settings.features, PositiveRandom):
        return 0
    return round_up(shape.kv_len, min(engine.LONG_CHUNK, shape.kv_len))
