"""Feature maps: what turns a product of a query and a key into a product of their features.

A map is a frozen dataclass. Queries of a variant that divides by the sum of the weights may be multiplied by any number
above 0, and so may all keys together: the maps use it to keep their exponentials within float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Operands = dict[str, Array]  # arrays that a map needs and nothing is differentiated by


@dataclasses.dataclass(frozen=True)
class FeatureMap:
    """The features of a vector are the vector itself, times `scale` on the side of the queries."""

    scale: float = 1.0

    def size(self, head_dim: int) -> int:
        """Number of features."""
        return head_dim

    def flops(self, head_dim: int) -> int:
        """FLOPs of the matrix products for the features of one vector."""
        return 0

    def queries(self, x: Array, operands: Operands, precision: Any) -> Array:
        """Features of queries `[batch, kv_heads, groups, tokens, head_dim]`, with `size` for `head_dim`."""
        return x * self.scale

    def keys(self, x: Array, operands: Operands, precision: Any) -> tuple[Array, Array | None]:
        """Features of keys `[batch, kv_heads, tokens, head_dim]`, and logarithms `[batch, kv_heads, tokens]` or None.

        The features are then to be multiplied by the exponentials of the logarithms, which have no gradient.
        """
        return x, None


@dataclasses.dataclass(frozen=True)
class EluPlusOne(FeatureMap):
    """elu(x) + 1 (Katharopoulos et al. 2020, equation 7); a scale of the weights cancels in their normalisation."""

    def queries(self, x: Array, operands: Operands, precision: Any) -> Array:
        # Where all features of a query are exponentials, the largest is made 1.
        zero = jnp.zeros((), x.dtype)
        return _elu_plus_one(x, jax.lax.stop_gradient(jnp.minimum(x.max(-1, keepdims=True), zero)))

    def keys(self, x: Array, operands: Operands, precision: Any) -> tuple[Array, None]:
        return _elu_plus_one(x, jnp.zeros((), x.dtype)), None


def _elu_plus_one(x: Array, top: Array) -> Array:
    zero = jnp.zeros((), x.dtype)
    return jnp.where(x > 0, x + jnp.ones((), x.dtype), jnp.exp(jnp.minimum(x, zero) - top))


@dataclasses.dataclass(frozen=True)
class Relu(FeatureMap):
    """relu(w x) for random directions w (Choromanski et al. 2021, equation 5 with f = ReLU and h = 1).

    Operands: `projection`, `[num_features, head_dim]`.
    """

    num_features: int = 0

    def size(self, head_dim: int) -> int:
        return self.num_features

    def flops(self, head_dim: int) -> int:
        return 2 * self.num_features * head_dim

    def queries(self, x: Array, operands: Operands, precision: Any) -> Array:
        return jax.nn.relu(self.projected(x, operands, precision))

    def keys(self, x: Array, operands: Operands, precision: Any) -> tuple[Array, Array | None]:
        return jax.nn.relu(self.projected(x, operands, precision)), None

    def projected(self, x: Array, operands: Operands, precision: Any) -> Array:
        return jnp.einsum("...d,fd->...f", x, operands["projection"].astype(x.dtype), precision=precision)


@dataclasses.dataclass(frozen=True)
class PositiveRandom(Relu):
    """exp(w x - |x|^2 / 2), an unbiased estimate of exp(scale q k) (Choromanski et al. 2021, lemma 1).

    Queries and keys are multiplied by the root of `scale` first. Operands: `projection`, `[num_features, head_dim]`,
    and where it does not matter where tokens stand `top`, `[batch, kv_heads, num_features]`: the largest exponent of
    each feature among the keys. Otherwise that of each key is divided out, and given as its logarithm.
    """

    def queries(self, x: Array, operands: Operands, precision: Any) -> Array:
        exponents = self.projected(x * self.scale**0.5, operands, precision)  # the square is the same for all features
        if "top" in operands:
            exponents = exponents + operands["top"][:, :, None, None]
        return jnp.exp(exponents - jax.lax.stop_gradient(exponents.max(-1, keepdims=True)))

    def keys(self, x: Array, operands: Operands, precision: Any) -> tuple[Array, Array | None]:
        exponents = self.exponents(x, operands, precision)
        if "top" in operands:
            return jnp.exp(exponents - operands["top"][:, :, None]), None
        top = jax.lax.stop_gradient(exponents.max(-1))
        return jnp.exp(exponents - top[..., None]), top

    def exponents(self, x: Array, operands: Operands, precision: Any) -> Array:
        """Logarithms of the features of keys."""
        x = x * self.scale**0.5
        half = jnp.asarray(0.5, x.dtype)
        return self.projected(x, operands, precision) - half * (x * x).sum(-1, keepdims=True)
