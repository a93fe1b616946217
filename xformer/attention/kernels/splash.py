"""implementation="splash": TPUs, through the splash-attention kernel that ships with JAX.

It takes a static mask a head and segment ids. Padding masks and the padding of lengths become segments of their own. A
sink far below any score, which the kernel counts in the norm of each query, makes a query with nothing to attend to
give zeros, and zero gradients. On CPUs the kernel runs in Pallas's interpreter.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.tile_plan import ceil_div, round_up
from xformer.attention.kernels.pallas import common_refusals, key_padding, merge_heads
from xformer.attention.kernels.tile_lists import num_tiles
from xformer.attention.pattern import Pattern
from xformer.attention.spans import expand

Array = jax.Array
LANES = 128  # the kernel's blocks are multiples of a TPU's vector lanes
SINK = -1e30  # below any score, above the kernel's own mask value of about -2.4e38
NO_KEY, NO_QUERY = np.iinfo(np.int32).min, np.iinfo(np.int32).min + 1  # segments of padding, ids no caller uses


def refusals(inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> list[str]:
    """Why the kernel can't do a call; empty where it can. Only shapes and dtypes are read."""
    reasons = []
    if inputs.query.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"computes in float32 or bfloat16, got {inputs.query.dtype}")
    if inputs.query.shape[-1] % 64:
        reasons.append(f"head_dim must be a multiple of 64, got {inputs.query.shape[-1]}")
    return reasons + common_refusals(inputs, controls, settings, slopes=False)


def block(length: int) -> int:
    """Query or key block, in tokens, for a length."""
    return min(round_up(length, LANES), 512 if length >= 4096 else LANES)


def flops(pattern: Pattern, q_len: int, kv_len: int, head_dim: int) -> int:
    """Of one head's forward pass, padding counted as executed."""
    q_block, kv_block = block(q_len), block(kv_len)
    return 4 * num_tiles(pattern, q_len, kv_len, q_block, kv_block) * q_block * kv_block * head_dim


def attend(inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> Array:
    """Attention `[batch, q_len, heads, head_dim]` in the query's dtype."""
    q_len, kv_len, offset = inputs.query.shape[1], inputs.key.shape[1], controls.offset
    assert isinstance(offset, int)
    query, key, value = merge_heads(inputs, controls.mask)
    batch, _, heads, _ = query.shape
    q_block, kv_block = block(q_len), block(kv_len)
    pads = round_up(q_len, q_block) - q_len, round_up(kv_len, kv_block) - kv_len
    by_head = lambda x, pad: jnp.moveaxis(jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))), 2, 1)
    # The kernel does not scale.
    query, key, value = by_head(query * settings.scale, pads[0]), by_head(key, pads[1]), by_head(value, pads[1])

    q_ids: Any = None
    kv_ids: Any = None
    real = key_padding(controls.mask, kv_len)
    if controls.q_segments is not None and controls.kv_segments is not None:
        q_ids, kv_ids = controls.q_segments[:, 0, 0, :, 0], controls.kv_segments[:, 0, 0, 0]
    elif real is not None or pads[1]:
        q_ids, kv_ids = jnp.zeros((1, q_len), jnp.int32), jnp.zeros((1, kv_len), jnp.int32)
    if q_ids is not None:
        kv_ids = kv_ids if real is None else jnp.where(real, kv_ids, NO_KEY)
        fill = lambda ids, pad, value: jnp.broadcast_to(
            jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, pad)), constant_values=value), (batch, ids.shape[1] + pad)
        )
        q_ids, kv_ids = fill(q_ids, pads[0], NO_QUERY), fill(kv_ids, pads[1], NO_KEY)

    kernel = _kernel(pattern, q_len, kv_len, *pads, offset, heads)
    on = lambda interpret: lambda *arrays: _run(kernel, interpret, *arrays)
    out = jax.lax.platform_dependent(query, key, value, q_ids, kv_ids, cpu=on(True), default=on(False))
    return jnp.moveaxis(out, 1, 2)[:, :q_len]


def _run(kernel: Any, interpret: bool, query: Array, key: Array, value: Array, q_ids: Any, kv_ids: Any) -> Array:
    from jax.experimental.pallas.ops.tpu import splash_attention

    kernel = type(kernel)(
        kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info, **kernel.kwargs | {"interpret": interpret}
    )
    sinks = jnp.full(query.shape[1], SINK, jnp.float32)

    def one(query: Array, key: Array, value: Array, q_ids: Any, kv_ids: Any) -> Array:
        ids = None if q_ids is None else splash_attention.SegmentIds(q_ids, kv_ids)
        return kernel(query, key, value, segment_ids=ids, sinks=sinks)

    return jax.vmap(one)(query, key, value, q_ids, kv_ids)


@functools.lru_cache(maxsize=256)
def _held(pattern: Pattern, q_first: int, q_last: int, kv_block: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Which key blocks hold some pair, and which all, of queries at `[q_first, q_last)`; bool `[heads or 1, n]`."""
    some, every = pattern.spans(np.asarray([q_first]), np.asarray([q_last - 1]))
    out = []
    for spans in (some.touched(kv_block, kv_len), every.covered(kv_block, kv_len)):
        held = np.zeros((spans.first.shape[0], ceil_div(kv_len, kv_block)), bool)
        held[expand(spans)] = True
        out.append(held)
    return out[0], out[1]


@functools.lru_cache(maxsize=64)
def _kernel(pattern: Pattern, q_len: int, kv_len: int, q_pad: int, kv_pad: int, offset: int, heads: int) -> Any:
    """The kernel for a pattern, whose mask is worked out block by block."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    class PatternMask(splash_attention_mask.Mask):
        """One head of a pattern; places past the lengths attend as the pattern says, segments cut them off."""

        def __init__(self, head: int) -> None:
            self.head = head

        @property
        def shape(self) -> tuple[int, int]:
            return q_len + q_pad, kv_len + kv_pad

        def __getitem__(self, index: Any) -> np.ndarray:
            (q_first, q_last), (k_first, k_last) = (
                (part.start or 0, size if part.stop is None else part.stop)
                for part, size in zip(index, self.shape, strict=True)
            )
            some, every = (
                bool(held[min(self.head, len(held) - 1), k_first // (k_last - k_first)])
                for held in _held(pattern, q_first + offset, q_last + offset, k_last - k_first, self.shape[1])
            )
            shape = q_last - q_first, k_last - k_first
            if every or not some:
                return np.full(shape, every, bool)
            allowed = pattern.allows(np.arange(q_first, q_last) + offset, np.arange(k_first, k_last))
            return np.broadcast_to(allowed[min(self.head, len(allowed) - 1)], shape)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, PatternMask) and self.head == other.head

        def __hash__(self) -> int:
            return hash((pattern, self.head, self.shape))

    shared = len(pattern.allows(np.zeros(1, np.int64), np.zeros(1, np.int64))) == 1
    masks = [PatternMask(0 if shared else head) for head in range(heads)]
    q_block, kv_block = block(q_len), block(kv_len)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=q_block, block_kv=kv_block, block_kv_compute=kv_block, block_q_dkv=q_block, block_kv_dkv=kv_block,
        block_kv_dkv_compute=kv_block, block_q_dq=q_block, block_kv_dq=kv_block,
    )  # fmt: skip
    with jax.ensure_compile_time_eval():  # the kernel is kept, so it must hold arrays and no tracers
        return splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask(masks),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
        )
