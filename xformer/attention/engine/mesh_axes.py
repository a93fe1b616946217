"""What loops and gradients need within `jax.shard_map`, and on meshes whose axes are explicit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Array = jax.Array


def axes_of(*trees: Any) -> frozenset[str]:
    """Mesh axes that any of the arrays varies over, within `jax.shard_map`."""
    return frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(trees)))


def varying(x: Any, axes: frozenset[str]) -> Any:
    """Arrays that vary over mesh axes, as the carry of a loop over such arrays must."""

    def cast(x: Array) -> Array:
        missing = tuple(axes - axes_of(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, x)


def sum_like(grad: Array, x: Array) -> Array:
    """A gradient summed over the mesh axes that `x` does not vary over: what all devices share has one gradient."""
    axes = tuple(axes_of(grad) - axes_of(x))
    return jax.lax.psum(grad, axes) if axes else grad


def automatic(attend: Callable[[Any, Any], Any], call: Any, params: Any, *, with_lse: bool = False) -> Any:
    """`attend(call, params)`, leaving explicit mesh axes to the compiler; the output lies as the query does.

    `with_lse`: it gives a tuple of the output and the log-sum-exp, which has all axes of the query but the last.
    """
    where = jax.typeof(call.query).sharding
    if AxisType.Explicit not in where.mesh.axis_types:
        return attend(call, params)
    arrays = {
        name: x for name, x in vars(call).items() if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))
    }
    run = lambda arrays, params: attend(dataclasses.replace(call, **arrays), params)
    outputs = (where, NamedSharding(where.mesh, PartitionSpec(*where.spec[:3]))) if with_lse else where
    return jax.sharding.auto_axes(run, out_sharding=outputs)(arrays, params)
