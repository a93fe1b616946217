"""What attention is computed in: float32, or float64 for float64 arrays. Half precision is widened, never promoted."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def compute_dtype(dtype: Any) -> Any:
    """The dtype that arrays of a floating point dtype are computed in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def exact(x: Any) -> Any:
    """A floating point array in its compute dtype; anything else as it is.

    What many examples share is cast so before it is used: then its gradient is summed in that dtype too.
    """
    return x.astype(compute_dtype(x.dtype)) if x is not None and jnp.issubdtype(x.dtype, jnp.floating) else x
