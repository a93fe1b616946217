"""Merges attention over disjoint parts of the keys into attention over all of them, by their log-sum-exp."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Array = jax.Array


def merge_parts(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Attention over the union of parts in which no pair of a query and a key comes twice; exact, and differentiable.

    The softmax over the union weighs each part by its share of the sum of exponentials, as the tiles of an online
    softmax are (Dao et al. 2022, section 3.1).

    Args:
      parts: at least one (output `[..., q_len, num_heads, depth]`, log-sum-exp `[..., q_len, num_heads]`), as
        `Attention.attend_with_lse` gives them, in float32 for an exact result. -inf where a query has nothing in the
        part. A sink is given to one of the parts.

    Returns:
      Output and log-sum-exp of the union. A query with nothing in any part has zeros and -inf.

    Raises:
      ValueError: no parts.
    """
    if not parts:
        raise ValueError("merge_parts needs at least one (output, log-sum-exp), got none")
    outs, lses = zip(*parts, strict=True)
    shares, lse = merge_shares(lses)
    return functools.reduce(jnp.add, map(weighted, shares, outs)), lse


def merge_shares(lses: Sequence[Array]) -> tuple[list[Array], Array]:
    """The share that each part has in the union, from the log-sum-exps of the parts, and that of the union."""
    nothing, zero = jnp.asarray(-jnp.inf, lses[0].dtype), jnp.zeros((), lses[0].dtype)
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, lses))
    top = jnp.where(top == nothing, zero, top)
    shares = [jnp.exp(lse - top) for lse in lses]
    total = functools.reduce(jnp.add, shares)
    seen = total != 0
    total = jnp.where(seen, total, jnp.ones_like(total))
    return [share / total for share in shares], jnp.where(seen, top + jnp.log(total), nothing)


@jax.custom_jvp
def weighted(weight: Array, x: Array) -> Array:
    """`weight [...]` times `x [..., depth]`; the weight's gradient is `row_products`."""
    return weight[..., None] * x


@weighted.defjvp
def _weighted_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (weight, x), (d_weight, d_x) = primals, tangents
    moved = jnp.einsum("...,...d->...d", d_weight, x, precision=jax.lax.Precision.HIGHEST)
    return weighted(weight, x), moved + weight[..., None] * d_x
