"""Keeps compilers from computing early what only the backward pass needs, and so from keeping it till then."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from xformer.attention.device import present

Array = jax.Array


def after(grad: Array, arrays: Any) -> Any:
    """Floating `arrays` as they are, but not before `grad` is there: each plus a zero that is made of it.

    On CPUs XLA orders a program so that most of it can run at once. What the backward pass computes of kept arrays
    alone, even its zeros to start sums from, is then computed for all layers before the first layer's gradient, and
    memory holds all of it. A barrier does not help: it is gone when the order is found. On other devices, and where a
    mesh shares out `grad`, the arrays themselves.
    """
    explicit = AxisType.Explicit in jax.typeof(grad).sharding.mesh.axis_types
    if present().platform != "cpu" or explicit or jax.sharding.get_abstract_mesh().size > 1 or not grad.size:
        return arrays
    first = grad.reshape(-1)[0]
    zero = jnp.isnan(first) & jnp.isinf(first)  # false, which no compiler knows
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), arrays)
