"""The blocks of a model, in a list or stacked: one block whose arrays have a leading axis of layers, to scan over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.attention import Attention
from xformer.nn.block import EncoderBlock

Array = jax.Array


def share_attention_params(blocks: Sequence[EncoderBlock]) -> None:
    """Gives all blocks the attention op's own parameters of the first (Linformer's layerwise sharing)."""
    attention_fns: list[Any] = [block.attention.attention_fn for block in blocks]
    for attention_fn in attention_fns[1:]:
        attention_fn.params = attention_fns[0].params


def stack_blocks(blocks: Sequence[EncoderBlock], *, shared: bool = False) -> EncoderBlock:
    """One block with arrays `[layers, ...]`; `shared`: but one set of the attention op's own parameters."""
    graphdef, common, _ = _split(blocks[0], shared)
    own = [_split(block, shared)[2] for block in blocks]
    return nnx.merge(graphdef, common, jax.tree.map(lambda *arrays: jnp.stack(arrays), *own))


def unstack_blocks(
    stacked: EncoderBlock, num_layers: int, attention: Attention, *, shared: bool = False
) -> list[EncoderBlock]:
    """The blocks that `stack_blocks` stacked; layer i attends with `attention.at_layer(i)`."""
    graphdef, common, own = _split(stacked, shared)
    blocks = []
    for index in range(num_layers):
        block = nnx.merge(graphdef, common, jax.tree.map(lambda x, index=index: x[index], own))
        block.attention.attention_fn.op = attention.at_layer(index)
        blocks.append(block)
    if shared:
        share_attention_params(blocks)
    return blocks


def run_blocks(
    blocks: Sequence[EncoderBlock], x: Array, mask: Array | None, *, keys: Array | None, remat: bool = False
) -> Array:
    """Runs blocks one after the other.

    Args:
      x: `[batch, length, width]`.
      mask: bool `[batch, length]`, True at real tokens, or None.
      keys: a dropout key for each block `[layers]`; None: no dropout.
      remat: keeps only the input of each block for the backward pass, which computes the block again.
    """
    for index, block in enumerate(blocks):
        key = None if keys is None else keys[index]
        if remat:
            graphdef, state = nnx.split(block)
            again = jax.checkpoint(
                lambda state, x, key, graphdef=graphdef: _run(nnx.merge(graphdef, state), x, mask, key)
            )
            x = again(state, x, key)
        else:
            x = _run(block, x, mask, key)
    return x


def scan_blocks(
    stacked: EncoderBlock,
    num_layers: int,
    x: Array,
    mask: Array | None,
    *,
    keys: Array | None,
    plans: Any = None,
    shared: bool = False,
    remat: bool = False,
) -> Array:
    """`run_blocks` for stacked blocks: one trace and one compiled body, however many layers there are.

    Args:
      plans: what `Attention.plans` gives.
      shared: as given to `stack_blocks`.
    """
    graphdef, common, own = _split(stacked, shared)

    def body(x: Array, layer: Any) -> tuple[Array, None]:
        own, key, plan = layer
        return _run(nnx.merge(graphdef, common, own), x, mask, key, plan), None

    if remat:
        body = jax.checkpoint(body, prevent_cse=False)  # a scan keeps the copies apart by itself
    return jax.lax.scan(body, x, (own, keys, plans), length=num_layers)[0]


def _run(block: EncoderBlock, x: Array, mask: Array | None, key: Array | None, plan: Any = None) -> Array:
    rngs = None if key is None else nnx.Rngs(dropout=key)
    return block(x, mask, deterministic=key is None, rngs=rngs, plan=plan)


def _split(block: EncoderBlock, shared: bool) -> tuple[Any, Any, Any]:
    """Static structure, what all layers share, what each has for itself."""
    common: Any = nnx.PathContains("attention_fn") if shared else nnx.Nothing()
    parts: Any = nnx.split(block, common, ...)
    return parts
