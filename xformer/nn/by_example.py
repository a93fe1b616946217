"""Keeps activations cut by example where a mesh shares out the batch."""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xformer.attention.kernels.meshes import BATCH

Array = jax.Array


def by_example(x: Array) -> Array:
    """`x` `[batch, ...]`, cut along the batch by the axes `data` and `fsdp` of the mesh in scope that divide it.

    `fsdp` cuts parameters too, by another dimension. Left to itself a compiler may cut activations as the parameters
    that they meet, and then moves activations of all examples at every layer, which are many, instead of gathering the
    layer's parameters, which are few. Where there is no such axis, or somebody else sees to it, `x` itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(x.shape[0], int) or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return x
    own = tuple(axis for axis in BATCH if mesh.shape.get(axis, 1) > 1)
    if not own or x.shape[0] % math.prod(mesh.shape[axis] for axis in own):
        return x
    return jax.lax.with_sharding_constraint(x, P(own, *[P.UNCONSTRAINED] * (x.ndim - 1)))
