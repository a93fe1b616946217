"""implementation="pallas": any pattern on GPUs, through `kernels.triton`, in memory linear in the length."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.tile_plan import round_up
from xformer.attention.kernels import tables
from xformer.attention.kernels.tile_lists import TileLists, make_tile_lists, num_tiles, unit
from xformer.attention.pattern import Pattern

Array = jax.Array
CUTS_ITSELF, TAKES_OFFSETS = False, True  # what `kernels.meshes` needs to know
MAX_HEAD_DIM = 256  # a tile of keys and one of values must fit a processor's shared memory


def refusals(inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> list[str]:
    """Why the kernels can't do a call; empty where they can. Only shapes and dtypes are read."""
    reasons = []
    if inputs.query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        reasons.append(f"computes in float32, bfloat16 or float16, got {inputs.query.dtype}")
    if inputs.query.shape[-1] > MAX_HEAD_DIM:
        reasons.append(f"head_dim must be at most {MAX_HEAD_DIM}, got {inputs.query.shape[-1]}")
    return reasons + common_refusals(inputs, controls, settings)


def common_refusals(
    inputs: Inputs, controls: Controls, settings: Settings, *, slopes: bool = True, softcap: bool = False
) -> list[str]:
    """What no kernel here does; with `slopes=False` no ALiBi either, with `softcap=True` a soft cap is fine."""
    reasons, relative = [], inputs.relative
    if inputs.bias is not None:
        reasons.append("it reads no bias")
    if settings.softcap is not None and not softcap:
        reasons.append("it has no softcap")
    if inputs.sinks is not None:
        reasons.append("it has no sinks")
    if inputs.value.shape[-1] != inputs.key.shape[-1]:
        depths = f"{inputs.value.shape[-1]} and {inputs.key.shape[-1]}"
        reasons.append(f"its values must be as deep as its keys, got {depths}")
    if relative is not None and any(x is not None for x in (relative.key_table, relative.value_table)):
        reasons.append("it has no relative key or value terms (Shaw, MusicRelative)")
    if relative is not None and relative.bias_table is not None:
        reasons.append("it has no gradient for a table of biases (T5Bias)")
    if relative is not None and relative.slopes is not None and not slopes:
        reasons.append("it has no linear biases (ALiBi)")
    if controls.q_positions is not None:
        reasons.append("it takes tokens in order, no positions")
    if controls.mask is not None and controls.mask.shape[1:4] != (1, 1, 1):
        reasons.append("it takes padding masks [batch, 1, 1, kv_len] only")
    if settings.dropout_rate:
        reasons.append("it has no dropout")
    if not isinstance(controls.offset, int):
        reasons.append("the query offset must be known when tracing")
    return reasons


def padded_depth(head_dim: int) -> int:
    """What head_dim is padded to: Triton's arrays have powers of two, and its products at least 16."""
    return max(1 << (head_dim - 1).bit_length(), 16)


def tile_sizes(pattern: Pattern, q_len: int, kv_len: int, head_dim: int, dtype: str | None = None) -> tuple[int, int]:
    """Query and key tile, in tokens: as large as shared memory suits, dividing the pattern's blocks if they let it.

    Those that were fastest on this device, where that was measured, in this dtype (None: in any).
    """
    most = 128 if padded_depth(head_dim) <= 64 else 64 if padded_depth(head_dim) <= 128 else 32
    sizes = tables.tiles("pallas", pattern, kv_len, head_dim, dtype) or (most, min(most, 64))
    block = unit(pattern)
    if block is not None and block % 16 == 0:
        sizes = min(sizes[0], block & -block), min(sizes[1], block & -block)
    return min(sizes[0], padded_depth(q_len)), min(sizes[1], padded_depth(kv_len))


TILES = ((128, 64), (64, 64), (128, 128), (64, 32), (128, 32), (32, 32))  # that the check of a device times


def plan(
    pattern: Pattern, q_len: int, kv_len: int, offset: int, num_heads: int, head_dim: int, dtype: str
) -> TileLists:
    """The lists of tiles of a call, those of heads that differ by head."""
    q_block, kv_block = tile_sizes(pattern, q_len, kv_len, head_dim, dtype)
    return make_tile_lists(pattern, q_len, kv_len, q_block, kv_block, offset)


def by_head(lists: TileLists, num_heads: int) -> Any:
    """Which arrays of a plan have an entry for each head, as a tree of bools."""
    each = lambda x: jax.tree.map(lambda _: lists.by_query.heads == num_heads > 1, x)
    return dataclasses.replace(
        lists, by_query=each(lists.by_query), by_key=each(lists.by_key), bank=jax.tree.map(lambda _: False, lists.bank)
    )


