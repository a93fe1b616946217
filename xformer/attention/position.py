"""Relative positions: terms that compose with every variant that keeps token pairs.

A term is a frozen dataclass. `init` makes its parameters, `rotate` turns queries and keys before the scores (Rotary)
and `relative` gives what is added to scores and values, as tables over the distance `key position - query position`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine.relative_tiles import Relative
from xformer.attention.position_term import FARTHEST, Position
from xformer.attention.rotary import Rotary
from xformer.attention.shape import Shape
from xformer.attention.shaw_2d import Shaw2D
from xformer.attention.shaw_tree import ShawTree
from xformer.attention.signature import Params
from xformer.attention.sizing import block_for_length
from xformer.checks import check_integer
from xformer.lookup import Table

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Shaw(Position):
    """Relative position representations of Shaw et al. 2018 ("Self-Attention with Relative Position Representations").

    Distances are clipped to `max_distance` (section 3.2, equation 5); heads share the tables. Keys get a term in the
    score (equation 4) and, with `values`, values one in the sum (equation 3).

    Parameters: `key` and, with `values`, `value`: float32 `[2 * max_distance + 1, head_dim]` (`value`: as deep as the
    values); row `max_distance + d` belongs to the distance `d = key position - query position`.
    """

    max_distance: int = 128
    values: bool = True

    def __post_init__(self) -> None:
        check_integer("Shaw.max_distance", self.max_distance, at_most=FARTHEST, at_least=1)
        if not isinstance(self.values, bool | np.bool_):
            raise ValueError(f"Shaw.values must be True or False, got {self.values!r}")

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """Distances are told apart up to about a 32nd of the positions, 8 to 64."""
        return cls(**{"max_distance": block_for_length(num_positions), **overrides})

    @property
    def constant_beyond(self) -> int:
        return self.max_distance

    @property
    def num_embeddings(self) -> int:
        return 2 * self.max_distance + 1

    def init(self, rng: Array, shape: Shape) -> Params:
        size = lambda depth: (self.num_embeddings, depth)
        key_rng, value_rng = jax.random.split(rng)
        scale = shape.head_dim**-0.5
        params = {"key": scale * jax.random.normal(key_rng, size(shape.head_dim))}
        if self.values:
            params["value"] = scale * jax.random.normal(value_rng, size(shape.value_depth))
        return params

    def relative(self, params: Params, *, num_heads: int, causal: bool, kv_len: int) -> Relative:
        value = params["value"][None] if self.values else None
        return Relative(key_table=params["key"][None], value_table=value, radius=self.max_distance)


@dataclasses.dataclass(frozen=True)
class MusicRelative(Position):
    """The unclipped relative term of Huang et al. 2018 ("Music Transformer"), section 3.4, computed by skewing.

    Every head has its own embedding of every distance (E^r of the paper, which is causal; the embeddings of later keys
    are used only where attention is bidirectional). The skewing is done tile by tile, so extra memory grows with
    length x head_dim. Keys or queries beyond `max_len` positions raise ValueError; a query whose position is known
    only at run time and lies beyond gets NaN.

    Parameters: `key`: float32 `[num_heads, 2 * max_len - 1, head_dim]`; entry `max_len - 1 + d` belongs to the distance
    `d = key position - query position`.
    """

    max_len: int = 2048

    def __post_init__(self) -> None:
        check_integer("MusicRelative.max_len", self.max_len, at_most=FARTHEST, at_least=1)

    @property
    def num_positions(self) -> int:
        return self.max_len

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """`max_len` is the number of positions."""
        return cls(**{"max_len": num_positions, **overrides})

    @property
    def num_embeddings(self) -> int:
        return 2 * self.max_len - 1

    def init(self, rng: Array, shape: Shape) -> Params:
        size = (shape.num_heads, self.num_embeddings, shape.head_dim)
        return {"key": shape.head_dim**-0.5 * jax.random.normal(rng, size)}

    def relative(self, params: Params, *, num_heads: int, causal: bool, kv_len: int) -> Relative:
        if kv_len > self.max_len:
            raise ValueError(f"MusicRelative(max_len={self.max_len}) cannot tell distances at length {kv_len} apart")
        return Relative(key_table=params["key"], radius=self.max_len - 1)


@dataclasses.dataclass(frozen=True)
class T5Bias(Position):
    """Bucketed relative bias of Raffel et al. 2020 ("T5"), section 2.1: a scalar for each head and bucket.

    Half of a direction's buckets hold one distance each, the rest grow logarithmically up to `max_distance`, and the
    last holds all beyond. Bidirectional attention gives half of all buckets to later keys; causal attention none.

    Parameters: `bias`: float32 `[num_heads, num_buckets]`.
    """

    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_integer("T5Bias.num_buckets", self.num_buckets, at_most=FARTHEST, at_least=4)
        if self.num_buckets % 2:
            raise ValueError(f"T5Bias.num_buckets must be even, got {self.num_buckets}")
        check_integer("T5Bias.max_distance", self.max_distance, at_most=FARTHEST, at_least=self.num_buckets // 2 + 1)

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """Buckets reach over all positions: `max_distance` is their number, or the least that the buckets allow."""
        buckets = overrides.get("num_buckets", cls.num_buckets)
        least = buckets // 2 + 1 if isinstance(buckets, int) else 1  # the constructor refuses the others
        return cls(**{"max_distance": max(num_positions, least), **overrides})

    @property
    def constant_beyond(self) -> int:
        return self.max_distance

    def init(self, rng: Array, shape: Shape) -> Params:
        return {"bias": 0.02 * jax.random.normal(rng, (shape.num_heads, self.num_buckets))}

    def buckets(self, distances: np.ndarray, *, causal: bool) -> np.ndarray:
        """The bucket of each distance `key position - query position`, int32 of the same shape."""
        buckets, offset = self.num_buckets, np.zeros_like(distances)
        if causal:
            back = np.maximum(-distances, 0)
        else:
            buckets //= 2
            offset, back = np.where(distances > 0, buckets, 0), np.abs(distances)
        exact = buckets // 2
        # float32 as in the published models: it decides on which side of an edge a distance falls.
        ratio = np.log(np.maximum(back, 1).astype(np.float32) / exact) / np.float32(math.log(self.max_distance / exact))
        far = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int32), buckets - 1)
        return (offset + np.where(back < exact, back, far)).astype(np.int32)

    def relative(self, params: Params, *, num_heads: int, causal: bool, kv_len: int) -> Relative:
        # Every distance beyond max_distance falls into the last bucket, so a clipped table is exact.
        distances = np.arange(-self.max_distance, self.max_distance + 1)
        table = jnp.take(params["bias"], self.buckets(distances, causal=causal), axis=1)
        return Relative(bias_table=table, radius=self.max_distance)


@dataclasses.dataclass(frozen=True)
class ALiBi(Position):
    """Linear biases of Press et al. 2022 ("Train Short, Test Long"): `-slope * |distance|`, no parameters.

    The slopes are the paper's geometric sequence (section 3); for head counts that are no power of two, those of the
    next lower power followed by every other one of the next higher, as the authors released it. Bidirectional
    attention uses the symmetric form.
    """

    @staticmethod
    def slopes(num_heads: int) -> np.ndarray:
        """float32 `[num_heads]`."""
        lower = 2 ** int(math.log2(num_heads))
        powers = 2.0 ** (-8.0 / lower * np.arange(1, lower + 1))
        between = 2.0 ** (-4.0 / lower * np.arange(1, 2 * lower + 1, 2))
        return np.concatenate([powers, between[: num_heads - lower]]).astype(np.float32)

    def relative(self, params: Params, *, num_heads: int, causal: bool, kv_len: int) -> Relative:
        return Relative(slopes=jnp.asarray(self.slopes(num_heads)))


POSITIONS: Table[Any] = Table(
    {
        "none": None,
        "shaw": Shaw,
        "shaw_2d": Shaw2D,
        "shaw_tree": ShawTree,
        "music": MusicRelative,
        "t5": T5Bias,
        "alibi": ALiBi,
        "rotary": Rotary,
    },
    kind=Position,
)
