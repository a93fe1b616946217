"""The Linen twin of `xformer.nn.AttentionFn`. Importing this module imports `flax.linen`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from flax.typing import Dtype, PrecisionLike

from xformer.attention import Attention
from xformer.nn.attention_weights import attention_weights
from xformer.nn.params import init_shape

Array = jax.Array


class AttentionFn(nn.Module):
    """Holds an op's parameters; pass it as `nn.MultiHeadDotProductAttention(attention_fn=AttentionFn(op=op))`.

    The parameters are made from the shapes of the first query and key and stand under `attention_fn` in the layer's
    `params`. Made inside another module's `@nn.compact` method it belongs to that module, as all of Linen does, and its
    parameters stand there as `AttentionFn_0`; `AttentionFn(op=op, parent=None)` leaves them to the layer. One
    AttentionFn that a module gives to several layers shares its parameters.

    Under `sow_weights=True` it sows `attention_weights`, `[*batch, num_heads, q_len, kv_len]`, to `intermediates`.

    Attributes:
      op: any `xformer.attention` op.
      max_len: longest length, for an op whose parameters depend on it and that has no `max_len` of its own; None:
        the length of the first key.
    """

    op: Attention
    max_len: int | None = None

    @nn.compact
    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        *,
        is_causal: bool = False,
        segment_ids: Any = None,
        query_offset: int | Array | None = None,
        scale: float | None = None,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype: Dtype | None = None,
        precision: PrecisionLike = None,
        module: nn.Module | None = None,
        params: dict[str, Any] | None = None,
        plan: Any = None,
    ) -> Array:
        """The op's own `__call__`, with this module's parameters unless `params` are given.

        Raises:
          ValueError: `max_len` differs from the op's own; and whatever the op raises.
          NotImplementedError: `module` (Flax's `sow_weights`) for an op without token pairs.
        """
        if params is None:
            params = self._own_params(query, key)
        options: dict[str, Any] = {
            "bias": bias,
            "mask": mask,
            "is_causal": is_causal,
            "segment_ids": segment_ids,
            "query_offset": query_offset,
            "scale": scale,
            "dtype": dtype,
            "precision": precision,
            "params": params,
        }
        if module is not None:
            module.sow("intermediates", "attention_weights", attention_weights(self.op, query, key, value, **options))
        return self.op(
            query,
            key,
            value,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
            plan=plan,
            **options,
        )

    def _own_params(self, query: Array, key: Array) -> dict[str, Any]:
        shape = init_shape(self.op, self.max_len, query.shape[-2], query.shape[-1], key.shape[-2])
        names = jax.eval_shape(lambda: self.op.init(jax.random.key(0), shape))
        return {name: self.param(name, lambda rng, name=name: self.op.init(rng, shape)[name]) for name in names}
