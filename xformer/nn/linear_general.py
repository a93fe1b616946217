"""A dense layer over several axes, computed as one product of two matrices where that is faster."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.nn import tokens

Array = jax.Array


class LinearGeneral(nnx.LinearGeneral):
    """`nnx.LinearGeneral` of the last axes of its input; see `xformer.nn.tokens.is_flat`."""

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Maps `[..., *in_features]` to `[..., *out_features]`."""
        if out_sharding is not None or not tokens.is_flat(inputs):
            return super().__call__(inputs, out_sharding)
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        num_in = math.prod(self.in_features)
        x = jnp.matmul(x.reshape(-1, num_in), kernel.reshape(num_in, -1), precision=self.precision)
        if bias is not None:
            x = x + bias.reshape(-1)
        return x.reshape(*inputs.shape[: inputs.ndim - len(self.in_features)], *self.out_features)
