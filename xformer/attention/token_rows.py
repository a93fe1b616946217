"""Tokens of every head in an order of its own, known only at run time, and back: rows gathered both ways.

It is known where every token stands, so what is differentiated through an order is gathered too: XLA's scatter would
take far longer. Places beyond may be empty: their token is `length`, and what they hold is zero.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.dtypes import exact
from xformer.attention.engine.mesh_axes import sum_like
from xformer.attention.engine.tile_plan import round_up

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


def sorted_by(bucket: Array, num_buckets: int) -> tuple[Array, Array]:
    """Tokens by bucket and position: the order and its inverse, int32 like `bucket`, int `[..., length]`."""
    length = bucket.shape[-1]
    if num_buckets * length < 2**31:  # one number says both: much the faster to sort
        order = jnp.sort(bucket * length + jnp.arange(length, dtype=jnp.int32), axis=-1) % length
    else:
        order = jnp.argsort(bucket, axis=-1, stable=True).astype(jnp.int32)
    return order, inverse_of(order, length)


def num_places(length: int, num_buckets: int, tile: int) -> int:
    """Places of `at_tiles`."""
    return round_up(length + (num_buckets - 1) * (tile - 1), tile)


def at_tiles(order: Array, inverse: Array, bucket: Array, num_buckets: int, tile: int) -> tuple[Array, Array]:
    """`sorted_by` with every bucket at the beginning of a tile.

    So where in a tile a token stands, and how its sums are rounded, is decided by the tokens before it in its bucket.

    Args:
      order, inverse, bucket: int `[batch, heads, orders, length]`.

    Returns:
      The token at each place, `[batch, heads, orders, places]`, `length` where none is, and the place of each token.
    """
    length, ids = order.shape[-1], jnp.arange(num_buckets, dtype=jnp.int32)
    in_order = jnp.take_along_axis(bucket, order, -1, mode="clip")
    find = functools.partial(jnp.searchsorted, v=ids)
    for _ in range(3):
        find = jax.vmap(find)
    start = find(in_order).astype(jnp.int32)
    fill = -jnp.diff(start, axis=-1) % tile
    shift = jnp.pad(jnp.cumsum(fill, -1, dtype=jnp.int32), [(0, 0)] * 3 + [(1, 0)])
    places = inverse + jnp.take_along_axis(shift, bucket, -1, mode="clip")
    return inverse_of(places, num_places(length, num_buckets, tile), length), places


def take_tokens(x: Array, tokens: Array) -> Array:
    """Tokens of every head: `x [batch, length, x_heads, depth]`, int `[batch, heads, ...]` -> `[*tokens, depth]`.

    `heads` is a multiple of `x_heads`; query head h reads head `h // (heads // x_heads)`.
    """
    return _take_rows(x, _rows_of_tokens(tokens, x.shape[2]))


def to_order(x: Array, order: Array, inverse: Array) -> Array:
    """Tokens by place: `x [batch, length, x_heads, depth]` -> `[batch, heads, orders, places, depth]`.

    `order`, int `[batch, heads, orders, places]`, is the token at each place, and `inverse`, int
    `[batch, heads, orders, length]`, the place of each token. Query head h reads head `h // (heads // x_heads)`.
    """
    return take_rows(x, _rows_of_tokens(order, x.shape[2]), _rows_of_places(order, inverse))


def to_tokens(x: Array, order: Array, inverse: Array) -> Array:
    """The inverse of `to_order`: `[batch, heads, orders, places, depth]` -> `[batch, length, heads, orders, depth]`."""
    heads, orders = order.shape[1:3]
    lists = jnp.arange(heads * orders, dtype=jnp.int32).reshape(heads, orders, 1)
    return sum_rows(x, _rows_of_places(order, inverse)[..., None], order * (heads * orders) + lists)


@jax.custom_vjp
def take_rows(x: Array, rows: Array, back: Array) -> Array:
    """Rows of each example's `x [batch, ..., depth]`, all axes between them counted as one, `[*rows, depth]`.

    Args:
      x: has n rows.
      rows: int `[batch, ...]`, the row at each place; n or more where there is none, which is zero.
      back: int `[batch, ...]`, the places of each row in turn, all axes of `rows` but the first counted as one; as many
        of every row, and all exist. So the gradient is gathered.
    """
    return _take_rows(x, rows)


def _take_rows(x: Array, rows: Array) -> Array:
    """With a row of zeros at the end, which is less than to select afterwards."""
    x = jax.vmap(lambda x: x.reshape(-1, x.shape[-1]))(x)
    return gather_rows(jnp.pad(x, ((0, 0), (0, 1), (0, 0))), rows)


def gather_rows(x: Array, rows: Array) -> Array:
    """`take_rows` of rows that all exist (of others anything), where nothing is differentiated."""
    take = lambda x, rows: jnp.take(x.reshape(-1, x.shape[-1]), rows, axis=0, mode="clip")
    return take(x[0], rows[0])[None] if x.shape[0] == 1 else jax.vmap(take)(x, rows)  # on CPUs faster unmapped


@jax.custom_vjp
def sum_rows(x: Array, rows: Array, back: Array) -> Array:
    """Sums of rows of each example's `x [batch, ..., depth]`, all axes between counted as one, `[*rows, depth]`.

    The transpose of `take_rows`, which is given the same arrays in the other order.

    Args:
      x: has n rows.
      rows: int `[batch, ..., times]`, the rows of each sum; all exist.
      back: int `[batch, ...]`, the sum that each row is part of, all axes of `rows` between its first and its last
        counted as one; their number or more where it is part of none.
    """
    # Gathered and added one by one: so no array holds all that is to be summed.
    parts = (exact(gather_rows(x, rows[..., time])) for time in range(rows.shape[-1]))
    return functools.reduce(jnp.add, parts).astype(x.dtype)


def _of_taken(saved: Any, gradient: Array) -> tuple[Array, None, None]:
    x, rows, back = saved
    num_rows = math.prod(x.shape[1:-1])
    summed = sum_rows(gradient, jax.vmap(lambda back: back.reshape(num_rows, -1))(back), rows)
    return sum_like(summed.astype(x.dtype).reshape(x.shape), x), None, None


def _of_sums(saved: Any, gradient: Array) -> tuple[Array, None, None]:
    x, rows, back = saved
    return sum_like(take_rows(gradient, back, rows).reshape(x.shape), x), None, None


take_rows.defvjp(lambda *given: (take_rows(*given), given), _of_taken)
sum_rows.defvjp(lambda *given: (sum_rows(*given), given), _of_sums)


def _rows_of_tokens(tokens: Array, x_heads: int) -> Array:
    """Rows of `[length, x_heads]`, of tokens of every head, int `[batch, heads, ...]`."""
    heads = tokens.shape[1]
    head = jnp.arange(heads, dtype=jnp.int32) // (heads // x_heads)
    return tokens * x_heads + head.reshape(-1, *(1,) * (tokens.ndim - 2))


def _rows_of_places(order: Array, inverse: Array) -> Array:
    """Rows of `[heads, orders, places]`, of tokens in turn, `[batch, length, heads, orders]`."""
    _, heads, orders, size = order.shape
    lists = jnp.arange(heads * orders, dtype=jnp.int32).reshape(heads, orders, 1)
    return jnp.moveaxis(lists * size + inverse, 3, 1)
