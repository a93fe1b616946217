"""Normalization of the features of a token that keeps little for the backward pass."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
from flax import nnx

Array = jax.Array
NormType = Literal["layer", "rms"]


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` with an exact variance, computed again for its derivative.

    The variance is the mean of (x - mean)^2, in float32. Flax's default, E[x^2] - E[x]^2, has no correct digit left
    where the mean is some thousand times the spread. The derivative would else keep three arrays as large as the input.
    """

    def __init__(self, num_features: int, *, use_fast_variance: bool = False, **kwargs: Any):
        super().__init__(num_features, use_fast_variance=use_fast_variance, **kwargs)

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalizes the last axis of `x`."""
        graph, state = nnx.split(self)
        norm = super(LayerNorm, type(self)).__call__
        return jax.checkpoint(lambda state, x: norm(nnx.merge(graph, state), x, mask=mask))(state, x)


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` (Zhang and Sennrich 2019, equation 4), in float32 and computed again for its derivative."""

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Normalizes the last axis of `x`."""
        graph, state = nnx.split(self)
        norm = super(RMSNorm, type(self)).__call__
        return jax.checkpoint(lambda state, x: norm(nnx.merge(graph, state), x, mask=mask))(state, x)


def make_norm(norm_type: NormType, num_features: int, *, epsilon: float = 1e-6, **kwargs: Any) -> LayerNorm | RMSNorm:
    """The norm of that name; `kwargs` are those of its class. ValueError for another name or no positive epsilon."""
    if norm_type not in get_args(NormType):
        raise ValueError(f"norm_type must be 'layer' or 'rms', got {norm_type!r}")
    if not epsilon > 0:
        raise ValueError(f"norm_epsilon must be above 0, got {epsilon!r}")
    return (LayerNorm if norm_type == "layer" else RMSNorm)(num_features, epsilon=epsilon, **kwargs)
