"""What attention is computed in: float32, or float64 for float64 arrays. Half precision is widened, never promoted.

And sums of products, which must be neither slow nor rounded to less.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def compute_dtype(dtype: Any) -> Any:
    """The dtype that arrays of a floating point dtype are computed in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def exact(x: Any) -> Any:
    """A floating point array in its compute dtype; anything else as it is.

    What many examples share is cast so before it is used: then its gradient is summed in that dtype too.
    """
    return x.astype(compute_dtype(x.dtype)) if x is not None and jnp.issubdtype(x.dtype, jnp.floating) else x


def row_products(a: Any, b: Any) -> Any:
    """Sums of products over the last axis, `[..., depth]` and `[..., depth]` -> `[...]`.

    Of a product and then a sum XLA for CPUs makes one operation that takes thirty times as long (JAX 0.10.2).
    """
    return jnp.einsum("...d,...d->...", a, b, precision=jax.lax.Precision.HIGHEST)
