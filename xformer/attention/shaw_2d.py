"""Relative positions of tokens in a grid, such as the patches of an image."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine.grid import PREFIX_ENTRIES, Grid
from xformer.attention.engine.relative_tiles import Relative
from xformer.attention.position_term import FARTHEST, Position, drawn
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.checks import check_integer

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Shaw2D(Position):
    """Shaw's relative representations by row and by column (Bello et al. 2019, section 3.1.1, equation 3).

    Tokens are the places of a grid, row by row. The vector of a pair is the sum of one for its distance in rows and one
    for its distance in columns, each clipped to `max_distance`; it is used as that of `Shaw` is (Shaw et al. 2018,
    equations 3 and 4), and heads share the tables. Tokens before the grid, such as a class token, have no row and no
    column: pairs with them have vectors of their own.

    Parameters, float32: `row_key` and `column_key` `[2 * max_distance + 1, head_dim]`, whose row `max_distance + d`
    belongs to the distance `d` of the key from the query; with prefix tokens `prefix_key` `[3, head_dim]`, for pairs of
    which the query, the key or both are such tokens; with `values` likewise `row_value`, `column_value` and
    `prefix_value`, as deep as the values.

    Args:
      columns: tokens of a row.
      num_prefix_tokens: tokens before the first row.
      max_distance: rows or columns that are told apart.
      values: whether values get a term too.
    """

    columns: int = 14
    num_prefix_tokens: int = 0
    max_distance: int = 16
    values: bool = True

    def __post_init__(self) -> None:
        check_integer("Shaw2D.columns", self.columns, at_most=FARTHEST, at_least=1)
        check_integer("Shaw2D.num_prefix_tokens", self.num_prefix_tokens, at_most=FARTHEST, at_least=0)
        check_integer("Shaw2D.max_distance", self.max_distance, at_most=FARTHEST, at_least=1)
        if not isinstance(self.values, bool | np.bool_):
            raise ValueError(f"Shaw2D.values must be True or False, got {self.values!r}")

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """The square of so many tokens, or of all but a class token in front; all its distances are told apart.

        Where neither is a square, the last row is not full. A model of images refuses a grid that is not its own.
        """
        chosen = {"columns": max(math.isqrt(num_positions), 1), **overrides}
        columns = chosen["columns"]
        if isinstance(columns, int) and columns > 0:  # the constructor refuses the others
            chosen.setdefault("num_prefix_tokens", int(num_positions % columns == 1 and num_positions > 1))
            chosen.setdefault("max_distance", max(columns - 1, num_positions // columns - 1, 1))
        return cls(**chosen)

    @property
    def grid(self) -> Grid:
        """Which entries of the tables belong to a pair."""
        return Grid(self.columns, self.num_prefix_tokens, self.max_distance)

    @property
    def by_distance(self) -> bool:
        return False

    @property
    def num_embeddings(self) -> int:
        return self.grid.size

    def init(self, rng: Array, shape: Shape) -> Params:
        depths = {"key": shape.head_dim, **({"value": shape.value_depth} if self.values else {})}
        rows = {"row": 2 * self.max_distance + 1, "column": 2 * self.max_distance + 1}
        rows |= {"prefix": PREFIX_ENTRIES - 1} if self.num_prefix_tokens else {}
        sizes = {f"{part}_{kind}": (count, depth) for kind, depth in depths.items() for part, count in rows.items()}
        # The sum of a pair's two vectors starts as one of Shaw's.
        scale = (2 * shape.head_dim) ** -0.5
        return drawn(rng, sizes, scale)

    def relative(self, params: Params, *, num_heads: int, causal: bool, kv_len: int) -> Relative:
        value = self._table(params, "value") if self.values else None
        return Relative(key_table=self._table(params, "key"), value_table=value, grid=self.grid)

    def _table(self, params: Params, kind: str) -> Array:
        """The table of a grid, `[1, entries, depth]`."""
        parts = [params[f"row_{kind}"], params[f"column_{kind}"]]
        if self.num_prefix_tokens:
            prefix = params[f"prefix_{kind}"]
            parts += [prefix, jnp.zeros_like(prefix[:1])]  # those pairs have one vector, and one of zeros
        return jnp.concatenate(parts)[None]
