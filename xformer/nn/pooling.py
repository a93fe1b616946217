"""From one vector a token to one vector a sequence."""

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
