"""A guard for gradients that are NaN or infinite: they reach what a query saw, and nothing that was hidden from it.

The transpose of `weights @ value` multiplies the output's gradient by the weight of every pair, and zero times NaN is
NaN. Dense attention passes its output through `guard`, which is the identity in the forward pass and in forward mode.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Array = jax.Array


def guard(out: Array, seen: Array) -> Array:
    """Returns `out [..., head_dim]` as it is.

    Where the gradient that comes back for a row is not finite, `out` gets zero in its place and `seen`, of the same
    shape, gets NaN: a number that was computed, by `where` and sums alone, from what the row saw.
    """
    return _guard.bind(out, seen)


def _transpose(d_out: Array, out: Any, seen: Any) -> tuple[Array, Array]:
    finite = jnp.isfinite(d_out).all(-1, keepdims=True)
    zero, nan = jnp.zeros((), d_out.dtype), jnp.full((), jnp.nan, d_out.dtype)
    return jnp.where(finite, d_out, zero), jnp.broadcast_to(jnp.where(finite, zero, nan), d_out.shape)


def _batched(arrays: Any, axes: Any) -> tuple[Array, int]:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    first = lambda x, axis: jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
    return guard(*(first(x, axis) for x, axis in zip(arrays, axes, strict=True))), 0


_guard = Primitive("gradient_guard")
_guard.def_impl(lambda out, seen: out)
_guard.def_abstract_eval(lambda out, seen: out)
ad.deflinear2(_guard, _transpose)
batching.primitive_batchers[_guard] = _batched
mlir.register_lowering(_guard, mlir.lower_fun(lambda out, seen: out, multiple_results=False))
