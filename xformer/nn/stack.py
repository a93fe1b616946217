"""The blocks of a model, in a list or stacked: blocks whose arrays have a leading axis of layers, to scan over.

A stack of attention ops (`xformer.attention.Layers`) that repeats after `period` layers has `period` stacked blocks:
number k holds the layers k, k + period, k + 2 period and so on. One op has a period of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.attention import Attention, Layers
from xformer.nn.block import EncoderBlock

Array = jax.Array


def share_attention_params(blocks: Sequence[EncoderBlock], period: int = 1) -> None:
    """Gives blocks `period` apart the attention op's own parameters of the first (Linformer's layerwise sharing)."""
    attention_fns: list[Any] = [block.attention.attention_fn for block in blocks]
    for index, attention_fn in enumerate(attention_fns[period:]):
        attention_fn.params = attention_fns[index % period].params


def stack_blocks(blocks: Sequence[EncoderBlock], *, period: int = 1, shared: bool = False) -> list[EncoderBlock]:
    """`period` blocks with arrays `[layers / period, ...]`; `shared`: each with one set of the op's own parameters."""
    stacked = []
    for first in range(period):
        layers = blocks[first::period]
        graphdef, common, _ = _split(layers[0], shared)
        own = [_split(block, shared)[2] for block in layers]
        stacked.append(nnx.merge(graphdef, common, jax.tree.map(lambda *arrays: jnp.stack(arrays), *own)))
    return stacked


def unstack_blocks(
    stacked: Sequence[EncoderBlock], num_layers: int, attention: Attention, *, shared: bool = False
) -> list[EncoderBlock]:
    """The blocks that `stack_blocks` stacked; layer i attends with `attention.at_layer(i)`."""
    period = len(stacked)
    parts = [_split(block, shared) for block in stacked]
    blocks = []
    for index in range(num_layers):
        graphdef, common, own = parts[index % period]
        block = nnx.merge(graphdef, common, jax.tree.map(lambda x, row=index // period: x[row], own))
        block.attention.attention_fn.op = attention.at_layer(index)
        blocks.append(block)
    if shared:
        share_attention_params(blocks, period)
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
    stacked: Sequence[EncoderBlock],
    num_layers: int,
    x: Array,
    mask: Array | None,
    *,
    keys: Array | None,
    plans: Sequence[Any],
    shared: bool = False,
    remat: bool = False,
) -> Array:
    """`run_blocks` for stacked blocks: one trace and one compiled body, however many layers there are.

    Args:
      num_layers: a multiple of the number of stacked blocks, which are the layers of one step of the scan.
      plans: for each stacked block the plans of its layers, see `plans_by_block`.
      shared: as given to `stack_blocks`.
    """
    period = len(stacked)
    parts = [_split(block, shared) for block in stacked]
    if keys is not None:
        keys = keys.reshape(num_layers // period, period)

    def run(index: int, own: Any, x: Array, key: Array | None, plan: Any) -> Array:
        graphdef, common, _ = parts[index]
        return _run(nnx.merge(graphdef, common, own), x, mask, key, plan)

    if remat:
        run = jax.checkpoint(run, prevent_cse=False, static_argnums=0)  # a scan keeps the copies apart by itself

    def body(x: Array, layers: Any) -> tuple[Array, None]:
        own, keys, plans = layers
        for index in range(period):
            x = run(index, own[index], x, None if keys is None else keys[index], plans[index])
        return x, None

    layers = ([own for _, _, own in parts], keys, list(plans))
    return jax.lax.scan(body, x, layers, length=num_layers // period)[0]


def plans_by_block(attention: Attention, plans: Any) -> Sequence[Any]:
    """What `attention.plans` gave, for each stacked block of its layers."""
    return plans if isinstance(attention, Layers) else [plans]


def _run(block: EncoderBlock, x: Array, mask: Array | None, key: Array | None, plan: Any = None) -> Array:
    rngs = None if key is None else nnx.Rngs(dropout=key)
    return block(x, mask, deterministic=key is None, rngs=rngs, plan=plan)


def _split(block: EncoderBlock, shared: bool) -> tuple[Any, Any, Any]:
    """Static structure, what all layers share, what each has for itself."""
    common: Any = nnx.PathContains("attention_fn") if shared else nnx.Nothing()
    parts: Any = nnx.split(block, common, ...)
    return parts
