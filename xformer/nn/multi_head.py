"""Multi-head self-attention around any op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.attention import Attention
from xformer.nn.attention_fn import AttentionFn
from xformer.nn.check import check_heads, check_rates

Array = jax.Array


class MultiHeadAttention(nnx.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2).

    Args:
      num_heads: query heads; must divide `width`.
      width: features of the input and of the output.
      attention_fn: an `xformer.attention` op, an AttentionFn, or any function that `nnx.MultiHeadAttention` takes. An
        op is put in an AttentionFn of its own; an AttentionFn given to several layers shares its parameters.
      num_kv_heads: key and value heads, each serving num_heads / num_kv_heads query heads; None means `num_heads`.
      dropout_rate: share of the attention weights dropped in training, drawn for each example and head.
      use_bias: whether the four projections have a bias.
      dtype: of the computation; param_dtype: of the parameters.
      rngs: stream `params` draws the Glorot-uniform kernels.
    """

    def __init__(
        self,
        num_heads: int,
        width: int,
        *,
        attention_fn: Attention | Callable[..., Array],
        num_kv_heads: int | None = None,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_heads(width, num_heads, num_kv_heads)
        check_rates(dropout_rate=dropout_rate)
        num_kv_heads = num_kv_heads or num_heads
        head_dim = width // num_heads
        if isinstance(attention_fn, Attention):
            attention_fn = AttentionFn(
                attention_fn, num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, rngs=rngs
            )
        kwargs: dict[str, Any] = {
            "use_bias": use_bias,
            "kernel_init": nnx.initializers.xavier_uniform(),
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.query = nnx.LinearGeneral(width, (num_heads, head_dim), **kwargs)
        self.key = nnx.LinearGeneral(width, (num_kv_heads, head_dim), **kwargs)
        self.value = nnx.LinearGeneral(width, (num_kv_heads, head_dim), **kwargs)
        self.out = nnx.LinearGeneral((num_heads, head_dim), width, axis=(-2, -1), **kwargs)
        self.attention_fn = attention_fn
        self.dropout_rate = dropout_rate

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        plan: Any = None,
    ) -> Array:
        """Attends within each sequence.

        Args:
          x: `[batch, length, width]`.
          mask: bool `[batch, length]`, True where a token is real; None: all are.
          deterministic: no dropout, and the op's constants stay as they are; False means training.
          rngs: stream `dropout` draws the dropout mask.
          plan: passed on to the op, for a layer whose number is known only at run time; see `Attention.plans`.

        Returns:
          `[batch, length, width]` in `dtype`.
        """
        dropout_rng = None
        if self.dropout_rate > 0 and not deterministic:
            if rngs is None:
                raise ValueError(f"dropout_rate {self.dropout_rate} with deterministic=False needs rngs, got None")
            dropout_rng = rngs.dropout()
        own: dict[str, Any] = {} if plan is None else {"plan": plan}
        query_BxTxHxD, key_BxTxKxD = self.query(x), self.key(x)
        mask_Bx1x1xT = None if mask is None else mask[:, None, None, :]
        out_BxTxHxD = self.attention_fn(
            query_BxTxHxD,
            key_BxTxKxD,
            self.value(x),
            mask=mask_Bx1x1xT,
            dropout_rng=dropout_rng,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=False,
            deterministic=dropout_rng is None,
            **own,
        )
        if not deterministic and isinstance(self.attention_fn, AttentionFn):
            self.attention_fn.update_constants(query_BxTxHxD, key_BxTxKxD, mask_Bx1x1xT)
        return self.out(out_BxTxHxD)
