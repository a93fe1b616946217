"""The blocks of a model, in a list or stacked: blocks whose arrays have a leading axis of layers, to scan over.

A stack of attention ops (`xformer.attention.Layers`) that repeats after `period` layers has `period` stacked blocks:
number k holds the layers k, k + period, k + 2 period and so on. One op has a period of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xformer import layer_terms
from xformer.attention import Attention, Layers
from xformer.nn.block import EncoderBlock
from xformer.nn.by_example import by_example
from xformer.nn.constant import Constant

Terms = layer_terms.Terms
Array = jax.Array


def share_attention_params(blocks: Sequence[EncoderBlock], period: int = 1) -> None:
    """Gives blocks `period` apart the attention op's own parameters and constants of the first.

    This is Linformer's layerwise sharing. Cross-attention has a set of its own.
    """
    own = [block.attention for block in blocks]
    cross = [block.cross_attention for block in blocks if block.cross_attention is not None]
    for layers in (own, cross):
        attention_fns: list[Any] = [layer.attention_fn for layer in layers]
        for index, attention_fn in enumerate(attention_fns[period:]):
            first = attention_fns[index % period]
            attention_fn.params, attention_fn.constants = first.params, first.constants


def make_blocks(
    make: Callable[[nnx.Rngs, int], EncoderBlock],
    num_layers: int,
    *,
    rngs: nnx.Rngs,
    period: int = 1,
    shared: bool = False,
) -> list[EncoderBlock]:
    """The blocks of layers 0 to `num_layers` - 1, made one after the other by `make(rngs, layer)`.

    `shared`: layers `period` apart have the attention op's own parameters of the first of them.
    """
    if any(isinstance(count, jax.core.Tracer) for count in jax.tree.leaves(_counts(rngs))):
        # Flax looks through the trace so far whenever a key is drawn, in time quadratic in the number of layers unless
        # each has a trace of its own.
        blocks = [nnx.jit(lambda rngs, layer=layer: make(rngs, layer))(rngs) for layer in range(num_layers)]
    else:
        blocks = [make(rngs, layer) for layer in range(num_layers)]
    if shared:
        share_attention_params(blocks, period)
    return blocks


def make_stacked(
    make: Callable[[nnx.Rngs, int], EncoderBlock],
    num_layers: int,
    *,
    rngs: nnx.Rngs,
    period: int = 1,
    shared: bool = False,
) -> list[EncoderBlock]:
    """`period` blocks with arrays `[layers / period, ...]`: those of `num_layers` blocks made in turn, in one trace.

    Args:
      make: makes the block of layer 0 to `period` - 1; it draws equally often from `rngs` each time, and layers
        `period` apart differ by what they draw alone.
      num_layers: a multiple of `period`.
      rngs: as for the first block; left as the last block leaves it.
      shared: but one set of the attention op's own parameters for layers `period` apart, that of the first.
    """
    before = _counts(rngs)
    parts = [_split(make(rngs, layer), shared) for layer in range(period)]
    draws = jax.tree.map(lambda after, count: after - count, _counts(rngs), before)

    def at(step: Any) -> nnx.Rngs:
        """The streams as they are when the turn of that step's layers comes."""
        return nnx.merge(*nnx.split(rngs, nnx.RngKey, ...)[:2], jax.tree.map(lambda n, d: n + step * d, before, draws))

    def made(step: Any) -> list[Any]:
        streams = at(step)
        return [_split(make(streams, layer), shared)[2] for layer in range(period)]

    steps = num_layers // period
    own = jax.vmap(made)(jnp.arange(steps, dtype=jnp.uint32))
    nnx.update(rngs, jax.tree.map(lambda n, d: n + steps * d, before, draws))
    return [nnx.merge(graphdef, common, arrays) for (graphdef, common, _), arrays in zip(parts, own, strict=True)]


def _counts(rngs: nnx.Rngs) -> Any:
    """How often each stream was drawn from so far."""
    return jax.tree.map(lambda count: count, nnx.state(rngs, nnx.RngCount))  # a copy: the stream goes on counting


