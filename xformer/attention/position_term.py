"""What every relative position term offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import jax

from xformer.attention.engine.relative_tiles import Relative
from xformer.attention.shape import Shape
from xformer.attention.signature import Params

Array = jax.Array
FARTHEST = 2**24  # tokens: tables of distances are held in memory


class Position:
    """Base of all position terms. Subclasses are frozen dataclasses."""

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """The term with sensible hyperparameters for inputs of up to `num_positions` positions; `overrides` win.

        Raises ValueError as the constructor does.
        """
        return cls(**overrides)

    def remarks(self, num_positions: int) -> tuple[str, ...]:
        """As `Attention.remarks`: what is computed where it is not what the fields seem to say."""
        return ()

    @property
    def num_embeddings(self) -> int:
        """Distances that have an embedding each, which queries meet in a product."""
        return 0

    @property
    def constant_beyond(self) -> int | None:
        """Distance from which on the term is constant: one value behind a query and one ahead. None: it never is."""
        return None

    @property
    def by_distance(self) -> bool:
        """Whether what it adds to a pair follows from the distance of the two positions."""
        return True

    @property
    def reads_trees(self) -> bool:
        """Whether it needs `paths` or `distances` of a call."""
        return False

    @property
    def num_positions(self) -> int | None:
        """How many positions, from 0, the term can tell apart; None: any number."""
        return None

    @property
    def turns(self) -> bool:
        """Whether the term rotates queries and keys."""
        return type(self).rotate is not Position.rotate

    @property
    def only_turns(self) -> bool:
        """Whether it does that, wherever they stand, and nothing else."""
        return self.turns and type(self).relative is Position.relative and self.num_positions is None

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


def drawn(rng: Array, sizes: Mapping[str, tuple[int, ...]], scale: float) -> Params:
    """Tables of these sizes, float32, of normal numbers with this standard deviation."""
    keys = jax.random.split(rng, len(sizes))
    return {name: scale * jax.random.normal(key, size) for (name, size), key in zip(sizes.items(), keys, strict=True)}
