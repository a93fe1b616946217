"""A relative position term: what it adds to the scores, as a table over the distance."""

from __future__ import annotations

import dataclasses

import jax

from xformer.attention import Position, Shape
from xformer.attention.engine.relative_tiles import Relative


@dataclasses.dataclass(frozen=True)
class DistanceBias(Position):
    """A learned number for each head and distance, added to the score; distances beyond `reach` share the last."""

    reach: int = 16

    def __post_init__(self) -> None:
        if self.reach < 1:
            raise ValueError(f"DistanceBias.reach must be at least 1, got {self.reach}")

    @property
    def constant_beyond(self) -> int:
        return self.reach

    def init(self, rng: jax.Array, shape: Shape) -> dict[str, jax.Array]:
        return {"bias": 0.02 * jax.random.normal(rng, (shape.num_heads, 2 * self.reach + 1))}

    def relative(self, params: dict[str, jax.Array], *, num_heads: int, causal: bool, kv_len: int) -> Relative:
        return Relative(bias_table=params["bias"], radius=self.reach)
