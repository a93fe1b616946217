"""What every contender is given: the same random arrays, and BigBird's blocks as a table."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention import Attention, BigBird, Full, Shape, tree_paths
from xformer.bench.contender import Case


@functools.lru_cache(maxsize=1)
def _normal(shape: Shape) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    sizes = [(shape.batch, shape.q_len, heads, shape.head_dim) for heads in (shape.num_heads, shape.kv_heads)]
    return tuple(rng.standard_normal(sizes[which], np.float32) for which in (0, 1, 1, 0))


def host_arrays(case: Case, heads_first: bool) -> tuple[np.ndarray, ...]:
    """Query, key, value and the gradient of the output, random float32: the same numbers for all contenders.

    Each is `[batch, length, num_heads, head_dim]`, or with `heads_first` `[batch, num_heads, length, head_dim]`, for
    contenders that take them so.
    """
    found = _normal(case.shape)
    return tuple(np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in found) if heads_first else found


@functools.lru_cache(maxsize=2)
def _device_arrays(shape: Shape, dtype: str, heads_first: bool) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(x, dtype) for x in host_arrays(Case(Full(), shape), heads_first))


def arrays(case: Case, heads_first: bool = False) -> tuple[jax.Array, ...]:
    """`host_arrays` on the device in the case's dtype."""
    return _device_arrays(case.shape, case.dtype, heads_first)


def trees(op: Attention, length: int) -> dict[str, Any]:
    """What a call of the op is given besides: the paths of a binary tree where it reads trees, else nothing."""
    if not op.reads_trees:
        return {}
    parents = (jnp.arange(length)[None] + 1) // 2 - 1
    return {"paths": tree_paths(parents, length.bit_length())}


def block_table(op: Attention, length: int, num_heads: int) -> tuple[np.ndarray, int] | None:
    """Which blocks attend to which, bool `[num_heads, blocks, blocks]`, and the block's size.

    None where the op's pattern is not made of whole blocks. The table is the pattern of the same op with blocks of one
    token at as many positions as there are blocks, so no array of size length x length is made.
    """
    if not isinstance(op, BigBird) or op.causal or op.num_global_tokens or op.position or length % op.block_size:
        return None
    blocks = length // op.block_size
    table = dataclasses.replace(op, block_size=1).pattern(blocks, blocks, num_heads)
    assert table is not None
    return np.broadcast_to(table, (num_heads, blocks, blocks)), op.block_size
