"""The transformer encoder block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.attention import Attention
from xformer.nn.feed_forward import FeedForward
from xformer.nn.multi_head import MultiHeadAttention
from xformer.nn.norm import LayerNorm
from xformer.nn.tokens import flatten

Array = jax.Array


class EncoderBlock(nnx.Module):
    """Self-attention, then a feed-forward layer, each with layer norm, dropout and a residual connection.

    `norm="pre"` normalises what goes into each of the two, so the residual path is the identity and deep stacks train
    without a long warm-up (Xiong et al. 2020, figure 1b); a stack of them needs one more norm at the end.
    `norm="post"` normalises each sum, as in the original transformer (Vaswani et al. 2017, section 3.1).

    Args:
      width: features of the input and of the output.
      num_heads, num_kv_heads, head_dim, share_qk, attention_fn: see MultiHeadAttention.
      mlp_dim: features of the hidden feed-forward layer; 0: the block is attention alone, as in the models of Arora et
        al. 2024, section 4.
      norm: "pre" or "post".
      dropout_rate: after attention and inside and after the feed-forward layer.
      attention_dropout_rate: on the attention weights.
      dtype: of the computation; param_dtype: of the parameters.
      rngs: stream `params`.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_dim: int,
        *,
        attention_fn: Attention | Callable[..., Array],
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        share_qk: bool = False,
        norm: Literal["pre", "post"] = "pre",
        dropout_rate: float = 0.0,
        attention_dropout_rate: float = 0.0,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
        kwargs: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.attention = MultiHeadAttention(
            num_heads,
            width,
            attention_fn=attention_fn,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            share_qk=share_qk,
            dropout_rate=attention_dropout_rate,
            **kwargs,
        )
        has_feed_forward = mlp_dim != 0
        self.feed_forward = FeedForward(width, mlp_dim, dropout_rate=dropout_rate, **kwargs) if has_feed_forward else None
        self.attention_norm = LayerNorm(width, **kwargs)
        self.feed_forward_norm = LayerNorm(width, **kwargs) if has_feed_forward else None
        self.dropout = nnx.Dropout(dropout_rate)
        self.norm = norm

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        plan: Any = None,
        global_tokens: Array | None = None,
    ) -> Array:
        """Maps `[batch, length, width]` to the same; `mask` bool `[batch, length]` is True at real tokens.

        `plan` and `global_tokens` are for the attention op, see MultiHeadAttention.
        """

        shape = x.shape
        options: dict[str, Any] = {"plan": plan, "global_tokens": global_tokens}

        def attend(x_NxW: Array) -> Array:
            x_BxTxW = x_NxW.reshape(shape)
            out_BxTxW = self.attention(x_BxTxW, mask, deterministic=deterministic, rngs=rngs, **options)
            return out_BxTxW.reshape(x_NxW.shape)

        def drop(x_NxW: Array) -> Array:
            return self.dropout(x_NxW, deterministic=deterministic, rngs=rngs)

        x = flatten(x)
        if self.norm == "pre":
            x = x + drop(attend(self.attention_norm(x)))
        else:
            x = self.attention_norm(x + drop(attend(x)))
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x.reshape(shape)
        feed = functools.partial(self.feed_forward, deterministic=deterministic, rngs=rngs)
        if self.norm == "pre":
            x = x + drop(feed(self.feed_forward_norm(x)))
        else:
            x = self.feed_forward_norm(x + drop(feed(x)))
        return x.reshape(shape)