def flops(pattern: Pattern, q_len: int, kv_len: int, head_dim: int) -> int:
    """Of one head's forward pass, padding counted as executed."""
    q_block, kv_block = tile_sizes(pattern, q_len, kv_len, head_dim)
    tiles = num_tiles(pattern, q_len, kv_len, q_block, kv_block)
    return 4 * tiles * q_block * kv_block * padded_depth(head_dim)


def attend(
    inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern, lists: TileLists | None = None
) -> Array:
    """Attention `[batch, q_len, heads, head_dim]` in the query's dtype; `lists` is a `plan`, of some heads maybe."""
    from xformer.attention.kernels.triton import Extras, Static  # Pallas takes a while to import

    q_len, head_dim = inputs.query.shape[1::3]
    kv_len, offset = inputs.key.shape[1], controls.offset
    assert isinstance(offset, int)
    if lists is None:
        num_heads, dtype = inputs.query.shape[2] * inputs.query.shape[3], str(inputs.key.dtype)
        lists = plan(pattern, q_len, kv_len, offset, num_heads, head_dim, dtype)
    q_pad, kv_pad = round_up(q_len, lists.q_block) - q_len, round_up(kv_len, lists.kv_block) - kv_len
    depth_pad = padded_depth(head_dim) - head_dim
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, depth_pad)))
        for x, pad in zip(merge_heads(inputs, controls.mask), (q_pad, kv_pad, kv_pad), strict=True)
    )
    extras = Extras()
    real = key_padding(controls.mask, kv_len)
    if real is not None or kv_pad:
        real = jnp.ones((1, kv_len), jnp.int32) if real is None else real.astype(jnp.int32)
        extras = extras._replace(real=jnp.pad(real, ((0, 0), (0, kv_pad))))
    if controls.q_segments is not None and controls.kv_segments is not None:
        ids = controls.q_segments[:, 0, 0, :, 0], controls.kv_segments[:, 0, 0, 0]
        q_ids, kv_ids = (
            jnp.pad(x.astype(jnp.int32), ((0, 0), (0, pad))) for x, pad in zip(ids, (q_pad, kv_pad), strict=True)
        )
        extras = extras._replace(q_segments=q_ids, kv_segments=kv_ids)
    if inputs.relative is not None and inputs.relative.slopes is not None:
        slopes = jax.lax.stop_gradient(inputs.relative.slopes).astype(jnp.float32)
        extras = extras._replace(slopes=jnp.broadcast_to(slopes, (query.shape[2],)))
    static = Static(settings.scale, offset, settings.precision)
    out = _attend(static, (query, key, value), (lists, extras))
    return out[:, :q_len, :, :head_dim]


def merge_heads(inputs: Inputs, mask: Array | None) -> tuple[Array, Array, Array]:
    """Query, key and value, each `[batch, length, heads, head_dim]`, with zeros for padded keys and values."""
    query, key, value = inputs[:3]
    if mask is not None:
        real = mask.reshape(mask.shape[0], -1, 1, 1)
        key, value = (jnp.where(real, x, jnp.zeros((), x.dtype)) for x in (key, value))
    return query.reshape(*query.shape[:2], -1, query.shape[-1]), key, value


def key_padding(mask: Array | None, kv_len: int) -> Array | None:
    """The padding mask as `[batch or 1, kv_len]`."""
    return None if mask is None else jnp.broadcast_to(mask[:, 0, 0, 0], (mask.shape[0], kv_len))


def _attend_primal(static: Any, arrays: tuple[Array, Array, Array], operands: tuple[TileLists, Any]) -> Array:
    return _forward(static, arrays, operands)[0]


def _forward(static: Any, arrays: tuple[Array, Array, Array], operands: tuple[TileLists, Any]) -> tuple[Array, Any]:
    from xformer.attention.kernels import launch

    out, lse = launch.forward(static, *operands, *arrays)
    return out, (arrays, operands, out, lse)


def _backward(static: Any, saved: Any, d_out: Array) -> tuple[tuple[Array, Array, Array], None]:
    from xformer.attention.kernels import launch

    (query, key, value), (lists, extras), out, lse = saved
    delta = jnp.moveaxis((d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1), 1, 2)
    return launch.backward(static, lists, extras, query, key, value, d_out, lse, delta), None


_attend_vjp = jax.custom_vjp(_attend_primal, nondiff_argnums=(0,))
_attend_vjp.defvjp(_forward, _backward)
# Jitted here so that layers of one shape share one trace.
_attend = functools.partial(jax.jit, static_argnums=0)(_attend_vjp)
