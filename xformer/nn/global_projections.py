"""A second set of projections, for what global tokens attend to (Beltagy et al. 2020, section 3.1)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.attention import Longformer
from xformer.nn.attention_fn import AttentionFn
from xformer.nn.linear_general import LinearGeneral

Array = jax.Array


class GlobalProjections(nnx.Module):
    """Attention from the global tokens to all tokens, with queries, keys and values of its own.

    "Linear projections for global attention": the window, and all other tokens where they attend to a global one, have
    the projections of the layer; a global token's own query, and the keys and values that it meets, have these.

    Args:
      width: features of the input.
      num_heads, num_kv_heads, head_dim: of the attention.
      kwargs: of the three LinearGeneral layers.
    """

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_dim: int, **kwargs: Any):
        self.query = LinearGeneral(width, (num_heads, head_dim), **kwargs)
        self.key = LinearGeneral(width, (num_kv_heads, head_dim), **kwargs)
        self.value = LinearGeneral(width, (num_kv_heads, head_dim), **kwargs)

    def __call__(
        self,
        x: Array,
        out: Array,
        attention_fn: AttentionFn,
        *,
        global_tokens: Array | None = None,
        segment_ids: Array | None = None,
        **options: Any,
    ) -> Array:
        """The output of attention with the rows of the global tokens made anew.

        Args:
          x: `[batch, length, width]`. out: `[batch, length, num_heads, head_dim]`.
          attention_fn: of a `Longformer`, whose position term and causal cut hold here too.
          global_tokens: bool `[batch, length]`; None: the op's first ones.
          segment_ids: int `[batch, length]`; tokens of different segments do not attend to each other.
          options: mask and dropout, as the op takes them.
        """
        op = attention_fn.op
        assert isinstance(op, Longformer)
        whole, length = op.from_global_tokens(), x.shape[1]
        params = attention_fn.own_params()
        key, value = self.key(x), self.value(x)

        def attend(tokens: Array, segments: Array | None, **where: Any) -> Array:
            if segment_ids is not None:
                where["segment_ids"] = segments, segment_ids
            return whole(self.query(tokens), key, value, params=params or None, **where, **options)

        if global_tokens is None:
            count = min(op.num_global_tokens, length)
            if count == 0:
                return out
            some = None if segment_ids is None else segment_ids[:, :count]
            return out.at[:, :count].set(attend(x[:, :count], some, query_offset=0).astype(out.dtype))

        most, batch = min(op.max_global_tokens, length), jnp.arange(x.shape[0])[:, None]
        held = jnp.broadcast_to(global_tokens, x.shape[:2])

        def every() -> Array:
            return jnp.where(held[:, :, None, None], attend(x, segment_ids).astype(out.dtype), out)

        def gathered() -> Array:
            places = jnp.argsort(~held, axis=1, stable=True)[:, :most]
            exist = jnp.take_along_axis(held, places, 1)
            tokens = jnp.take_along_axis(x, places[:, :, None], 1)
            some = None if segment_ids is None else jnp.take_along_axis(segment_ids, places, 1)
            all_places = jnp.broadcast_to(jnp.arange(length), held.shape)
            new = attend(tokens, some, positions=(places, all_places)).astype(out.dtype)
            return out.at[batch, jnp.where(exist, places, length)].set(new, mode="drop")

        if most == length:
            return every()
        return jax.lax.cond(held.sum(1).max() <= most, gathered, every)
