"""The blocks of a model, in a list or stacked: one block whose arrays have a leading axis of layers, to scan over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.attention import Attention
from xformer.nn.block import EncoderBlock
from xformer.nn.constant import Constant

Array = jax.Array


def share_attention_params(blocks: Sequence[EncoderBlock]) -> None:
    """Gives all blocks the attention op's own parameters and constants of the first (Linformer's layerwise sharing)."""
    attention_fns: list[Any] = [block.attention.attention_fn for block in blocks]
    for attention_fn in attention_fns[1:]:
        attention_fn.params, attention_fn.constants = attention_fns[0].params, attention_fns[0].constants


def make_blocks(
    make: Callable[[nnx.Rngs, int], EncoderBlock], num_layers: int, *, rngs: nnx.Rngs, shared: bool = False
) -> list[EncoderBlock]:
    """The blocks of layers 0 to `num_layers` - 1, made one after the other by `make(rngs, layer)`.

    `shared`: all have the attention op's own parameters of the first.
    """
    if any(isinstance(count, jax.core.Tracer) for count in jax.tree.leaves(_counts(rngs))):
        # Flax looks through the trace so far whenever a key is drawn, in time quadratic in the number of layers unless
        # each has a trace of its own.
        blocks = [nnx.jit(lambda rngs, layer=layer: make(rngs, layer))(rngs) for layer in range(num_layers)]
    else:
        blocks = [make(rngs, layer) for layer in range(num_layers)]
    if shared:
        share_attention_params(blocks)
    return blocks


def make_stacked(
    make: Callable[[nnx.Rngs], EncoderBlock], num_layers: int, *, rngs: nnx.Rngs, shared: bool = False
) -> EncoderBlock:
    """One block with arrays `[layers, ...]`: those of `num_layers` blocks made one after the other, in one trace.

    Args:
      make: makes a block; it draws equally often from `rngs` each time, and layers differ by what they draw alone.
      rngs: as for the first block; left as the last block leaves it.
      shared: but one set of the attention op's own parameters, the first layer's.
    """
    before = _counts(rngs)
    graphdef, common, _ = _split(make(rngs), shared)
    draws = jax.tree.map(lambda after, count: after - count, _counts(rngs), before)

    def at(layer: Any) -> nnx.Rngs:
        """The streams as they are when that layer's turn comes."""
        return nnx.merge(*nnx.split(rngs, nnx.RngKey, ...)[:2], jax.tree.map(lambda n, d: n + layer * d, before, draws))

    layers = jnp.arange(num_layers, dtype=jnp.uint32)
    own = jax.vmap(lambda layer: _split(make(at(layer)), shared)[2])(layers)
    nnx.update(rngs, jax.tree.map(lambda n, d: n + num_layers * d, before, draws))
    return nnx.merge(graphdef, common, own)


def _counts(rngs: nnx.Rngs) -> Any:
    """How often each stream was drawn from so far."""
    return jax.tree.map(lambda count: count, nnx.state(rngs, nnx.RngCount))  # a copy: the stream goes on counting


def unstack_blocks(
    stacked: EncoderBlock, num_layers: int, attention: Attention, *, shared: bool = False
) -> list[EncoderBlock]:
    """The blocks that `make_stacked` stacked; layer i attends with `attention.at_layer(i)`."""
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
    blocks: Sequence[EncoderBlock],
    x: Array,
    mask: Array | None,
    *,
    keys: Array | None,
    deterministic: bool,
    remat: bool = False,
) -> Array:
    """Runs blocks one after the other.

    Args:
      x: `[batch, length, width]`.
      mask: bool `[batch, length]`, True at real tokens, or None.
      keys: a dropout key for each block `[layers]`; None: no dropout.
      deterministic: False in training: attention ops then update their constants.
      remat: keeps only the input of each block for the backward pass, which computes the block again.
    """
    for index, block in enumerate(blocks):
        key = None if keys is None else keys[index]
        if remat:
            graphdef, state = nnx.split(block)

            def run(state: Any, x: Array, key: Array | None, graphdef: Any = graphdef) -> tuple[Array, Any]:
                block = nnx.merge(graphdef, state)
                return _run(block, x, mask, key, deterministic), nnx.state(block, Constant)

            x, constants = jax.checkpoint(run)(state, x, key)
            if not deterministic:
                nnx.update(block, constants)
        else:
            x = _run(block, x, mask, key, deterministic)
    return x


def scan_blocks(
    stacked: EncoderBlock,
    num_layers: int,
    x: Array,
    mask: Array | None,
    *,
    keys: Array | None,
    deterministic: bool,
    plans: Any = None,
    shared: bool = False,
    remat: bool = False,
) -> Array:
    """`run_blocks` for stacked blocks: one trace and one compiled body, however many layers there are.

    Args:
      plans: what `Attention.plans` gives.
      shared: as given to `make_stacked`.
    """
    graphdef, common, own = _split(stacked, shared)
    shared_constants, common = nnx.filter_state(common, Constant, ...)

    def body(carry: tuple[Array, Any], layer: Any) -> tuple[tuple[Array, Any], Any]:
        (x, shared_constants), (own, key, plan) = carry, layer
        block = nnx.merge(graphdef, common, shared_constants, own)
        x = _run(block, x, mask, key, deterministic, plan)
        _, after, own = _split(block, shared)
        return (x, nnx.filter_state(after, Constant)), nnx.filter_state(own, Constant)

    if remat:
        body = jax.checkpoint(body, prevent_cse=False)  # a scan keeps the copies apart by itself
    (x, shared_constants), own_constants = jax.lax.scan(
        body, (x, shared_constants), (own, keys, plans), length=num_layers
    )
    if not deterministic:
        nnx.update(stacked, shared_constants, own_constants)
    return x


def _run(
    block: EncoderBlock, x: Array, mask: Array | None, key: Array | None, deterministic: bool, plan: Any = None
) -> Array:
    rngs = None if key is None else nnx.Rngs(dropout=key)
    return block(x, mask, deterministic=deterministic, rngs=rngs, plan=plan)


def _split(block: EncoderBlock, shared: bool) -> tuple[Any, Any, Any]:
    """Static structure, what all layers share, what each has for itself."""
    common: Any = nnx.PathContains("attention_fn") if shared else nnx.Nothing()
    parts: Any = nnx.split(block, common, ...)
    return parts
