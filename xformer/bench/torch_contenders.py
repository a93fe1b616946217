"""Contenders that need PyTorch and Transformers; imported only where those are installed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from xformer.attention import BigBird, Full, Shape
from xformer.bench.contender import Case, Contender, Ready
from xformer.bench.inputs import block_table, host_arrays
from xformer.bench.timing import Call

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Matrix products of forward and backward, in units of one product of all pairs. Kernels that keep no scores compute
# them once more: 2 + 5; where the weights are kept: 2 + 4.
FORWARD, RECOMPUTED, KEPT = 2, 7, 6


def torch_peers(case: Case) -> Iterable[Contender]:
    """What computes the case in PyTorch."""
    if type(case.op) is Full and case.op.position is None:
        yield Contender("torch SDPA", _sdpa)
    if block_table(case.op, case.shape.q_len, 1) is not None:
        yield Contender("torch FlexAttention", _flex)
        yield Contender("Hugging Face BigBird", _hugging_face)


def _sdpa(case: Case) -> Ready:
    shape = case.shape
    run = functools.partial(scaled_dot_product_attention, is_causal=case.op.causal)
    pairs = shape.num_heads * shape.q_len * shape.kv_len
    return _ready(run, case, pairs // 2 if case.op.causal else pairs, RECOMPUTED, _linear(shape))


def _flex(case: Case) -> Ready:
    if case.backward and not CUDA:
        raise NotImplementedError("FlexAttention has no backward pass on CPUs")
    table, block, pairs = _blocks(case)
    attend = torch.compile(flex_attention)
    mask = block_mask(table, block)
    return _ready(lambda q, k, v: attend(q, k, v, block_mask=mask), case, pairs, RECOMPUTED, _linear(case.shape))


def _blocks(case: Case) -> tuple[np.ndarray, int, int]:
    found = block_table(case.op, case.shape.q_len, case.shape.num_heads)
    assert found is not None
    table, block = found
    return table, block, int(table.sum()) * block**2


def block_mask(table: np.ndarray, block: int) -> BlockMask:
    """FlexAttention's mask of a table of blocks, bool `[num_heads, blocks, blocks]`; no block is looked into."""
    # The kernel for CPUs reads past other strides than these without a word.
    integers = lambda x: torch.tensor(np.ascontiguousarray(x), dtype=torch.int32, device=DEVICE)[None].contiguous()
    counts, indices = integers(table.sum(-1)), integers(np.argsort(~table, axis=-1, kind="stable"))
    return BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        torch.zeros_like(indices),
        full_kv_num_blocks=counts,
        full_kv_indices=indices,
        BLOCK_SIZE=block,
    )


def _hugging_face(case: Case) -> Ready:
    """Transformers' block-sparse attention without its projections. Random blocks are its own draw, as it ships."""
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    op, shape = case.op, case.shape
    assert isinstance(op, BigBird)
    if (op.num_window_blocks, op.num_global_blocks) != (3, 2):
        raise NotImplementedError("Transformers' BigBird has 3 window and 2 global blocks")
    width = shape.num_heads * shape.head_dim
    config = BigBirdConfig(
        hidden_size=width, num_attention_heads=shape.num_heads, block_size=op.block_size,
        num_random_blocks=op.num_random_blocks, max_position_embeddings=max(shape.q_len, 4096),
    )  # fmt: skip
    layer = BigBirdBlockSparseAttention(config, seed=0).train()
    ones = torch.ones(shape.batch, shape.q_len, device=DEVICE, dtype=getattr(torch, case.dtype))
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(ones, op.block_size)

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out, _ = layer.bigbird_block_sparse_attention(
            query, key, value, band, rows, columns, blocked, blocked, shape.num_heads, op.num_random_blocks,
            shape.head_dim, op.block_size, op.block_size, shape.batch, shape.q_len, shape.q_len, seed=0,
            plan_from_length=None, plan_num_rand_blocks=None,
        )  # fmt: skip
        return out.transpose(1, 2)  # it gives heads last

    # It also fills a length x length table of weights, for whoever asks for them, and keeps it for the backward pass.
    dense = shape.batch * shape.num_heads * shape.q_len**2 * ones.element_size()
    return _ready(run, case, _blocks(case)[2], KEPT, _linear(shape) + 2 * dense, comparable=False)


def _ready(
    run: Callable[..., torch.Tensor], case: Case, pairs: int, products: int, needs: float, comparable: bool = True
) -> Ready:
    *inputs, cotangent = (x.detach() for x in tensors(case.shape, case.dtype))
    query, key, value = (x.requires_grad_(case.backward) for x in inputs)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return run(query, key, value)

    def both() -> Any:
        out = run(query, key, value)
        return out.detach(), *torch.autograd.grad(out, (query, key, value), cotangent)

    launch = both if case.backward else forward

    def results(given: Any) -> Sequence[np.ndarray]:
        return [x.float().cpu().numpy().transpose(0, 2, 1, 3) for x in (given if case.backward else (given,))]

    wait: Callable[[Any], Any] = (lambda _: torch.cuda.synchronize()) if CUDA else (lambda out: out)
    memory = (lambda: _cuda_memory(launch)) if CUDA else None
    product = 2 * case.shape.batch * pairs * case.shape.head_dim
    flops = product * (products if case.backward else FORWARD)
    return Ready(Call(launch, wait, memory), flops, needs, results if comparable else None)


@functools.lru_cache(maxsize=1)
def tensors(shape: Shape, dtype: str) -> tuple[torch.Tensor, ...]:
    """The inputs of all contenders, `[batch, num_heads, length, head_dim]`."""
    found = host_arrays(Case(Full(), shape), heads_first=True)
    return tuple(torch.tensor(x).to(DEVICE, getattr(torch, dtype)) for x in found)


def _cuda_memory(launch: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    launch()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def _linear(shape: Shape) -> float:
    """Bytes of a few arrays like the inputs."""
    return 8 * 4.0 * math.prod((shape.batch, shape.q_len, shape.num_heads, shape.head_dim))
