"""The position-wise feed-forward layer of a transformer block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.nn.check import check_rates, check_sizes
from xformer.nn.dropout import Dropout
from xformer.nn.tokens import flatten

Array = jax.Array
Activation = Literal["gelu", "gelu_exact", "relu", "silu", "swiglu", "geglu"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": nnx.gelu,
    "gelu_exact": functools.partial(nnx.gelu, approximate=False),
    "relu": nnx.relu,
    "silu": nnx.silu,
    "swiglu": nnx.silu,
    "geglu": nnx.gelu,
}
GATED = ("swiglu", "geglu")
"""Activations whose hidden layer is multiplied by that of a third dense layer."""


class FeedForward(nnx.Module):
    """Two dense layers with an activation between, the same at every position (Vaswani et al. 2017, section 3.3).

    Args:
      width: features of the input and of the output.
      mlp_dim: features of the hidden layer.
      dropout_rate: share of the hidden features dropped in training.
      activation: applied to the hidden layer: "gelu" (its tanh form), "gelu_exact" (as defined in
        Hendrycks and Gimpel 2016), "relu", "silu", or any function. "swiglu": the hidden layer is silu(x W) * (x V), V
        being a third dense layer, `gate`; "geglu": with gelu in place of silu (Shazeer 2020, equation 6).
      dtype: of the computation; param_dtype: of the parameters.
      rngs: stream `params` draws the Glorot-uniform kernels.
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        *,
        dropout_rate: float = 0.0,
        activation: Activation | Callable[[Array], Array] = "gelu",
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes(width=width, mlp_dim=mlp_dim)
        check_rates(dropout_rate=dropout_rate)
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        kwargs: dict[str, Any] = {
            "kernel_init": nnx.initializers.xavier_uniform(),
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.expand = nnx.Linear(width, mlp_dim, **kwargs)
        self.contract = nnx.Linear(mlp_dim, width, **kwargs)
        self.dropout = Dropout(dropout_rate)
        self.gate = nnx.Linear(width, mlp_dim, **kwargs) if activation in GATED else None
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def __call__(
        self, x: Array, mask: Array | None = None, *, deterministic: bool = True, rngs: nnx.Rngs | None = None
    ) -> Array:
        """Maps `[..., width]` to `[..., width]`; dropout draws from `rngs.dropout` unless `deterministic`.

        `mask` is for layers whose positions share something, as MixtureOfExperts does: here it changes nothing.
        """
        del mask
        # Derivatives of an activation keep several arrays as large as its input; computing them again keeps none.
        x_NxW = flatten(x)
        hidden_NxM = jax.checkpoint(self.activation)(self.expand(x_NxW))
        if self.gate is not None:
            hidden_NxM = hidden_NxM * self.gate(x_NxW)
        hidden_NxM = self.dropout(hidden_NxM, deterministic=deterministic, rngs=rngs)
        return self.contract(hidden_NxM).reshape(x.shape)
