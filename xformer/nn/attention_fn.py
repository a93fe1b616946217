"""An attention op with its parameters, as a Flax NNX module that is itself an `attention_fn`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from xformer.attention import Attention, AttentionCallable, Options
from xformer.attention.engine.few_queries import CachedKeys
from xformer.attention.interface import CONSTANTS
from xformer.nn import constant
from xformer.nn.params import has_params, init_shape

Array = jax.Array


class AttentionFn(AttentionCallable, nnx.Module):
    """Holds an op's parameters, and is called as the op is, without them.

    Pass it as `nnx.MultiHeadAttention(attention_fn=AttentionFn(op, ...))`. Give one AttentionFn to several layers and
    they share its parameters (Linformer's layerwise sharing). Under Flax's `sow_weights=True` it sows
    `attention_weights`, `[*batch, num_heads, q_len, kv_len]`, to `nnx.Intermediate`. In Linen use
    `xformer.nn.linen.AttentionFn`: Linen does not see the parameters of this one.

    What the op's `constants` draws is held as `Constant` variables, saved and not trained. The layers of `xformer.nn`
    let the op update them while training; around other layers call `update_constants` once a step.

    Args:
      op: any `xformer.attention` op.
      num_heads, head_dim: of the queries. Needed only if the op has parameters.
      num_kv_heads: heads of keys and values; None means `num_heads`.
      max_len: longest length, for an op whose parameters depend on it and that has no `max_len` of its own.
      value_dim: depth of the values; None means `head_dim`.
      rngs: stream `params` draws the op's parameters and constants. Needed only if it has parameters: without it,
        constants are drawn from the op's seed.

    Raises:
      ValueError: the op has parameters and num_heads, head_dim or rngs is missing, or `max_len` differs from the op's.
    """

    def __init__(
        self,
        op: Attention,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        max_len: int | None = None,
        value_dim: int | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        if not isinstance(op, Attention):
            raise ValueError(f"op must be an xformer.attention op, got {op!r}")
        params: dict[str, Any] = {}
        shape = init_shape(op, max_len, num_heads or 1, head_dim or 1, num_kv_heads if num_heads else None, value_dim)
        if has_params(op):
            if num_heads is None or head_dim is None or rngs is None:
                given = f"num_heads={num_heads}, head_dim={head_dim}, rngs={rngs and 'Rngs'}"
                raise ValueError(f"{op} has parameters and needs num_heads, head_dim and rngs, got {given}")
            params = op.init(rngs.params(), shape)
        self.op = op
        self.params = nnx.data(jax.tree.map(nnx.Param, params))
        # Without the sizes, and without a stream to draw from, each call draws from the op's seed.
        self.constants = nnx.data({} if head_dim is None and rngs is None else constant.draw(op, shape, rngs))

    def attend_with(self, query: Array, key: Array, value: Array, options: Options) -> Array:
        if options.params is None:
            options = dataclasses.replace(options, params=self.own_params())
        if options.module is not None:
            weights = self.op.attention_weights(query, key, value, options)
            options.module.sow(nnx.Intermediate, "attention_weights", weights)
        return self.op.attend_with(query, key, value, dataclasses.replace(options, module=None))

    def decode(
        self, query: Array, key: Array, value: Array, state: Any, *, mask: Array | None = None
    ) -> tuple[Array, Any]:
        """The op's `decode` with the parameters and constants that are held here."""
        return self.op.decode(query, key, value, state, mask=mask, params=self.own_params())

    def attend_by(self, op: Attention, query: Array, key: Array, value: Array, **options: Any) -> Array:
        """A call as this module, but of `op`, which takes the same parameters."""
        return op.attend_with(query, key, value, Options(params=self.own_params(), **options))

    def attend_cached(
        self, op: Attention, query: Array, parts: Sequence[CachedKeys], q_positions: Array, *, kv_len: int
    ) -> Array:
        """`attend_cached` of the op, or of what its `turned` gives, with the parameters that are held here."""
        return op.attend_cached(query, parts, q_positions, kv_len=kv_len, params=self.own_params())

    def own_params(self) -> dict[str, Any]:
        """The parameters and constants that are held here, as the op takes them."""
        own = {CONSTANTS: constant.values(self.constants)} if self.constants else {}
        return constant.values(self.params) | own

    def update_constants(self, query: Array, key: Array, mask: Array | None = None) -> None:
        """Replaces the constants by what the op's `update` makes of them and of a training step's queries and keys.

        Args:
          query, key, mask: as in the call of the step. No gradient flows through the update.
        """
        if self.constants:
            stop = jax.lax.stop_gradient
            after = self.op.update(constant.values(self.constants), stop(query), stop(key), mask)
            is_constant = lambda x: isinstance(x, constant.Constant)
            jax.tree.map(lambda held, new: held.set_value(stop(new)), self.constants, after, is_leaf=is_constant)
