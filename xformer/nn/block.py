"""The transformer block: of encoders, and of decoders, which may attend to another sequence too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.attention import Attention
from xformer.nn.cache import AnyCache
from xformer.nn.context import AnyContext, Context, ContextKeys
from xformer.nn.dropout import Dropout
from xformer.nn.experts import make_feed_forward
from xformer.nn.feed_forward import Activation
from xformer.nn.multi_head import MultiHeadAttention
from xformer.nn.norm import NormType, make_norm
from xformer.nn.tokens import flatten

Array = jax.Array


class EncoderBlock(nnx.Module):
    """Self-attention, then a feed-forward layer, each with layer norm, dropout and a residual connection.

    With a `cross_attention_fn` it is the block of a decoder that reads another sequence: attention to that stands
    between the two, in the same way (Vaswani et al. 2017, section 3.1).

    `norm="pre"` normalises what goes into each of the two, so the residual path is the identity and deep stacks train
    without a long warm-up (Xiong et al. 2020, figure 1b); a stack of them needs one more norm at the end.
    `norm="post"` normalises each sum, as in the original transformer (Vaswani et al. 2017, section 3.1).

    Args:
      width: features of the input and of the output.
      num_heads, num_kv_heads, head_dim, share_qk, attention_fn, qk_norm, global_projections: see
        MultiHeadAttention.
      cross_attention_fn: an op or function as `attention_fn`, for attention to a `context`; None: there is none.
      mlp_dim, activation: see FeedForward; with mlp_dim 0 the block is attention alone, as in the models of Arora et
        al. 2024, section 4.
      num_experts, experts_per_token, expert_capacity, balance_weight: see MixtureOfExperts; 1 expert is a FeedForward.
      norm: "pre" or "post".
      norm_type: "layer", layer normalization, or "rms", RMSNorm. norm_epsilon: what it adds to the variance.
      dropout_rate: after attention and inside and after the feed-forward layer.
      attention_dropout_rate: on the attention weights. hidden_dropout_rate: inside the feed-forward layer; None: as
        `dropout_rate`.
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
        cross_attention_fn: Attention | Callable[..., Array] | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        share_qk: bool = False,
        global_projections: bool = False,
        norm: Literal["pre", "post"] = "pre",
        norm_type: NormType = "layer",
        norm_epsilon: float = 1e-6,
        activation: Activation = "gelu",
        qk_norm: bool = False,
        num_experts: int = 1,
        experts_per_token: int = 1,
        expert_capacity: float = 1.25,
        balance_weight: float = 0.01,
        dropout_rate: float = 0.0,
        attention_dropout_rate: float = 0.0,
        hidden_dropout_rate: float | None = None,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
        kwargs: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        attention: dict[str, Any] = {
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "dropout_rate": attention_dropout_rate,
            "qk_norm": qk_norm,
            **kwargs,
        }
        own: dict[str, Any] = {"share_qk": share_qk, "global_projections": global_projections}
        self.attention = MultiHeadAttention(num_heads, width, attention_fn=attention_fn, **own, **attention)
        self.cross_attention = (
            None
            if cross_attention_fn is None
            else MultiHeadAttention(num_heads, width, attention_fn=cross_attention_fn, **attention)
        )
        norm_of: dict[str, Any] = {"epsilon": norm_epsilon, **kwargs}
        self.feed_forward = make_feed_forward(
            width,
            mlp_dim,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            capacity=expert_capacity,
            balance_weight=balance_weight,
            dropout_rate=dropout_rate if hidden_dropout_rate is None else hidden_dropout_rate,
            activation=activation,
            **kwargs,
        )
        self.attention_norm = make_norm(norm_type, width, **norm_of)
        self.cross_attention_norm = None if cross_attention_fn is None else make_norm(norm_type, width, **norm_of)
        self.feed_forward_norm = make_norm(norm_type, width, **norm_of) if mlp_dim != 0 else None
        self.dropout = Dropout(dropout_rate)
        self.norm = norm

    @overload
    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        *,
        cache: None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        plan: Any = None,
        global_tokens: Array | None = None,
        segment_ids: Array | None = None,
        paths: Array | None = None,
        context: AnyContext | None = None,
    ) -> Array: ...

    @overload
    def __call__(
        self, x: Array, mask: Array | None = None, *, cache: AnyCache, context: AnyContext | None = None
    ) -> tuple[Array, AnyCache]: ...

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        *,
        cache: AnyCache | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        plan: Any = None,
        global_tokens: Array | None = None,
        segment_ids: Array | None = None,
        paths: Array | None = None,
        context: AnyContext | None = None,
    ) -> Array | tuple[Array, AnyCache]:
        """Maps `[batch, length, width]` to the same; `mask` bool `[batch, length]` is True at real tokens.

        `plan`, `global_tokens`, `segment_ids` and `paths` are for the attention op, see MultiHeadAttention. So is
        `cache`: then `x` are the tokens that follow, and the next cache is returned besides. `context` is what
        cross-attention reads: a `Context`, or the layer's own `ContextKeys`, without dropout.

        Raises ValueError for a `context` without cross-attention, or the other way round.
        """
        if (context is None) != (self.cross_attention is None):
            has, got = "no cross-attention" if context is not None else "cross-attention", type(context).__name__
            raise ValueError(f"context: the block has {has}, got {got}")
        shape, following = x.shape, cache
        options: dict[str, Any] = {"deterministic": deterministic, "rngs": rngs}
        if cache is None:
            options |= {"plan": plan, "global_tokens": global_tokens, "segment_ids": segment_ids, "paths": paths}

        def attend(x_NxW: Array) -> Array:
            nonlocal following
            x_BxTxW = x_NxW.reshape(shape)
            if cache is None:
                out_BxTxW = self.attention(x_BxTxW, mask, **options)
            else:
                out_BxTxW, following = self.attention(x_BxTxW, mask, cache=cache, **options)
            return out_BxTxW.reshape(x_NxW.shape)

        def add(x_NxW: Array, layer: Callable[[Array], Array], norm: Callable[[Array], Array]) -> Array:
            drop = functools.partial(self.dropout, deterministic=deterministic, rngs=rngs)
            return x_NxW + drop(layer(norm(x_NxW))) if self.norm == "pre" else norm(x_NxW + drop(layer(x_NxW)))

        x = add(flatten(x), attend, self.attention_norm)
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            read = functools.partial(self._read, context, deterministic=deterministic, rngs=rngs)
            x = add(x, lambda x: read(x.reshape(shape)).reshape(x.shape), self.cross_attention_norm)
        if self.feed_forward is not None and self.feed_forward_norm is not None:
            feed_forward = functools.partial(self.feed_forward, mask=mask, deterministic=deterministic, rngs=rngs)
            x = add(x, lambda x: feed_forward(x.reshape(shape)).reshape(x.shape), self.feed_forward_norm)
        out: Array = x.reshape(shape)
        return out if following is None else (out, following)

    def _read(self, context: Any, x: Array, **options: Any) -> Array:
        """Cross-attention from `x` `[batch, length, width]` to the context."""
        layer: Any = self.cross_attention
        if isinstance(context, ContextKeys):
            out: Array = layer.attend_to(x, context)
            return out
        assert isinstance(context, Context)
        out = layer(x, context.mask, context=context.hidden, segment_ids=context.segment_ids, **options)
        return out
