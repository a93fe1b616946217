"""Tokens of every head in an order of its own, known only at run time, and back: rows gathered both ways.

An order has every token at one place, so what is differentiated through it is gathered too: XLA's scatter would take
far longer. Places beyond may be empty: their token is `length`, and what they hold is zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.dtypes import exact
from xformer.attention.engine.mesh_axes import sum_like

Array = jax.Array


def inverse_of(places: Array, size: int, empty: int = 0) -> Array:
    """What is at each of `size` places, int `[..., size]`, where entry i of `[..., length]` is at `places[..., i]`.

    `empty` where there is nothing. Of a permutation it is the inverse.
    """
    flat = places.reshape(-1, places.shape[-1])
    entries = jnp.broadcast_to(jnp.arange(places.shape[-1], dtype=places.dtype), flat.shape)
    out = jnp.full((len(flat), size), empty, places.dtype)
    out = out.at[jnp.arange(len(flat))[:, None], flat].set(entries, mode="promise_in_bounds")
    return out.reshape(*places.shape[:-1], size)


def take_tokens(x: Array, tokens: Array) -> Array:
    """Tokens of every head: `x [batch, length, x_heads, depth]`, int `[batch, heads, ...]` -> `[*tokens, depth]`.

    `heads` is a multiple of `x_heads`; query head h reads head `h // (heads // x_heads)`.
    """
    x_heads, heads = x.shape[2], tokens.shape[1]
    head = (jnp.arange(heads, dtype=jnp.int32) // (heads // x_heads)).reshape(-1, *(1,) * (tokens.ndim - 2))
    return _take_rows(x, tokens * x_heads + head)


@jax.custom_vjp
def to_order(x: Array, order: Array, inverse: Array) -> Array:
    """Tokens by place: `x [batch, length, x_heads, depth]` -> `[batch, heads, orders, places, depth]`.

    `order`, int `[batch, heads, orders, places]`, is the token at each place, and `inverse`, int
    `[batch, heads, orders, length]`, the place of each token.
    """
    return take_tokens(x, order)


@jax.custom_vjp
def to_tokens(x: Array, order: Array, inverse: Array) -> Array:
    """The inverse of `to_order`: `[batch, heads, orders, places, depth]` -> `[batch, length, heads, orders, depth]`."""
    _, heads, orders, size, _ = x.shape
    lists = jnp.arange(heads * orders, dtype=jnp.int32).reshape(heads, orders, 1)
    return _take_rows(x, jnp.moveaxis(lists * size + inverse, 3, 1))


def _take_rows(x: Array, rows: Array) -> Array:
    """Rows `[batch, ..., depth]` of each example's `x [batch, ..., depth]`, all axes between them counted as one."""
    take = lambda x, rows: jnp.take(x.reshape(-1, x.shape[-1]), rows, axis=0, mode="fill", fill_value=0)
    return jax.vmap(take)(x, rows)


def _to_order(x: Array, order: Array, inverse: Array) -> tuple[Array, Any]:
    return to_order(x, order, inverse), (x, order, inverse)


def _of_order(saved: Any, gradient: Array) -> tuple[Array, None, None]:
    x, order, inverse = saved
    by_token = exact(to_tokens(gradient, order, inverse)).sum(3)
    groups = by_token.shape[2] // x.shape[2]
    summed = by_token.reshape(*x.shape[:3], groups, x.shape[3]).sum(3) if groups > 1 else by_token
    return sum_like(summed.astype(x.dtype), x), None, None


def _to_tokens(x: Array, order: Array, inverse: Array) -> tuple[Array, Any]:
    return to_tokens(x, order, inverse), order


def _of_tokens(order: Array, gradient: Array) -> tuple[Array, None, None]:
    _, _, heads, orders, _ = gradient.shape
    lists = jnp.arange(heads * orders, dtype=jnp.int32).reshape(heads, orders, 1)
    return _take_rows(gradient, order * (heads * orders) + lists), None, None


to_order.defvjp(_to_order, _of_order)
to_tokens.defvjp(_to_tokens, _of_tokens)
