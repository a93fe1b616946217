"""Projections of their own for global tokens (Beltagy et al. 2020, section 3.1, "linear projections")."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.attention import Attention, Full
from xformer.nn.linear_general import LinearGeneral

Array = jax.Array


class GlobalAttention(nnx.Module):
    """What global tokens attend to everything with: queries, keys and values by three more projections.

    Where no example has more than the op's `max_global_tokens`, only the queries of global tokens are computed.

    Args:
      width, num_heads, num_kv_heads, head_dim: as those of the layer.
      op: that of the layer, which tells global tokens apart (`Longformer`).
      kwargs: of the projections.

    Raises:
      ValueError: an op without global tokens, a causal one, or one with a position term.
    """

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_dim: int, op: Any, **kwargs: Any):
        if not isinstance(op, Attention) or not op.GLOBAL_TOKENS:
            raise ValueError(f"global_projections must be False where attention tells no tokens apart, got {op}")
        if op.causal or getattr(op, "position", None) is not None:
            raise ValueError(f"global_projections: attention must be neither causal nor have a position, got {op}")
        self.query = LinearGeneral(width, (num_heads, head_dim), **kwargs)
        self.key = LinearGeneral(width, (num_kv_heads, head_dim), **kwargs)
        self.value = LinearGeneral(width, (num_kv_heads, head_dim), **kwargs)
        given: Any = op
        self.most, self.first = given.max_global_tokens, given.num_global_tokens
        self.full = Full(implementation=op.implementation)

    def __call__(self, x: Array, out: Array, is_global: Array | None, options: dict[str, Any]) -> Array:
        """The layer's heads with those of global tokens replaced.

        Args:
          x: `[batch, length, width]`.
          out: `[batch, length, num_heads, head_dim]`, what the op gave.
          is_global: bool `[batch or 1, length]`; None: the first tokens, as many as the op has.
          options: what the op was called with besides, `plan` and `global_tokens` aside.

        Raises:
          NotImplementedError: `segment_ids` or `query_offset`.
        """
        if given := [name for name in ("segment_ids", "query_offset") if options.get(name) is not None]:
            raise NotImplementedError(f"global_projections: a call takes no {given[0]}")
        batch, length = x.shape[:2]
        options = {key: value for key, value in options.items() if key not in ("plan", "global_tokens")}
        if options.get("dropout_rng") is not None:
            options["dropout_rng"] = jax.random.fold_in(options["dropout_rng"], 1)
        if is_global is None:
            count = min(self.first, length)
            is_global = jnp.arange(length)[None] < count
            if not count:
                return out
        is_global = jnp.broadcast_to(is_global > 0, (batch, length))
        most = min(self.most, length)
        key, value = self.key(x), self.value(x)
        attend = lambda query: self.full(query, key, value, **options)

        def gathered() -> Array:
            places = jnp.argsort(~is_global, axis=1, stable=True)[:, :most]
            heads = attend(self.query(jnp.take_along_axis(x, places[..., None], axis=1))).astype(out.dtype)
            exist = jnp.take_along_axis(is_global, places, axis=1)
            rows = jnp.arange(batch)[:, None], jnp.where(exist, places, length)
            return out.at[rows].set(heads, mode="drop")

        def every() -> Array:
            return jnp.where(is_global[:, :, None, None], attend(self.query(x)).astype(out.dtype), out)

        if most == length:
            return every()
        return jax.lax.cond(is_global.sum(axis=1).max() <= most, gathered, every)
