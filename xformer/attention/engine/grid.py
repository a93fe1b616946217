"""Tokens that lie in the rows of a grid, and which entries of a table belong to a pair of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

Array = jax.Array
PREFIX_ENTRIES = 4  # of pairs with a prefix token: only the query is one, only the key, both; and one that is zero


@dataclasses.dataclass(frozen=True)
class Grid:
    """A grid read row by row, after some tokens that have no place in it.

    A table for it has entries of, in this order, distances in rows, distances in columns (`2 * max_distance + 1` each,
    from negative to positive) and, with prefix tokens, the `PREFIX_ENTRIES`. A pair has two of them.

    Attributes:
      columns: tokens of a row; there are as many rows as tokens make.
      num_prefix_tokens: tokens at the first positions that are not of the grid, such as a class token.
      max_distance: rows and columns farther apart count as so far apart.
    """

    columns: int
    num_prefix_tokens: int
    max_distance: int

    @property
    def size(self) -> int:
        """Entries of a table."""
        return 2 * (2 * self.max_distance + 1) + (PREFIX_ENTRIES if self.num_prefix_tokens else 0)

    def entries(self, q_positions: Array, k_positions: Array) -> tuple[Array, Array]:
        """The two entries of pairs of positions, int, in the shape that both broadcast to."""
        q_token, k_token = (x - self.num_prefix_tokens for x in (q_positions, k_positions))
        reach = lambda distance: jnp.clip(distance, -self.max_distance, self.max_distance) + self.max_distance
        num_distances = 2 * self.max_distance + 1
        row = reach(k_token // self.columns - q_token // self.columns)
        column = num_distances + reach(k_token % self.columns - q_token % self.columns)
        if not self.num_prefix_tokens:
            return row, column
        q_prefix, k_prefix = q_token < 0, k_token < 0
        which = 2 * num_distances + jnp.where(q_prefix & k_prefix, 2, jnp.where(k_prefix, 1, 0))
        either = q_prefix | k_prefix
        return jnp.where(either, which, row), jnp.where(either, 2 * num_distances + PREFIX_ENTRIES - 1, column)