def unstack_blocks(
    stacked: Sequence[EncoderBlock], num_layers: int, attention: Attention, *, shared: bool = False
) -> list[EncoderBlock]:
    """The blocks that `make_stacked` stacked; layer i attends with `attention.at_layer(i)`."""
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
    blocks: Sequence[EncoderBlock],
    x: Array,
    mask: Array | None,
    *,
    keys: Array | None,
    deterministic: bool,
    remat: bool = False,
    **inputs: Any,
) -> tuple[Array, Terms]:
    """Runs blocks one after the other; the result, and what the layers sowed (`xformer.layer_terms`).

    Args:
      x: `[batch, length, width]`.
      mask: bool `[batch, length]`, True at real tokens, or None.
      keys: a dropout key for each block `[layers]`; None: no dropout.
      deterministic: False in training: attention ops then update their constants.
      remat: keeps only the input of each block for the backward pass, which computes the block again.
      inputs: `global_tokens`, `segment_ids`, `paths` and `context`, each None where there is none, see EncoderBlock.
    """
    sown = []
    for index, block in enumerate(blocks):
        key = None if keys is None else keys[index]
        if remat:
            graphdef, state = nnx.split(block)

            def run(state: Any, x: Array, key: Array | None, graphdef: Any = graphdef) -> tuple[Array, Terms, Any]:
                block = nnx.merge(graphdef, state)
                x, terms = _run(block, x, mask, key, deterministic, None, inputs)
                return x, terms, nnx.state(block, Constant)

            x, terms, constants = jax.checkpoint(run)(state, x, key)
            if not deterministic:
                nnx.update(block, constants)
        else:
            x, terms = _run(block, x, mask, key, deterministic, None, inputs)
        sown.append(terms)
    return x, layer_terms.joined(sown)


def scan_blocks(
    stacked: Sequence[EncoderBlock],
    num_layers: int,
    x: Array,
    mask: Array | None,
    *,
    keys: Array | None,
    deterministic: bool,
    plans: Sequence[Any],
    shared: bool = False,
    remat: bool = False,
    **inputs: Any,
) -> tuple[Array, Terms]:
    """`run_blocks` for stacked blocks: one trace and one compiled body, however many layers there are.

    Args:
      num_layers: a multiple of the number of stacked blocks, which are the layers of one step of the scan.
      plans: for each stacked block the plans of its layers, see `plans_by_block`.
      shared: as given to `make_stacked`.
    """
    period = len(stacked)
    graphdefs, commons, owns = map(list, zip(*(_split(block, shared) for block in stacked), strict=True))
    # Constants that layers share are handed from one step to the next; those of a layer are a part of its own arrays.
    split = [nnx.filter_state(common, Constant, ...) for common in commons]
    constants, commons = [one for one, _ in split], [rest for _, rest in split]
    if keys is not None:
        keys = keys.reshape(num_layers // period, period)

    def run(index: int, own: Any, constants: Any, x: Array, key: Array | None, plan: Any) -> tuple[Array, Any, Any]:
        block = nnx.merge(graphdefs[index], commons[index], constants, own)
        x, terms = _run(block, x, mask, key, deterministic, plan, inputs)
        _, after, own = _split(block, shared)
        return x, nnx.filter_state(after, Constant), (nnx.filter_state(own, Constant), terms)

    if remat:
        run = jax.checkpoint(run, prevent_cse=False, static_argnums=0)  # a scan keeps the copies apart by itself

    def body(carry: tuple[Array, list[Any]], layers: Any) -> tuple[tuple[Array, list[Any]], list[Any]]:
        (x, constants), (owns, keys, plans) = carry, layers
        constants, after = [*constants], []
        for index in range(period):
            key = None if keys is None else keys[index]
            x, constants[index], own = run(index, owns[index], constants[index], x, key, plans[index])
            after.append(own)
        return (x, constants), after

    layers = (owns, keys, list(plans))
    (x, constants), scanned = jax.lax.scan(body, (x, constants), layers, length=num_layers // period)
    after, sown = zip(*scanned, strict=True)
    if not deterministic:
        for block, of_all, of_each in zip(stacked, constants, after, strict=True):
            nnx.update(block, of_all, of_each)
    return x, layer_terms.joined([layer_terms.summed(terms) for terms in sown])


def plans_by_block(attention: Attention, plans: Any) -> Sequence[Any]:
    """What `attention.plans` gave, for each stacked block of its layers."""
    return plans if isinstance(attention, Layers) else [plans]


def _run(
    block: EncoderBlock,
    x: Array,
    mask: Array | None,
    key: Array | None,
    deterministic: bool,
    plan: Any,
    inputs: dict[str, Any],
) -> tuple[Array, Terms]:
    rngs = None if key is None else nnx.Rngs(dropout=key)
    x = block(by_example(x), mask, deterministic=deterministic, rngs=rngs, plan=plan, **inputs)
    return by_example(x), layer_terms.taken(block)


def _split(block: EncoderBlock, shared: bool) -> tuple[Any, Any, Any]:
    """Static structure, what all layers share, what each has for itself."""
    common: Any = nnx.PathContains("attention_fn") if shared else nnx.Nothing()
    parts: Any = nnx.split(block, common, ...)
    return parts
