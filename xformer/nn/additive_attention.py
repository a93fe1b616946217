"""The attention of a recurrent decoder: Bahdanau et al. 2015, appendix A.1.2."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.nn.pooling import masked_softmax

Array = jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["hidden", "key", "mask"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Annotations:
    """What a decoder reads of sources. A pytree.

    Attributes:
      hidden: `[sources, length, features]`.
      key: `[sources, length, width]`, what scores are made of.
      mask: bool `[sources, length]`, True where a token is real.
    """

    hidden: Array
    key: Array
    mask: Array


class AdditiveAttention(nnx.Module):
    """A mean of a source's vectors with the weights softmax_j v . tanh(W s + U h_j).

    Args:
      state_dim: features of the decoder's state s. features: of a vector h_j. width: of their sum.
      dtype: of the computation; scores are float32. param_dtype: of the parameters. rngs: stream `params`.
    """

    def __init__(
        self,
        state_dim: int,
        features: int,
        width: int,
        *,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query = nnx.Linear(state_dim, width, **dtypes)
        self.key = nnx.Linear(features, width, use_bias=False, **dtypes)
        self.score = nnx.Linear(width, 1, use_bias=False, **dtypes)

    def annotations(self, hidden: Array, mask: Array | None = None) -> Annotations:
        """What stays the same for all steps, of `[sources, length, features]` and bool `[sources, length]`."""
        mask = jnp.ones(hidden.shape[:2], bool) if mask is None else mask > 0
        return Annotations(hidden, self.key(hidden), mask)

    def __call__(self, state: Array, source: Annotations, allowed: Array | None = None) -> Array:
        """The mean for each state.

        Args:
          state: `[batch, state_dim]`; several states of each source stand one after the other.
          source: of `sources`, which divides `batch`.
          allowed: bool `[batch, length]`, True at the tokens of its own text, where several share a row; None: all.

        Returns:
          `[batch, features]`; zeros where there is no token to read.
        """
        sources, length = source.mask.shape
        query_SxKxW = self.query(state).reshape(sources, -1, self.query.out_features)
        hidden_SxKxJxW = jnp.tanh(query_SxKxW[:, :, None] + source.key[:, None])
        scores_SxKxJ = self.score(hidden_SxKxJxW)[..., 0].astype(jnp.float32)
        real_SxKxJ = jnp.broadcast_to(source.mask[:, None], scores_SxKxJ.shape)
        if allowed is not None:
            real_SxKxJ &= allowed.reshape(sources, -1, length)
        weights_SxKxJ = masked_softmax(scores_SxKxJ, real_SxKxJ).astype(source.hidden.dtype)
        return jnp.einsum("skj,sjd->skd", weights_SxKxJ, source.hidden).reshape(len(state), -1)
