"""FLOPs of the chunked sums, in closed form: what `attend` and `dense` execute for a plain call."""

from __future__ import annotations

from xformer.attention.engine.tile_plan import round_up
from xformer.attention.shape import Shape
from xformer.attention.state.attend import CHUNK, LONG_CHUNK
from xformer.attention.state.features import PositiveRandom
from xformer.attention.state.operands import Settings


def chunked_flops(settings: Settings, shape: Shape, *, kv_heads: int, groups: int, is_ordered: bool, along: bool) -> int:
    """FLOPs of `state.attend.attend`; `along`: queries go along with the keys, none enters the state before."""
    size, depth, features = settings.features.size(shape.head_dim), shape.value_depth, settings.features.flops(shape.head_dim)
    enter, read = features + 2 * size * depth, groups * (features + 2 * size * depth)
    padded = lambda length, chunk: round_up(length, min(chunk, length))
    total = 0
    if isinstance(settings.features, PositiveRandom) and not settings.causal:
        total += padded(shape.kv_len, LONG_CHUNK) * features
    if not is_ordered:
        total += padded(shape.kv_len, LONG_CHUNK) * enter + padded(shape.q_len, LONG_CHUNK) * read
        return shape.batch * kv_heads * total
    chunk = min(CHUNK, shape.q_len)
    loop = padded(shape.q_len, CHUNK) * (enter + read)
    loop += 0 if along else padded(shape.kv_len, LONG_CHUNK) * enter
    pairs = padded(shape.q_len, CHUNK) * groups * 2 * chunk * (size + depth)
    total += pairs + (1 if settings.causal else 2) * loop
    return shape.batch * kv_heads * total


def dense_flops(settings: Settings, shape: Shape, *, kv_heads: int, groups: int) -> int:
    """FLOPs of `state.dense.attend`."""
    size, features = settings.features.size(shape.head_dim), settings.features.flops(shape.head_dim)
    pairs = groups * shape.q_len * shape.kv_len * 2 * (size + shape.value_depth)
    total = pairs + features * (groups * shape.q_len + shape.kv_len)
    if isinstance(settings.features, PositiveRandom) and not settings.causal:
        total += features * round_up(shape.kv_len, min(LONG_CHUNK, shape.kv_len))
    return shape.batch * kv_heads * total
