"""Whether layers that treat every token by itself see `[tokens, features]` or `[batch, length, features]`."""

from __future__ import annotations

import jax
from jax.sharding import AxisType

Array = jax.Array
WHOLE_TOKENS = frozenset({"data", "fsdp", "tensor"})  # mesh axes along which no sequence is cut


def is_flat(x: Array) -> bool:
    """Whether the tokens of `x` are better one axis than two, batch and length.

    On a CPU XLA lays out the gradients of products with two of them in an order that costs as much as the products.
    Elsewhere it is all the same, and layers keep both. So they do where a mesh may share out both axes: as one they
    could not be shared out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    cut = {axis for axis, size in mesh.shape.items() if size > 1}
    kinds = {*mesh.axis_types, *jax.typeof(x).sharding.mesh.axis_types}
    return jax.default_backend() == "cpu" and cut <= WHOLE_TOKENS and AxisType.Explicit not in kinds


def flatten(x: Array) -> Array:
    """`[batch, length, features]` as `[tokens, features]` where that is better."""
    return x.reshape(-1, x.shape[-1]) if x.ndim > 2 and is_flat(x) else x
