"""Multi-head attention around any op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.attention import Attention
from xformer.nn.attention_fn import AttentionFn
from xformer.nn.cache import AnyCache, init_cache
from xformer.nn.check import check_heads, check_rates
from xformer.nn.context import Context, ContextKeys
from xformer.nn.global_projections import GlobalProjections
from xformer.nn.linear_general import LinearGeneral
from xformer.nn.norm import RMSNorm

Array = jax.Array


NO_CACHE = "its global tokens attend to a whole sequence at once"


class MultiHeadAttention(nnx.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), to a sequence itself or to another one.

    Args:
      num_heads: query heads.
      width: features of the input and of the output.
      attention_fn: an `xformer.attention` op, an AttentionFn, or any function that `nnx.MultiHeadAttention` takes. An
        op is put in an AttentionFn of its own; an AttentionFn given to several layers shares its parameters.
      num_kv_heads: key and value heads, each serving num_heads / num_kv_heads query heads; None means `num_heads`.
      head_dim: features of a head; None means `width / num_heads`.
      dropout_rate: share of the attention weights dropped in training, drawn for each example and head.
      share_qk: one projection makes queries and keys (Kitaev et al. 2020, section 2, "shared-QK attention"), for
        attention of a sequence to itself; `Reformer` needs it.
      global_projections: global tokens attend to all with queries, keys and values of their own (Beltagy et al. 2020,
        section 3.1), for attention of a sequence to itself by `Longformer`. No cache is had with them.
      use_bias: whether the four projections have a bias.
      qk_norm: queries and keys are normalised to a root mean square of 1 over the features of a head, times a trained
        scale, before positions enter (RMSNorm; Henry et al. 2020 normalise to a length of 1).
      dtype: of the computation; param_dtype: of the parameters.
      rngs: stream `params` draws the Glorot-uniform kernels.

    Raises:
      ValueError: heads that do not divide the width (where `head_dim` is not given) or each other, or a size or rate
        out of range; `share_qk` with fewer key heads than query heads, or an op that needs it without;
        `global_projections` with `share_qk`, `qk_norm`, or an op that has no global tokens.
    """

    def __init__(
        self,
        num_heads: int,
        width: int,
        *,
        attention_fn: Attention | Callable[..., Array],
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        dropout_rate: float = 0.0,
        share_qk: bool = False,
        global_projections: bool = False,
        use_bias: bool = True,
        qk_norm: bool = False,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        head_dim = check_heads(width, num_heads, num_kv_heads, head_dim)
        check_rates(dropout_rate=dropout_rate)
        num_kv_heads = num_kv_heads or num_heads
        if share_qk and num_kv_heads != num_heads:
            raise ValueError(f"share_qk needs as many key heads as query heads, got {num_kv_heads} and {num_heads}")
        op = attention_fn.op if isinstance(attention_fn, AttentionFn) else attention_fn
        if isinstance(op, Attention) and op.SHARES_QK and not share_qk:
            raise ValueError(f"{type(op).__name__} needs share_qk=True, one projection for queries and keys, got False")
        if global_projections:
            _check_global_projections(op, share_qk, qk_norm)
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
        self.query = LinearGeneral(width, (num_heads, head_dim), **kwargs)
        if not share_qk:
            self.key = LinearGeneral(width, (num_kv_heads, head_dim), **kwargs)
        self.value = LinearGeneral(width, (num_kv_heads, head_dim), **kwargs)
        self.out = LinearGeneral((num_heads, head_dim), width, axis=(-2, -1), **kwargs)
        self.of_global = (
            GlobalProjections(width, num_heads, num_kv_heads, head_dim, **kwargs) if global_projections else None
        )
        norm: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query_norm = RMSNorm(head_dim, **norm) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, **norm) if qk_norm else None
        self.attention_fn = attention_fn
        self.dropout_rate, self.share_qk = dropout_rate, share_qk
        self.num_heads, self.kv_heads, self.head_dim, self.dtype = num_heads, num_kv_heads, head_dim, dtype

    def init_cache(self, batch: int, max_len: int) -> AnyCache:
        """An empty cache for decoding up to `max_len` tokens of `batch` sequences, as small as the op allows.

        Raises:
          ValueError: `attention_fn` is no op, or one that is not causal or that reads trees, or the layer has
            `global_projections`.
        """
        if self.of_global is not None:
            raise ValueError(f"a cache cannot be had with global_projections: {NO_CACHE}")
        op = self.attention_fn.op if isinstance(self.attention_fn, AttentionFn) else None
        if op is None:
            raise ValueError(f"a cache needs an xformer.attention op as attention_fn, got {self.attention_fn!r}")
        if op.reads_trees:
            raise ValueError(f"a cache cannot be had with {op}: the tree of a text is not known before its end")
        sizes = batch, max_len, self.kv_heads, self.head_dim
        return init_cache(op, *sizes, self.dtype, num_heads=self.num_heads)

    @overload
    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        *,
        context: Array | None = None,
        segment_ids: Array | tuple[Array, Array] | None = None,
        cache: None = None,
        query_offset: int | Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        plan: Any = None,
        global_tokens: Array | None = None,
        paths: Array | None = None,
    ) -> Array: ...

    @overload
    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        *,
        cache: AnyCache,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Array, AnyCache]: ...

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        *,
        context: Array | None = None,
        segment_ids: Array | tuple[Array, Array] | None = None,
        cache: AnyCache | None = None,
        query_offset: int | Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        plan: Any = None,
        global_tokens: Array | None = None,
        paths: Array | None = None,
    ) -> Array | tuple[Array, AnyCache]:
        """Attends within each sequence, to `context`, or to the tokens so far.

        Args:
          x: `[batch, length, width]`, what the queries are made of.
          mask: bool `[batch, kv_len]`, True where a token that keys are made of is real; None: all are.
          context: `[batch, kv_len, width]`, what keys and values are made of; None: `x` itself.
          segment_ids: int `[batch, length]`; tokens of different segments do not attend to each other. With `context` a
            tuple of two such arrays, for `x` and for `context`.
          cache: what `init_cache` or the call before gave. `x` are the tokens that follow, one or more of them; real
            ones come first (`mask`). Step by step, the outputs are those of the whole sequence at once.
          query_offset: position of the first query among the keys, an int or an int array `[]` or `[batch]`; ops that
            depend on positions need it where there are as many queries as keys no longer. The cache knows it itself.
          deterministic: no dropout, and the op's constants stay as they are, as they do with a cache. False means
            training: the op then updates them from the queries and keys of this call, those of a `context` too.
          rngs: stream `dropout` draws the dropout mask.
          plan: passed on to the op, for a layer whose number is known only at run time; see `Attention.plans`.
          global_tokens: bool `[batch, kv_len]`, passed on to an op that gives some tokens a part of their own
            (`Longformer`); for others all tokens are alike.
          paths: int `[batch, length, levels]`, passed on to an op with a position term that reads trees (`ShawTree`).

        Returns:
          `[batch, length, width]` in `dtype`; with a cache also the next cache. Outputs for tokens beyond the cache's
          `max_len` are NaN.

        Raises:
          ValueError: dropout without `rngs`; a `context` with `share_qk`; arguments that a cache decides; tokens beyond
            the cache's `max_len`, where that is known when tracing.
        """
        dropout_rng = None
        if self.dropout_rate > 0 and not deterministic:
            if rngs is None:
                raise ValueError(f"dropout_rate {self.dropout_rate} with deterministic=False needs rngs, got None")
            dropout_rng = rngs.dropout()
        given = {"segment_ids": segment_ids, "query_offset": query_offset, "plan": plan}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        fn = self.attention_fn
        if global_tokens is not None and isinstance(fn, AttentionFn) and fn.op.GLOBAL_TOKENS:
            options["global_tokens"] = global_tokens
        if paths is not None and isinstance(fn, AttentionFn) and fn.op.reads_trees:
            options["paths"] = paths
        source = x if context is None else context
        if self.share_qk and context is not None:
            raise ValueError("share_qk makes keys of what the queries are made of: it takes no context")
        if self.of_global is not None:
            barred = {"context": context, "query_offset": query_offset, "cache": cache}
            if wrong := [name for name, value in barred.items() if value is not None]:
                raise ValueError(f"global_projections: a layer with them takes no {', '.join(wrong)}: {NO_CACHE}")
        query, value = self.query(x), self.value(source)
        key = query if self.share_qk else self.key(source)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        dropout: dict[str, Any] = {
            "dropout_rng": dropout_rng,
            "dropout_rate": self.dropout_rate,
            "broadcast_dropout": False,
            "deterministic": dropout_rng is None,
        }
        if cache is not None:
            if context is not None or options:
                names = [*(["context"] if context is not None else []), *options]
                raise ValueError(f"cache: a call with a cache takes no {', '.join(names)}")
            out_BxTxHxD, following = cache.attend(self.attention_fn, query, key, value, mask, dropout)
            return self.out(out_BxTxHxD), following
        options["mask"] = None if mask is None else mask[:, None, None, :]
        out_BxTxHxD = self.attention_fn(query, key, value, **dropout, **options)
        if self.of_global is not None and isinstance(fn, AttentionFn):
            if dropout_rng is not None:
                dropout["dropout_rng"] = jax.random.fold_in(dropout_rng, 3)  # the op's own parts are 0 to 2
            options.pop("plan", None)
            out_BxTxHxD = self.of_global(x, out_BxTxHxD, fn, **dropout, **options)
        if not deterministic and isinstance(self.attention_fn, AttentionFn):
            self.attention_fn.update_constants(query, key, options["mask"])
        return self.out(out_BxTxHxD)

    def context_keys(self, context: Context) -> ContextKeys:
        """The keys and values of a context, for `attend_to`. Raises ValueError for a context of several segments."""
        if context.segment_ids is not None:
            raise ValueError("context_keys: decoding takes one example a row, got segment_ids")
        key = self.key(context.hidden)
        key = key if self.key_norm is None else self.key_norm(key)
        return ContextKeys(key, self.value(context.hidden), context.mask)

    def attend_to(self, x: Array, keys: ContextKeys) -> Array:
        """Cross-attention without dropout to keys that are there: what a call with `context` gives.

        The op must take each query alike wherever it stands, as those that refuse no context do.

        Args:
          x: `[texts, new, width]`. Where there are more texts than contexts (beams), equally many in turn belong to
            each, and none of its keys is copied.
          keys: what `context_keys` gave.

        Returns:
          `[texts, new, width]` in `dtype`.
        """
        query = self.query(x)
        query = query if self.query_norm is None else self.query_norm(query)
        by_context = query.reshape(len(keys.key), -1, *query.shape[2:])
        mask = None if keys.mask is None else keys.mask[:, None, None, :]
        out = self.attention_fn(by_context, keys.key, keys.value, mask=mask, deterministic=True)
        return self.out(out.reshape(query.shape))


def _check_global_projections(op: Any, share_qk: bool, qk_norm: bool) -> None:
    if not isinstance(op, Attention) or not op.GLOBAL_TOKENS:
        raise ValueError(f"global_projections=True needs an op with global tokens, such as Longformer, got {op!r}")
    if op.reads_trees:
        raise ValueError(f"global_projections=True cannot be had with a position term that reads trees, got {op}")
    for name, given in (("share_qk", share_qk), ("qk_norm", qk_norm)):
        if given:
            raise ValueError(f"global_projections=True cannot be had with {name}=True: the paper has no such layer")
