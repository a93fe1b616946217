"""The Linen twin of `xformer.nn.AttentionFn`. Importing this module imports `flax.linen`."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from xformer.attention import Attention, AttentionCallable, Options, Shape
from xformer.attention.interface import CONSTANTS
from xformer.nn.params import init_shape

Array = jax.Array


class AttentionFn(AttentionCallable, nn.Module):
    """Holds an op's parameters; pass it as `nn.MultiHeadDotProductAttention(attention_fn=AttentionFn(op=op))`.

    The parameters are made from the shapes of the first query and key and stand under `attention_fn` in the layer's
    `params`. Made inside another module's `@nn.compact` method it belongs to that module, as all of Linen does, and its
    parameters stand there as `AttentionFn_0`; `AttentionFn(op=op, parent=None)` leaves them to the layer. One
    AttentionFn that a module gives to several layers shares its parameters.

    What the op's `constants` draws stands in the collection `constants`, drawn by `init` from the stream `params`.
    Where that collection is mutable, `apply(..., mutable=["constants"])`, a call lets the op update it.

    Under `sow_weights=True` it sows `attention_weights`, `[*batch, num_heads, q_len, kv_len]`, to `intermediates`.

    Attributes:
      op: any `xformer.attention` op.
      max_len: longest length, for an op whose parameters depend on it and that has no `max_len` of its own; None:
        the length of the first key.
    """

    op: Attention
    max_len: int | None = None

    # Linen wraps the methods that stand in a class's own body, so the one and only signature is named here again.
    __call__ = nn.compact(AttentionCallable.__call__)

    def attend_with(self, query: Array, key: Array, value: Array, options: Options) -> Array:
        if options.params is None:
            shape = self._shape(query, key, value)
            constants = self._own_constants(shape)
            own = {CONSTANTS: {name: held.value for name, held in constants.items()}} if constants else {}
            options = dataclasses.replace(options, params=self._own_params(shape) | own)
            if constants and self.is_mutable_collection(CONSTANTS) and not self.is_initializing():
                stop = jax.lax.stop_gradient
                after = self.op.update(own[CONSTANTS], stop(query), stop(key), options.mask)
                for name, held in constants.items():
                    held.value = jax.tree.map(stop, after[name])
        if options.module is not None:
            weights = self.op.attention_weights(query, key, value, options)
            options.module.sow("intermediates", "attention_weights", weights)
        return self.op.attend_with(query, key, value, dataclasses.replace(options, module=None))

    def _shape(self, query: Array, key: Array, value: Array) -> Shape:
        num_heads, head_dim = query.shape[-2:]
        return init_shape(self.op, self.max_len, num_heads, head_dim, key.shape[-2], value.shape[-1])

    def _own_constants(self, shape: Shape) -> dict[str, Any]:
        seed = jax.random.key(getattr(self.op, "seed", 0))
        names = jax.eval_shape(lambda: self.op.constants(seed, shape))

        def draw(name: str) -> Any:
            return self.op.constants(self.make_rng("params") if self.is_initializing() else seed, shape)[name]

        return {name: self.variable(CONSTANTS, name, draw, name) for name in names}

    def _own_params(self, shape: Shape) -> dict[str, Any]:
        names = jax.eval_shape(lambda: self.op.init(jax.random.key(0), shape))
        return {name: self.param(name, lambda rng, name=name: self.op.init(rng, shape)[name]) for name in names}
