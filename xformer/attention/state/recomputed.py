"""A loop whose backward pass keeps what is carried into each step, and computes the step again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

Body = Callable[..., tuple[Any, Any]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan(body: Body, carry: Any, xs: Any, shared: Any, marks: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` of `body(carry, x, shared, mark) -> (carry, y)`.

    Args:
      body: hashable; equal bodies share a trace.
      carry: floating point arrays, differentiated.
      xs: floating point arrays with a leading axis of steps, differentiated.
      shared: what every step is given, of any dtype and not differentiated.
      marks: arrays with a leading axis of steps, of any dtype and not differentiated.

    Returns:
      The last carry, and the results of the steps stacked.
    """
    return jax.lax.scan(lambda carry, x: body(carry, x[0], shared, x[1]), carry, (xs, marks))


def _forward(body: Body, carry: Any, xs: Any, shared: Any, marks: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        following, y = body(carry, x[0], shared, x[1])
        return following, (y, carry)

    last, (ys, carries) = jax.lax.scan(step, carry, (xs, marks))
    return (last, ys), (carries, xs, shared, marks)


def _backward(body: Body, saved: Any, gradient: Any) -> Any:
    carries, xs, shared, marks = saved

    def step(d_carry: Any, at: Any) -> Any:
        carry, x, mark, d_y = at
        _, pull = jax.vjp(lambda carry, x: body(carry, x, shared, mark), carry, x)
        return pull((d_carry, d_y))

    d_last, d_ys = gradient
    d_carry, d_xs = jax.lax.scan(step, d_last, (carries, xs, marks, d_ys), reverse=True)
    return d_carry, d_xs, None, None


scan.defvjp(_forward, _backward)
