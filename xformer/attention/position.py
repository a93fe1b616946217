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

from xformer.attention.dtypes import compute_dtype
from xformer.attention.engine.relative_tiles import Relative
from xformer.attention.rotary_scaling import SCALINGS, Scaling, frequencies, magnitude
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.attention.sizing import block_for_length
from xformer.checks import check_integer, did_you_mean
from xformer.lookup import Table

Array = jax.Array


class Position:
    """Base of all position terms. Subclasses are frozen dataclasses."""

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """The term with sensible hyperparameters for inputs of up to `num_positions` positions; `overrides` win.

        Raises ValueError as the constructor does.
        """
        return cls(**overrides)

    @property
    def num_embeddings(self) -> int:
        """Distances that have an embedding each, which queries meet in a product."""
        return 0

    @property
    def constant_beyond(self) -> int | None:
        """Distance from which on the term is constant: one value behind a query and one ahead. None: it never is."""
        return None

    @property
    def num_positions(self) -> int | None:
        """How many positions, from 0, the term can tell apart; None: any number."""
        return None

    def init(self, rng: Array, shape: Shape) -> Params:
        """The term's parameters: a dict of float32 arrays, empty where it has none."""
        return {}

    def rotate(self, x: Array, positions: Array) -> Array:
        """Queries or keys `[batch, length, num_heads, head_dim]`, rotated.

        `positions` is int `[length]` or `[batch or 1, length]`.
        """
        return x

    def relative(self, params: Params, *, num_heads: int, causal: bool, kv_len: int) -> Relative | None:
        """Tables that the engine reads by distance. Raises ValueError for lengths the term cannot tell apart."""
        return None


FARTHEST = 2**24  # tokens: tables of distances are held in memory


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


@dataclasses.dataclass(frozen=True)
class Rotary(Position):
    """Rotary embeddings of Su et al. 2021 ("RoFormer"), equation 34: dimension pairs turn with the position.

    Dimension `i` is paired with `i + head_dim / 2` (the halves convention of GPT-NeoX and LLaMA); the pair turns by
    `position * base ** (-2 i / head_dim)`. Angles are computed in float32 whatever the dtype of the arrays.
    `head_dim` must be even.

    A model that was trained with `scaling="none"` reads contexts `factor` times longer with "linear", "ntk" or "yarn",
    best after some more training; `xformer.attention.rotary_scaling` has the formulas. Layers of a stack may have
    bases of their own.

    Attributes:
      base: of the angles.
      scaling: how pairs are slowed down; "none": not at all.
      factor: the longest context over the trained one, at least 1.
      trained_len: tokens of the contexts it was trained on: for "yarn" needed, elsewhere to choose `factor` by.
    """

    base: float = 10_000.0
    scaling: Scaling = "none"
    factor: float = 1.0
    trained_len: int | None = None

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """With a scaling and a `trained_len`, `factor` is how many times longer the positions are."""
        trained, scaled = overrides.get("trained_len"), overrides.get("scaling", "none") != "none"
        if scaled and isinstance(trained, int) and trained > 0:
            overrides = {"factor": max(num_positions / trained, 1.0), **overrides}
        return cls(**overrides)

    def __post_init__(self) -> None:
        if isinstance(self.base, bool) or not isinstance(self.base, int | float) or not 1 < self.base < math.inf:
            raise ValueError(f"Rotary.base must be a number above 1, got {self.base!r}")
        if self.scaling not in SCALINGS:
            hint = did_you_mean(self.scaling, SCALINGS)
            raise ValueError(f"Rotary.scaling must be one of {', '.join(SCALINGS)}, got {self.scaling!r}{hint}")
        number = isinstance(self.factor, int | float) and not isinstance(self.factor, bool)
        if not number or not 1 <= self.factor < math.inf:
            raise ValueError(f"Rotary.factor must be a number from 1, got {self.factor!r}")
        if self.trained_len is not None:
            check_integer("Rotary.trained_len", self.trained_len, at_most=FARTHEST, at_least=1)
        if self.scaling == "none" and (self.factor != 1 or self.trained_len is not None):
            given = f"factor={self.factor}, trained_len={self.trained_len}"
            raise ValueError(f"Rotary.scaling must be linear, ntk or yarn with {given}, got 'none'")
        if self.scaling == "yarn" and self.trained_len is None:
            raise ValueError("Rotary.trained_len must be given with scaling='yarn', got None")

    def rotate(self, x: Array, positions: Array) -> Array:
        head_dim = x.shape[-1]
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for Rotary, got {head_dim}")
        dtype = compute_dtype(x.dtype)
        steps = jnp.asarray(frequencies(head_dim, self.base, self.scaling, self.factor, self.trained_len), dtype)
        steps = steps.reshape(*[1] * (positions.ndim + 1), -1)
        angles = positions.astype(dtype)[..., None, None] * steps  # [..., length, 1, head_dim / 2]
        angles = jnp.expand_dims(angles, range(x.ndim - angles.ndim))
        size = magnitude(self.scaling, self.factor)
        cos, sin = size * jnp.cos(angles), size * jnp.sin(angles)
        first, second = jnp.split(x.astype(dtype), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


POSITIONS: Table[Any] = Table(
    {
        "none": None,
        "shaw": Shaw,
        "music": MusicRelative,
        "t5": T5Bias,
        "alibi": ALiBi,
        "rotary": Rotary,
    },
    kind=Position,
)
