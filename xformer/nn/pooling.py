"""From one vector a token to one vector a sequence, or to those of some tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def masked_mean(x: Array, mask: Array | None) -> Array:
    """The mean over real tokens, `[batch, length, width]` to `[batch, width]`; zero where there is none."""
    if mask is None:
        return x.mean(axis=1)
    real_BxTx1 = (mask > 0)[:, :, None]
    return jnp.where(real_BxTx1, x, 0).sum(axis=1) / jnp.maximum(real_BxTx1.sum(axis=1), 1)


def at_places(x: Array, places: Array | None) -> Array:
    """The vectors at some positions, `[batch, length, width]` to `[batch, places, width]`; None: all of them.

    places: int `[batch, places]`, from 0.
    """
    return x if places is None else jnp.take_along_axis(x, places[..., None], axis=1)
