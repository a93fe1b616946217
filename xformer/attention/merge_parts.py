"""Merges attention over disjoint parts of the keys into attention over all of them, by their log-sum-exp."""

from __future__ import annotations

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
    outs, lses = (jnp.stack(arrays) for arrays in zip(*parts, strict=True))
    nothing, zero = jnp.asarray(-jnp.inf, lses.dtype), jnp.zeros((), lses.dtype)
    top = jax.lax.stop_gradient(lses.max(0))
    top = jnp.where(top == nothing, zero, top)
    shares = jnp.exp(lses - top)
    total = shares.sum(0)
    seen = total != 0
    total = jnp.where(seen, total, jnp.ones_like(total))
    out = (shares[..., None] * outs).sum(0) / total[..., None]
    return out, jnp.where(seen, top + jnp.log(total), nothing)
