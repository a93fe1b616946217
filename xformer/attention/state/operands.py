"""What the engine of linear attention is given, and the state that it carries."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from xformer.attention.state.features import FeatureMap

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Settings:
    """The static choices of a call.

    Attributes:
      features: the feature map.
      causal: a query sees no later key.
      normalized: the sum of the weights is computed as well.
      decays: for each key head what a weight is multiplied by at each step of distance; None: nothing.
      precision: of the matrix products.
    """

    features: FeatureMap
    causal: bool = False
    normalized: bool = True
    decays: tuple[float, ...] | None = None
    precision: Any = None


class Inputs(NamedTuple):
    """Finite queries, keys and values; what is hidden by a mask is zero.

    Attributes:
      query: `[batch, q_len, kv_heads, groups, head_dim]`.
      key: `[batch, kv_len, kv_heads, head_dim]`; value: likewise, of any depth.
    """

    query: Array
    key: Array
    value: Array


class Controls(NamedTuple):
    """What is not differentiated.

    Attributes:
      real: bool `[batch or 1, kv_len, kv_heads or 1]`, False where a mask hides a key; None: all are real.
      q_segments, kv_segments: int `[batch or 1, length]`, each segment in one piece; or None.
      offset: int32 `[]`, the position of the first query among the keys; None: as many queries as keys, side by side.
    """

    real: Array | None = None
    q_segments: Array | None = None
    kv_segments: Array | None = None
    offset: Array | None = None


class State(NamedTuple):
    """The sums over the keys so far, in float32 (float64 for float64 inputs).

    Attributes:
      sums: `[batch, kv_heads, features, depth]`, of key features times values.
      norm: `[batch, kv_heads, features]`, of key features; None where weights are not normalised.
      top: `[batch, kv_heads]`, the logarithm of what both are divided by; None for feature maps without one.
    """

    sums: Array
    norm: Array | None
    top: Array | None


class Tokens(NamedTuple):
    """Queries, keys and values of one chunk; None where it has none of them.

    Attributes:
      query: `[batch, kv_heads, groups, chunk, head_dim]`.
      key, value: `[batch, kv_heads, chunk, depth]`.
    """

    query: Array | None
    key: Array | None
    value: Array | None


class Marks(NamedTuple):
    """What is known of the tokens of one chunk.

    Attributes:
      real: bool `[batch or 1, kv_heads or 1, chunk]`; None in a chunk without keys.
      q_segments, kv_segments: int `[batch or 1, chunk]`, or None.
      before: int `[batch or 1]`, the segment of the key before the chunk, or None.
      advance: int32 `[batch or 1]`, tokens of the chunk that count as steps of distance; None: all.
    """

    real: Array | None = None
    q_segments: Array | None = None
    kv_segments: Array | None = None
    before: Array | None = None
    advance: Array | None = None
