"""Dropout of hidden activations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

from xformer.attention.bernoulli import bernoulli

Array = jax.Array


class Dropout(nnx.Dropout):
    """`nnx.Dropout` with the same masks (Srivastava et al. 2014), which take a fraction of the time on CPUs."""

    def __call__(self, inputs: Array, *, deterministic: bool | None = None, rngs: Any = None) -> Array:
        """Sets a share `rate` of `inputs` to zero and divides the rest by 1 - rate; as they are if `deterministic`."""
        off = self.deterministic if deterministic is None else deterministic
        stream = self.rngs if rngs is None else rngs
        explicit = AxisType.Explicit in jax.typeof(inputs).sharding.mesh.axis_types
        if off is not False or self.rate in (0, 1) or self.broadcast_dims or stream is None or explicit:
            return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
        if isinstance(stream, nnx.Rngs):
            stream = stream[self.rng_collection]
        key = stream() if isinstance(stream, nnx.RngStream) else stream
        keep = 1.0 - self.rate
        return jnp.where(bernoulli(key, keep, inputs.shape), inputs / keep, jnp.zeros_like(inputs))
