"""From one vector a token to one vector a sequence, or to those of some tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

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


def masked_softmax(scores: Array, real: Array) -> Array:
    """The softmax of float32 scores `[..., length]` over those that are real; 0 at the others, and where none is."""
    return jnp.where(real, jax.nn.softmax(jnp.where(real, scores, jnp.finfo(jnp.float32).min)), 0)


class AttentionPooling(nnx.Module):
    """A mean of the real tokens, weighted by a trained query: Yang et al. 2016, equations 5 to 7.

    Args:
      width: features of a token.
      param_dtype: of the parameters. rngs: stream `params` draws them.
    """

    def __init__(self, width: int, *, param_dtype: Dtype = jnp.float32, rngs: nnx.Rngs):
        dense: dict[str, Any] = {"dtype": jnp.float32, "param_dtype": param_dtype, "rngs": rngs}
        self.hidden = nnx.Linear(width, width, **dense)
        self.query = nnx.Linear(width, 1, use_bias=False, **dense)

    def weights(self, x: Array, mask: Array | None) -> Array:
        """What each token counts, float32 `[batch, length]`: sums to 1 over real tokens, all 0 where there is none."""
        scores_BxT = self.query(jnp.tanh(self.hidden(x)))[..., 0]
        return jax.nn.softmax(scores_BxT) if mask is None else masked_softmax(scores_BxT, mask > 0)

    def __call__(self, x: Array, mask: Array | None) -> Array:
        """`[batch, length, width]` to float32 `[batch, width]`."""
        return jnp.einsum("bt,btw->bw", self.weights(x, mask), x.astype(jnp.float32))
