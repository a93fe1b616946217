"""What is measured in benchmarks, and what a contender gives: shared by the peers in JAX and those in PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xformer.attention import Attention, BigBird, Shape
from xformer.bench.timing import Call


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to compute: an op, the sizes and dtype of the call, forward only or forward and backward."""

    op: Attention
    shape: Shape
    dtype: str = "float32"
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Ready:
    """A contender ready to run.

    Attributes:
      call: what is measured.
      flops: of one call.
      needs: bytes that one call takes, as far as that is known before; NaN if it is not.
      results: turns what a call gives into its output and gradients of query, key and value, each laid out like
        query, to be compared with the others'; None for a contender that draws random blocks of its own.
    """

    call: Call
    flops: float
    needs: float = math.nan
    results: Callable[[Any], Sequence[np.ndarray]] | None = None


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to compute cases. `prepare` runs nothing and raises NotImplementedError where it can't do the case."""

    name: str
    prepare: Callable[[Case], Ready]


@functools.lru_cache(maxsize=1)
def _normal(shape: Shape) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    sizes = [(shape.batch, shape.q_len, heads, shape.head_dim) for heads in (shape.num_heads, shape.kv_heads)]
    return tuple(rng.standard_normal(sizes[which], np.float32) for which in (0, 1, 1, 0))


def host_arrays(case: Case, first: bool) -> tuple[np.ndarray, ...]:
    """Query, key, value and a cotangent, float32 and random: the same for all contenders.

    `[batch, length, num_heads, head_dim]`, or with `first` `[batch, num_heads, length, head_dim]`.
    """
    found = _normal(case.shape)
    return tuple(np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in found) if first else found


def block_table(op: Attention, length: int, num_heads: int) -> tuple[np.ndarray, int] | None:
    """Which blocks attend to which, bool `[num_heads, blocks, blocks]`, and the block's size.

    None where the op's pattern is not one of whole blocks. The pattern of blocks is that of an op with blocks of one
    token, so nothing of size length x length is made.
    """
    if not isinstance(op, BigBird) or op.causal or op.num_global_tokens or op.position or length % op.block_size:
        return None
    blocks = length // op.block_size
    table = dataclasses.replace(op, block_size=1).pattern(blocks, blocks, num_heads)
    assert table is not None
    return np.broadcast_to(table, (num_heads, blocks, blocks)), op.block_size
