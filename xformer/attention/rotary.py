"""Rotary positions: queries and keys turn before the scores."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp

from xformer.attention.dtypes import compute_dtype
from xformer.attention.position_term import FARTHEST, Position
from xformer.attention.rotary_scaling import SCALINGS, Scaling, frequencies, magnitude
from xformer.checks import check_integer, did_you_mean

Array = jax.Array


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

    def remarks(self, num_positions: int) -> tuple[str, ...]:
        if self.scaling == "none" or self.factor != 1:
            return ()
        trained = "" if self.trained_len is None else f": {num_positions} positions, trained_len {self.trained_len}"
        return (f"{self}: a factor of 1 slows nothing down, as scaling='none'{trained}",)

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
