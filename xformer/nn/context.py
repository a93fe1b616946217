"""What a layer with cross-attention reads: the vectors of another sequence, or keys and values made of them once."""

from __future__ import annotations

import dataclasses
import functools

import jax

Array = jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["hidden", "mask", "segment_ids"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Context:
    """The vectors of another sequence. A pytree.

    Attributes:
      hidden: `[batch, kv_len, width]`.
      mask: bool `[batch, kv_len]`, True where a token is real; None: all are.
      segment_ids: int `[batch, length]` of the sequence that reads and `[batch, kv_len]` of this one, where several
        examples share a row; None: a row is one example.
    """

    hidden: Array
    mask: Array | None = None
    segment_ids: tuple[Array, Array] | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key", "value", "mask"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class ContextKeys:
    """The keys and values that one layer makes of a context: for decoding, which needs them at each step. A pytree.

    Attributes:
      key, value: `[batch, kv_len, num_kv_heads, head_dim]`.
      mask: bool `[batch, kv_len]`, True where a token is real; None: all are.
    """

    key: Array
    value: Array
    mask: Array | None = None


AnyContext = Context | ContextKeys
