"""implementation="splash": TPUs, through the splash-attention kernel that ships with JAX.

It takes a static mask a head and segment ids. Padding masks and the padding of lengths become segments of their own. A
sink far below any score, which the kernel counts in the norm of each query, makes a query with nothing to attend to
give zeros, and zero gradients. On CPUs the kernel runs in Pallas's interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.tile_plan import ceil_div, round_up
from xformer.attention.kernels import tables
from xformer.attention.kernels.pallas import common_refusals, key_padding, merge_heads
from xformer.attention.kernels.tile_lists import TileLists, make_tile_lists, num_tiles, unit
from xformer.attention.pattern import Pattern

Array = jax.Array
CUTS_ITSELF, TAKES_OFFSETS = False, True  # what `kernels.meshes` needs to know
LANES = 128  # the kernel's blocks are multiples of a TPU's vector lanes
MAX_ENTRIES = 2**18  # of a list of blocks, by head: read from a TPU's small scalar memory; a guess, tried on none
SINK = -1e30  # below any score, above the kernel's own mask value of about -2.4e38
NO_KEY, NO_QUERY = np.iinfo(np.int32).min, np.iinfo(np.int32).min + 1  # segments of padding, ids no caller uses


_LISTS = ("data_next", "mask_next", "block_mask")  # of the kernel's mask info, `[heads or 1, ...]`


@functools.partial(jax.tree_util.register_dataclass, data_fields=["infos"], meta_fields=["options"])
@dataclasses.dataclass(frozen=True)
class Kernel:
    """A splash kernel: which blocks its passes visit, as arrays, and its options by name."""

    infos: tuple[Any, Any, Any]
    options: tuple[tuple[str, Any], ...]


def refusals(inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> list[str]:
    """Why the kernel can't do a call; empty where it can. Only shapes and dtypes are read."""
    reasons = []
    if inputs.query.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"computes in float32 or bfloat16, got {inputs.query.dtype}")
    if inputs.query.shape[-1] % 64:
        reasons.append(f"head_dim must be a multiple of 64, got {inputs.query.shape[-1]}")
    (q_len, head_dim), kv_len = inputs.query.shape[1::3], inputs.key.shape[1]
    q_block, kv_block = blocks(pattern, q_len, kv_len, head_dim, str(inputs.key.dtype))
    heads = len(pattern.allows(np.zeros(1, np.int64), np.zeros(1, np.int64)))
    if (entries := heads * ceil_div(q_len, q_block) * ceil_div(kv_len, kv_block)) > MAX_ENTRIES:
        reasons.append(f"its lists of blocks would have {entries:,} entries, above {MAX_ENTRIES:,}")
    return reasons + common_refusals(inputs, controls, settings, slopes=False, softcap=True)


def blocks(pattern: Pattern, q_len: int, kv_len: int, head_dim: int, dtype: str | None = None) -> tuple[int, int]:
    """Query and key block, in tokens; those that were fastest on this device, where that was measured in the dtype."""
    default = tuple(512 if length >= 4096 else LANES for length in (q_len, kv_len))
    size = tables.tiles("splash", pattern, kv_len, head_dim, dtype) or default
    own = unit(pattern)
    if own is not None:  # larger ones would hold parts of most of the pattern's own blocks
        most = max(own & -own, LANES)
        size = min(size[0], most), min(size[1], most)
    q_block, kv_block = (
        min(round_up(x, LANES), round_up(n, LANES)) for x, n in zip(size, (q_len, kv_len), strict=True)
    )
    return q_block, kv_block


TILES = ((128, 128), (256, 256), (512, 512), (1024, 512), (512, 1024), (1024, 1024))  # that the check times


def flops(pattern: Pattern, q_len: int, kv_len: int, head_dim: int) -> int:
    """Of one head's forward pass, padding counted as executed."""
    q_block, kv_block = blocks(pattern, q_len, kv_len, head_dim)
    return 4 * num_tiles(pattern, q_len, kv_len, q_block, kv_block) * q_block * kv_block * head_dim


def plan(pattern: Pattern, q_len: int, kv_len: int, offset: int, num_heads: int, head_dim: int, dtype: str) -> Kernel:
    """The kernel of a pattern, whose blocks are listed by head."""
    sizes = blocks(pattern, q_len, kv_len, head_dim, dtype)
    return _kernel(pattern, q_len, kv_len, *sizes, offset, num_heads)


def by_head(kernel: Kernel, num_heads: int) -> Any:
    """Which arrays of a plan have an entry for each head, as a tree of bools."""
    lists = lambda info: info._replace(
        **{
            name: None if (x := getattr(info, name)) is None else name in _LISTS and x.shape[0] == num_heads > 1
            for name in info._fields
        }
    )
    return Kernel(tuple(lists(info) for info in kernel.infos), kernel.options)


