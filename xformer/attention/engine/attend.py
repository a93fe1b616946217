"""The engine: attention over the tiles of a plan, exact, in memory linear in the length.

FlashAttention's tiling and recomputation (Dao et al. 2022, algorithms 1 and 4) over an arbitrary list of tiles: an
online softmax over the key tiles of a query tile, and a custom VJP that computes the tiles once more from the saved row
statistics. No array of `q_len x kv_len` is made; a mask or bias that the caller passed is read tile by tile.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.device import present
from xformer.attention.dtypes import compute_dtype
from xformer.attention.engine.backward import Given, backward, gradients, zeros
from xformer.attention.engine.forward import forward
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.query_tile import HIDDEN, QueryTiles, merge_heads
from xformer.attention.engine.tile_plan import TilePlan, round_up
from xformer.attention.late import after
from xformer.attention.row_products import row_products

Array = jax.Array
STEP_SCORES = 2**20  # scores in one step of a loop: 4 MiB in float32, which stay in a CPU's caches
# On accelerators steps must be worth their launches: 64 MiB; and no more than 256. On paper (benchmarks/README.md).
LARGE_STEP_SCORES, MOST_STEP_SCORES = 2**24, 2**26


def attend(inputs: Inputs, controls: Controls, settings: Settings) -> tuple[Array, Array]:
    """Attention and the log-sum-exp of the scores, in float32 (float64 for float64 inputs), both differentiable.

    The output is `[batch, q_len, kv_heads, groups, value depth]`. The log-sum-exp, `[batch, q_len, kv_heads, groups]`,
    counts a sink, and is -inf where a query has nothing to attend to.
    """
    q_len, kv_len = inputs.query.shape[1], inputs.key.shape[1]
    plan = controls.plan
    q_pad, kv_pad = round_up(q_len, plan.q_block) - q_len, round_up(kv_len, plan.kv_block) - kv_len
    inputs = inputs._replace(
        query=pad(inputs.query, 1, q_pad),
        key=pad(inputs.key, 1, kv_pad),
        value=pad(inputs.value, 1, kv_pad),
        bias=pad_pairs(inputs.bias, q_pad, kv_pad),
    )
    controls = controls._replace(
        mask=pad_pairs(controls.mask, q_pad, kv_pad),
        q_segments=pad(controls.q_segments, 3, q_pad),
        kv_segments=pad(controls.kv_segments, 4, kv_pad),
        q_positions=pad(controls.q_positions, 3, q_pad),
        kv_positions=pad(controls.kv_positions, 4, kv_pad),
        q_codes=pad(controls.q_codes, 3, q_pad),
        kv_codes=pad(controls.kv_codes, 4, kv_pad),
        q_paths=pad(controls.q_paths, 3, q_pad),
        kv_paths=pad(controls.kv_paths, 4, kv_pad),
        distances=pad_pairs(controls.distances, q_pad, kv_pad),
        offset=jnp.asarray(controls.offset, jnp.int32),
    )
    batch, _, kv_heads, groups, _ = inputs.query.shape
    settings = dataclasses.replace(settings, batch_step=_batch_step(batch, kv_heads * groups, plan))
    settings = for_device(settings)
    out, lse = attend_tiles((settings, kv_len if kv_pad else None), inputs, controls)
    return out[:, :q_len], lse[:, :q_len]


def for_device(settings: Settings) -> Settings:
    """The settings with steps of a size that suits the device."""
    return dataclasses.replace(settings, step_scores=0 if present().platform == "cpu" else LARGE_STEP_SCORES)


def _batch_step(batch: int, num_heads: int, plan: TilePlan) -> int | None:
    """Examples to compute at a time: on a CPU as many as have their tiles in the caches, elsewhere as memory bears.

    All (None) where there is a mesh, along which the batch may be shared out.
    """
    symbolic = not isinstance(batch, int)  # a size that `jax.export` leaves open
    if symbolic or jax.sharding.get_abstract_mesh().size > 1:
        return None
    most = STEP_SCORES if present().platform == "cpu" else MOST_STEP_SCORES
    tile = max(group.key_tiles.shape[3] for group in plan.groups) * plan.kv_block * plan.q_block
    step = max(most // (num_heads * tile), 1)
    step = max(size for size in range(1, min(step, batch) + 1) if batch % size == 0)
    return step if step < batch else None


def pad(x: Array | None, axis: int, amount: int) -> Any:
    """`x` with `amount` zeros at the end of an axis."""
    if x is None or not amount:
        return x
    return jnp.pad(x, [(0, amount if at == axis else 0) for at in range(x.ndim)])


def pad_pairs(x: Array | None, q_pad: int, kv_pad: int) -> Any:
    """A mask or bias `[b, k, g, q_len or 1, kv_len or 1]`, padded where it does not broadcast."""
    if x is None:
        return None
    x = x if x.shape[3] == 1 else pad(x, 3, q_pad)
    return x if x.shape[4] == 1 else pad(x, 4, kv_pad)


def _attend_primal(static: tuple[Settings, int | None], inputs: Inputs, controls: Controls) -> tuple[Array, Array]:
    return _forward(static, inputs, controls)[0]


def _forward(static: Any, inputs: Inputs, controls: Controls) -> tuple[tuple[Array, Array], Any]:
    settings, kv_len = static

    def run(inputs: Inputs, controls: Controls) -> tuple[Array, Array]:
        tiles = QueryTiles(settings, kv_len, inputs, controls)
        parts = [tiles.map(group, functools.partial(forward, tiles, group)) for group in controls.plan.groups]
        out, lse = (tiles.in_order(part) for part in zip(*parts, strict=True))
        return out, lse

    step = settings.batch_step
    if step is None:
        out, lse = run(inputs, controls)
    else:
        share = lambda first: run(inputs.examples(first, step), controls.examples(first, step))
        out, lse = _stacked(jax.lax.map(share, _firsts(inputs, step)))
    return (out, lse), (inputs, controls, None if settings.delta_given else out, lse)


def _backward(static: Any, saved: Any, gradient: tuple[Array, Array]) -> tuple[Inputs, None]:
    inputs, controls, out, lse = saved
    settings, kv_len = static
    d_out, d_lse = gradient
    inputs = after(d_out, inputs._replace(relative=None))._replace(relative=inputs.relative)
    attended = lse != HIDDEN
    lse = jnp.where(attended, lse, jnp.zeros_like(lse))
    delta = -jnp.where(attended, d_lse, jnp.zeros_like(d_lse))
    if out is not None:
        delta = row_products(d_out, out) + delta
    given = Given(d_out, lse, delta)

    def run(inputs: Inputs, controls: Controls, given: Given) -> Inputs:
        tiles = QueryTiles(settings, kv_len, inputs, controls)
        totals, parts = after(d_out, zeros(tiles)), []
        by_head = Given(*(merge_heads(x) for x in given))
        for group in controls.plan.groups:
            totals, part = tiles.scan(group, functools.partial(backward, tiles, group, by_head), totals, d_out)
            parts.append(part)
        return gradients(tiles, given, tiles.in_order(parts), totals)

    step = settings.batch_step
    if step is None:
        return _like(run(inputs, controls, given), inputs), None
    # What all examples share has its gradients summed, in the dtype of the computation; what each has its own stacked.
    one_bias = inputs.bias is not None and inputs.bias.shape[0] == 1
    shared = lambda x: (x.bias if one_bias else None, x.relative, x.sinks)
    zeros_of = lambda x: jnp.zeros(x.shape, compute_dtype(inputs.query.dtype))

    def share(total: Any, first: Array) -> tuple[Any, Inputs]:
        grads = run(inputs.examples(first, step), controls.examples(first, step), given.examples(first, step))
        own = _like(grads, inputs)._replace(relative=None, sinks=None)
        return jax.tree.map(jnp.add, total, shared(grads)), own._replace(bias=None) if one_bias else own

    (bias, relative, sinks), own = jax.lax.scan(share, jax.tree.map(zeros_of, shared(inputs)), _firsts(inputs, step))
    own = _stacked(own)
    own = own._replace(bias=bias if one_bias else own.bias, relative=relative, sinks=sinks)
    return _like(own, inputs), None


def _like(gradients: Inputs, inputs: Inputs) -> Inputs:
    """Gradients in the dtypes of the inputs."""
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, inputs)


def _firsts(inputs: Inputs, step: int) -> Array:
    """The first example of every share of the batch."""
    return jnp.arange(0, inputs.query.shape[0], step)


def _stacked(shares: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), shares)


_attend_vjp = jax.custom_vjp(_attend_primal, nondiff_argnums=(0,))
_attend_vjp.defvjp(_forward, _backward)
# Jitted here so that calls outside jit compile too, and so that layers of one shape share one trace.
attend_tiles = jax.jit(_attend_vjp, static_argnums=0)
