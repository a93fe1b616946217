"""implementation="pallas" of linear attention: chunks of tokens on GPUs, through `kernels.state_kernels`.

For calls in which it matters where tokens stand. Otherwise linear attention is two matrix products, which need no
kernel. Features are computed outside, and are what is differentiated with respect to.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from xformer.attention.dtypes import exact
from xformer.attention.kernels import meshes
from xformer.attention.kernels.chunks import Blocks
from xformer.attention.pattern import Full
from xformer.attention.state.attend import ordered
from xformer.attention.state.features import Operands, PositiveRandom
from xformer.attention.state.operands import Controls, Inputs, Settings

Array = jax.Array
CUTS_ITSELF, TAKES_OFFSETS = False, False  # what `kernels.meshes` needs to know


def refusals(settings: Settings, inputs: Inputs, controls: Controls) -> list[str]:
    """Why the kernels can't do a call; empty where they can. Only shapes and dtypes are read."""
    reasons = []
    if inputs.query.dtype == jnp.float64:
        reasons.append("computes in float32, got float64")
    if not ordered(settings, controls):
        reasons.append("neither causal nor with decays or segments it is two matrix products, which need no kernel")
    elif isinstance(settings.features, PositiveRandom):
        reasons.append('it carries no logarithms of keys (Performer with kernel="softmax")')
    if controls.offset is not None:
        reasons.append("it takes as many queries as keys, side by side")
    return reasons


def attend(settings: Settings, inputs: Inputs, operands: Operands, controls: Controls) -> tuple[Array, Array | None]:
    """What `state.attend.attend` gives; on the shards of a mesh in scope, each its own."""
    query, key, value = _features(settings, inputs, operands, controls.real)
    logs = None if settings.decays is None else jnp.log(jnp.asarray(settings.decays, jnp.float32))
    segments: tuple[Array | None, Array | None] = None, None
    if controls.kv_segments is not None:
        q_segments = controls.kv_segments if controls.q_segments is None else controls.q_segments
        segments = q_segments.astype(jnp.int32), controls.kv_segments.astype(jnp.int32)
    layout = meshes.layout(inputs, controls, Full(), None)  # type: ignore[arg-type]
    run = functools.partial(_attend, settings)
    if layout is not None:
        batch, heads = layout.batch or None, layout.heads or None
        if layout.repeats > 1:  # so that there are enough key heads to cut
            key, value = (jnp.repeat(x, layout.repeats, axis=2) for x in (key, value))
            logs = None if logs is None else jnp.repeat(logs, layout.repeats)
        arrays = P(batch, None, heads)
        of_segments = tuple(None if x is None else P(batch if x.shape[0] > 1 else None) for x in segments)
        specs = (arrays, arrays, arrays, None if logs is None else P(heads), of_segments)
        out_specs = (arrays, arrays if settings.normalized else None)
        run = jax.shard_map(run, in_specs=specs, out_specs=out_specs, axis_names=set(layout.axes), check_vma=False)
    total, norm = run(query, key, value, logs, segments)
    kv_heads, groups = inputs.query.shape[2:4]
    split = lambda x: x.reshape(*x.shape[:2], kv_heads, groups, *x.shape[3:])
    return split(total), None if norm is None else split(norm)


def _features(settings: Settings, inputs: Inputs, operands: Operands, real: Array | None) -> tuple[Array, Array, Array]:
    """Of queries `[batch, length, num_heads, size]` and keys `[batch, length, kv_heads, size]`; and the values."""
    query, key = jnp.moveaxis(exact(inputs.query), 1, 3), jnp.moveaxis(exact(inputs.key), 1, 2)
    query = jnp.moveaxis(settings.features.queries(query, operands, settings.precision), 3, 1)
    key, logs = settings.features.keys(key, operands, settings.precision)
    assert logs is None
    key = jnp.moveaxis(key, 2, 1)
    if real is not None:
        key = jnp.where(real[..., None], key, jnp.zeros((), key.dtype))
    return query.reshape(*query.shape[:2], -1, query.shape[-1]), key, exact(inputs.value)


@functools.partial(jax.jit, static_argnums=0)
def _attend(
    settings: Settings, query: Array, key: Array, value: Array, logs: Array | None, segments: Any
) -> tuple[Array, Array | None]:
    from xformer.attention.kernels.state_kernels import Extras, Order  # Pallas takes a while to import

    extras = Extras(logs, *segments)
    orders = [Order(later=False, own=True, precision=settings.precision)]
    if not settings.causal:
        orders.append(Order(later=True, own=False, precision=settings.precision))

    def both(value: Array) -> Array:
        return functools.reduce(jnp.add, (_sums(order, extras, query, key, value) for order in orders))

    norm = None
    if settings.normalized:
        norm = both(jnp.ones((*value.shape[:3], 1), value.dtype))[..., 0]
    return both(value), norm


def kernel_flops(settings: Settings, batch: int, length: int, kv_heads: int, groups: int, size: int, depth: int) -> int:
    """Of the forward pass without the features, padding counted as executed."""
    total = 0
    for values in (depth, 1) if settings.normalized else (depth,):
        blocks = Blocks(length, size, values)
        total += batch * kv_heads * blocks.length * (blocks.enter_flops + groups * blocks.read_flops)
    return total if settings.causal else 2 * total


def _sums_primal(order: Any, extras: Any, query: Array, key: Array, value: Array) -> Array:
    from xformer.attention.kernels.state_kernels import weighted_sums

    return weighted_sums(order, extras, query, key, value)


def _forward(order: Any, extras: Any, query: Array, key: Array, value: Array) -> tuple[Array, Any]:
    return _sums_primal(order, extras, query, key, value), (extras, query, key, value)


def _backward(order: Any, saved: Any, grad: Array) -> tuple[None, Array, Array, Array]:
    """Each gradient is such a sum again: weights are products of one pair, and of the other two the value is made."""
    extras, query, key, value = saved
    d_query = _sums(order, extras, grad, value, key)
    d_key = _sums(order.reversed, extras.swapped, value, grad, query)
    d_value = _sums(order.reversed, extras.swapped, key, query, grad)
    return None, _of_heads(d_query, query), _of_heads(d_key, key), _of_heads(d_value, value)


def _of_heads(grad: Array, x: Array) -> Array:
    """A gradient by head of the output, summed for the heads of `x`."""
    return grad.reshape(*grad.shape[:2], x.shape[2], -1, grad.shape[3]).sum(3)


_sums: Any = jax.custom_vjp(_sums_primal, nondiff_argnums=(0,))
_sums.defvjp(_forward, _backward)