def attend(
    inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern, kernel: Kernel | None = None
) -> Array:
    """Attention `[batch, q_len, heads, head_dim]` in the query's dtype; `kernel` is a `plan`, of some heads maybe."""
    q_len, kv_len, offset = inputs.query.shape[1], inputs.key.shape[1], controls.offset
    assert isinstance(offset, int)
    query, key, value = merge_heads(inputs, controls.mask)
    batch, _, heads, head_dim = query.shape
    if kernel is None:
        kernel = plan(pattern, q_len, kv_len, offset, heads, head_dim, str(key.dtype))
    q_block, kv_block = dict(kernel.options)["block_sizes"].block_q, dict(kernel.options)["block_sizes"].block_kv
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

    on = lambda interpret: functools.partial(_run, interpret, settings.softcap)
    out = jax.lax.platform_dependent(kernel, query, key, value, q_ids, kv_ids, cpu=on(True), default=on(False))
    return jnp.moveaxis(out, 1, 2)[:, :q_len]


def _run(
    interpret: bool, softcap: float | None, kernel: Kernel, query: Array, key: Array, value: Array, q_ids: Any,
    kv_ids: Any,
) -> Array:  # fmt: skip
    from jax.experimental.pallas.ops.tpu import splash_attention

    own = {"interpret": interpret, "attn_logits_soft_cap": softcap}
    made = splash_attention.splash_attention_kernel.SplashAttentionKernel(*kernel.infos, **dict(kernel.options) | own)
    sinks = jnp.full(query.shape[1], SINK, jnp.float32)

    def one(query: Array, key: Array, value: Array, q_ids: Any, kv_ids: Any) -> Array:
        ids = None if q_ids is None else splash_attention.SegmentIds(q_ids, kv_ids)
        out: Any = made(query, key, value, segment_ids=ids, sinks=sinks)
        return out

    return jax.vmap(one)(query, key, value, q_ids, kv_ids)


def _tests(lists: TileLists) -> np.ndarray:
    """For every block of every head its index in the bank of pairs, 0 for all pairs and 1 for none.

    int32 `[heads or 1, query blocks, key blocks]`.
    """
    side = lists.by_query
    lines = side.order.shape[1]
    tests = np.ones((side.heads, lines, lists.by_key.order.shape[1]), np.int32)
    for head in range(side.heads):
        starts = side.starts[head]
        line = np.repeat(np.arange(lines), np.diff(starts))
        tests[head, line, side.tiles[head, : starts[-1]]] = side.tests[head, : starts[-1]]
    return tests


@functools.lru_cache(maxsize=64)
def _kernel(pattern: Pattern, q_len: int, kv_len: int, q_block: int, kv_block: int, offset: int, heads: int) -> Kernel:
    """The kernel for a pattern, whose mask is worked out block by block."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    lists = make_tile_lists(pattern, q_len, kv_len, q_block, kv_block, offset)
    tests = _tests(lists)
    pairs = [np.full((q_block, kv_block), whole) for whole in (True, False)]
    if lists.bank is not None:
        pairs += list(lists.bank[2:] != 0)

    class PatternMask(splash_attention_mask.Mask):
        """One head of a pattern, read block by block; segments cut off places past the lengths."""

        def __init__(self, head: int) -> None:
            self.head = head

        @property
        def shape(self) -> tuple[int, int]:
            return tests.shape[1] * q_block, tests.shape[2] * kv_block

        def __getitem__(self, index: Any) -> np.ndarray:
            row, column = ((part.start or 0) // size for part, size in zip(index, (q_block, kv_block), strict=True))
            return pairs[tests[self.head, row, column]]

        def __eq__(self, other: object) -> bool:
            return isinstance(other, PatternMask) and self.head == other.head

        def __hash__(self) -> int:
            return hash((pattern, self.head, self.shape))

    masks = [PatternMask(head % len(tests)) for head in range(heads)]
    sizes = splash_attention_kernel.BlockSizes(
        block_q=q_block, block_kv=kv_block, block_kv_compute=kv_block, block_q_dkv=q_block, block_kv_dkv=kv_block,
        block_kv_dkv_compute=kv_block, block_q_dq=q_block, block_kv_dq=kv_block,
    )  # fmt: skip
    with jax.ensure_compile_time_eval():  # the kernel is kept, so it must hold arrays and no tracers
        made = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask(masks),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
        )
    infos = made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info
    return Kernel(infos, tuple(sorted(made.kwargs.items(), key=lambda item: item[0])))
