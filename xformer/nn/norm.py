"""Normalization of the features of a token that keeps little for the backward pass."""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.attention.engine.mesh_axes import sum_like
from xformer.attention.late import after

Array = jax.Array
NormType = Literal["layer", "rms"]


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` with an exact variance and a derivative that keeps the input alone (Ba et al. 2016, equation 4).

    The variance is the mean of (x - mean)^2, in float32. Flax's default, E[x^2] - E[x]^2, has no correct digit left
    where the mean is some thousand times the spread. There is no derivative in forward mode alone (`jax.jvp`).
    """

    def __init__(self, num_features: int, *, use_fast_variance: bool = False, **kwargs: Any):
        super().__init__(num_features, use_fast_variance=use_fast_variance, **kwargs)

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalizes the last axis of `x`."""
        if mask is not None or self.use_fast_variance or not _over_features(self):
            return super().__call__(x, mask=mask)
        return _apply(self, True, x, self.bias)


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` in float32, whose derivative keeps the input alone (Zhang and Sennrich 2019, equation 4).

    There is none in forward mode alone (`jax.jvp`).
    """

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Normalizes the last axis of `x`."""
        if mask is not None or not _over_features(self):
            return super().__call__(x, mask=mask)
        return _apply(self, False, x, None)


def make_norm(norm_type: NormType, num_features: int, *, epsilon: float = 1e-6, **kwargs: Any) -> LayerNorm | RMSNorm:
    """The norm of that name; `kwargs` are those of its class. ValueError for another name or no positive epsilon."""
    if norm_type not in get_args(NormType):
        raise ValueError(f"norm_type must be 'layer' or 'rms', got {norm_type!r}")
    if not epsilon > 0:
        raise ValueError(f"norm_epsilon must be above 0, got {epsilon!r}")
    return (LayerNorm if norm_type == "layer" else RMSNorm)(num_features, epsilon=epsilon, **kwargs)


def _over_features(norm: Any) -> bool:
    """Whether each token is normalized over its own features, the last axis."""
    return norm.reduction_axes == -1 and norm.feature_axes == -1 and norm.axis_name is None


def _apply(norm: Any, centred: bool, x: Array, bias: Any) -> Array:
    scale = None if norm.scale is None else norm.scale[...]
    bias = None if bias is None else bias[...]
    x, scale, bias = norm.promote_dtype((x, scale, bias), dtype=norm.dtype)
    return _normalize(norm.epsilon, centred, x, scale, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalize(epsilon: float, centred: bool, x: Array, scale: Array | None, bias: Array | None) -> Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias; without `centred` the mean is taken for 0."""
    return _forward(epsilon, centred, x, scale, bias)[0]


def _forward(
    epsilon: float, centred: bool, x: Array, scale: Array | None, bias: Array | None
) -> tuple[Array, tuple[Array, Array, Array, Array | None, Array | None]]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(-1, keepdims=True) if centred else jnp.zeros_like(wide[..., :1])
    inverse = jax.lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + epsilon)
    y = (wide - mean) * (inverse if scale is None else inverse * scale)
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, mean, inverse, scale, bias)


def _backward(
    epsilon: float, centred: bool, kept: tuple[Array, Array, Array, Array | None, Array | None], grad: Array
) -> tuple[Array, Array | None, Array | None]:
    del epsilon
    x, mean, inverse, scale, bias = kept
    mean, inverse, scale = after(grad, (mean, inverse, scale))
    normal = (x.astype(mean.dtype) - mean) * inverse
    grad = grad.astype(mean.dtype)
    tokens = tuple(range(grad.ndim - 1))
    of_scale = None if scale is None else sum_like((grad * normal).sum(tokens), scale).astype(scale.dtype)
    of_bias = None if bias is None else sum_like(grad.sum(tokens), bias).astype(bias.dtype)
    inner = grad if scale is None else grad * scale
    along = normal * (inner * normal).mean(-1, keepdims=True)
    of_x = inverse * (inner - inner.mean(-1, keepdims=True) - along if centred else inner - along)
    return of_x.astype(x.dtype), of_scale, of_bias


_normalize.defvjp(_forward, _backward)
