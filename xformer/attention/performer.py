"""Performer: an estimate of softmax attention by random features (Choromanski et al. 2021, "Rethinking Attention")."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp

from xformer.attention.call import Call
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.interface import CONSTANTS
from xformer.attention.linear_attention import LinearAttention
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.attention.state.features import FeatureMap, Operands, PositiveRandom, Relu
from xformer.checks import check_integer

Array = jax.Array
Kernel = Literal["softmax", "relu"]


@dataclasses.dataclass(frozen=True)
class Performer(LinearAttention):
    """FAVOR+: random features whose products estimate the weights of softmax attention, without bias (lemma 1).

    Constants: `projection`, float32 `[num_features, head_dim]`, shared by the heads: Gaussian directions, orthogonal to
    each other within every `head_dim` of them (section 2.4). An op called bare draws them from `seed`; an `AttentionFn`
    draws its own and saves them; `constants` with another key redraws them.

    Exponentials are kept within float32 without the small number that the released code adds: the largest exponent of
    each feature among the keys is divided out, or, where attention is causal or has segments, that of each key. Rotary
    positions turn queries and keys before the features, so the estimate is that of softmax attention under Rotary.

    Attributes:
      num_features: more of them estimate better.
      kernel: "softmax", the positive features of lemma 1; "relu": relu(w x), generalised attention (equation 5), whose
        weights a `scale` cancels from.
      seed: of the constants where none are given.
    """

    num_features: int = 256
    kernel: Kernel = "softmax"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("Performer.num_features", self.num_features)
        check_integer("Performer.seed", self.seed, at_least=0)
        if self.kernel not in get_args(Kernel):
            raise ValueError(f"Performer.kernel must be one of {', '.join(get_args(Kernel))}, got {self.kernel!r}")

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """About a quarter as many features as positions, a power of 2 from 16 to 256."""
        features = 1 << max(num_positions // 4, 1).bit_length() - 1
        return cls(**{"num_features": min(max(features, 16), 256), **overrides})

    def feature_map(self, scale: float) -> FeatureMap:
        if self.kernel == "relu":
            return Relu(num_features=self.num_features)
        if scale < 0:
            raise ValueError(f'Performer(kernel="softmax") needs a scale of at least 0, got {scale}')
        return PositiveRandom(scale, self.num_features)

    def scaled(self, query: Array, key: Array, scale: Array) -> tuple[Array, Array]:
        if self.kernel == "relu":
            return query, key
        root = jnp.sqrt(scale)[None, None, :, None]
        return query.astype(root.dtype) * root, key.astype(root.dtype) * root

    def constants(self, rng: Array, shape: Shape) -> Params:
        return {"projection": orthogonal(rng, self.num_features, shape.head_dim)}

    def _operands(self, params: Params, call: Call) -> Operands:
        projection = params[CONSTANTS]["projection"]
        if projection.shape != (want := (self.num_features, call.query.shape[-1])):
            raise ValueError(f"{self} needs constants projection {want}, got {projection.shape}")
        return {"projection": jax.lax.stop_gradient(projection)}


def orthogonal(rng: Array, num_features: int, head_dim: int) -> Array:
    """Directions `[num_features, head_dim]`, each a standard Gaussian, orthogonal within every `head_dim` of them."""
    blocks = ceil_div(num_features, head_dim)
    of_directions, of_lengths = jax.random.split(rng)
    factor, triangle = jnp.linalg.qr(jax.random.normal(of_directions, (blocks, head_dim, head_dim)))
    # The signs make the factor uniform among orthogonal matrices (Mezzadri 2007, section 5).
    factor = factor * jnp.sign(jnp.diagonal(triangle, axis1=1, axis2=2))[:, None]
    lengths = jnp.linalg.norm(jax.random.normal(of_lengths, (num_features, head_dim)), axis=1)
    return factor.reshape(-1, head_dim)[:num_features] * lengths[:, None]
