"""Memory of a JAX function estimated from its jaxpr: what is alive at once, before anything is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# Whose results are the same bytes, or numbers made where they are used.
_UNSTORED = frozenset(("expand_dims", "iota", "reshape", "squeeze", "stop_gradient"))


def live_bytes(fn: Callable[..., Any], *args: Any) -> int:
    """Bytes of the arguments of `fn(*args)` and of what is alive besides them at its worst moment.

    An estimate: each result lives from the equation that makes it to the last that reads it, in the order of the
    jaxpr; elementwise work takes over the memory of an operand that ends with it. The compiler fuses some of that, and
    stores copies of its own.

    Args:
      fn: any function of arrays (pytrees of arrays) that JAX can trace.
      *args: its arguments, as arrays or `jax.ShapeDtypeStruct`; nothing is computed.
    """
    closed = jax.make_jaxpr(fn)(*args)
    return sum(map(_bytes, (*closed.in_avals, *closed.consts))) + _worst(closed.jaxpr)


def _worst(jaxpr: core.Jaxpr) -> int:
    """Most bytes that one execution of a jaxpr holds besides its arguments."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last |= {var: index for var in eqn.invars if isinstance(var, core.Var)}
    last |= {var: len(jaxpr.eqns) for var in jaxpr.outvars if isinstance(var, core.Var)}
    sizes: dict[Any, int] = {}  # of what was made here and is alive
    live = worst = 0
    for index, eqn in enumerate(jaxpr.eqns):
        made = {var: 0 if eqn.primitive.name in _UNSTORED else _bytes(var.aval) for var in eqn.outvars}
        inside = max((_worst(body) for body in _bodies(eqn.params.values())), default=0)
        ending = {var for var in eqn.invars if isinstance(var, core.Var) and last[var] == index}
        freed = sum(sizes.pop(var, 0) for var in ending)
        new = sum(made.values())
        worst = max(worst, live + max(new, inside) - (min(freed, new) if _elementwise(eqn) else 0))
        sizes |= {var: size for var, size in made.items() if last.get(var, index) > index}
        live += sum(size for var, size in made.items() if last.get(var, index) > index) - freed
    return worst


def _elementwise(eqn: core.JaxprEqn) -> bool:
    """Whether every result has the shape of some operand, so that it can take its place."""
    shapes = {getattr(var.aval, "shape", None) for var in eqn.invars}
    return not list(_bodies(eqn.params.values())) and all(getattr(v.aval, "shape", ()) in shapes for v in eqn.outvars)


def _bodies(values: Any) -> Iterator[core.Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
        elif isinstance(value, list | tuple):
            yield from _bodies(value)


def _bytes(aval: Any) -> int:
    """Of an array or its shape; 0 for keys, whose few bytes do not matter, and for tokens."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * dtype.itemsize
