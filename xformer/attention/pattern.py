"""Which (query, key) pairs exist: leaves, joined by `|` and `&`.

A pattern is a frozen dataclass. It answers two questions: `allows` for single pairs and `tiles` for rectangles of
pairs, so that the engine can list the tiles that hold any pair at all, and test single pairs only in tiles that hold
some but not all. Positions count from 0 on both sides. Block patterns take `unit`, the number of tokens in a block.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Bounds(NamedTuple):
    """First and last position (inclusive) of each query tile `[n_q]` and key tile `[n_k]`."""

    q_first: np.ndarray
    q_last: np.ndarray
    k_first: np.ndarray
    k_last: np.ndarray

    def units(self, unit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The bounds in blocks of `unit` tokens, queries as `[n_q, 1]` and keys as `[1, n_k]`."""
        q_first, q_last, k_first, k_last = (bound // unit for bound in self)
        return q_first[:, None], q_last[:, None], k_first[None], k_last[None]


class Pattern:
    """Base of all patterns. Subclasses are frozen dataclasses."""

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        """Whether each pair exists: int `[q_len]`, int `[kv_len]` -> bool `[heads or 1, q_len, kv_len]`.

        NumPy and JAX arrays both work; the answer is of the same kind.
        """
        raise NotImplementedError

    def tiles(self, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
        """(some pair exists, every pair exists), each bool `[heads or 1, n_q, n_k]`.

        The first may be True for an empty tile and the second False for a full one, never the other way round.
        """
        raise NotImplementedError

    def __or__(self, other: Pattern) -> Pattern:
        return Or(self, other)

    def __and__(self, other: Pattern) -> Pattern:
        return And(self, other)


@dataclasses.dataclass(frozen=True)
class Or(Pattern):
    """Pairs of either pattern."""

    left: Pattern
    right: Pattern

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        return self.left.allows(q_positions, k_positions) | self.right.allows(q_positions, k_positions)

    def tiles(self, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
        (some_l, every_l), (some_r, every_r) = self.left.tiles(bounds), self.right.tiles(bounds)
        return some_l | some_r, every_l | every_r


@dataclasses.dataclass(frozen=True)
class And(Pattern):
    """Pairs of both patterns."""

    left: Pattern
    right: Pattern

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        return self.left.allows(q_positions, k_positions) & self.right.allows(q_positions, k_positions)

    def tiles(self, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
        (some_l, every_l), (some_r, every_r) = self.left.tiles(bounds), self.right.tiles(bounds)
        return some_l & some_r, every_l & every_r


@dataclasses.dataclass(frozen=True)
class Full(Pattern):
    """Every pair."""

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        return ((q_positions[:, None] >= 0) & (k_positions[None] >= 0))[None]

    def tiles(self, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
        every = np.ones((1, len(bounds.q_first), len(bounds.k_first)), bool)
        return every, every


@dataclasses.dataclass(frozen=True)
class Causal(Pattern):
    """Keys at or before the query."""

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        return (k_positions[None] <= q_positions[:, None])[None]

    def tiles(self, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
        q_first, q_last, k_first, k_last = bounds.units(1)
        return (k_first <= q_last)[None], (k_last <= q_first)[None]


@dataclasses.dataclass(frozen=True)
class Window(Pattern):
    """Keys at most `left` units before and `right` units after the query's unit, both inclusive."""

    left: int
    right: int
    unit: int = 1

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        distance = k_positions[None] // self.unit - q_positions[:, None] // self.unit
        return ((distance >= -self.left) & (distance <= self.right))[None]

    def tiles(self, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
        q_first, q_last, k_first, k_last = bounds.units(self.unit)
        lowest, highest = k_first - q_last, k_last - q_first
        some = (highest >= -self.left) & (lowest <= self.right)
        every = (lowest >= -self.left) & (highest <= self.right)
        return some[None], every[None]


@dataclasses.dataclass(frozen=True)
class Global(Pattern):
    """The first `first` and the last `last` of `num_units` units see all and are seen by all."""

    first: int
    last: int
    num_units: int
    unit: int = 1

    def _holds(self, units: Any) -> Any:
        return (units < self.first) | (units >= self.num_units - self.last)

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        return (self._holds(q_positions[:, None] // self.unit) | self._holds(k_positions[None] // self.unit))[None]

    def tiles(self, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
        q_first, q_last, k_first, k_last = bounds.units(self.unit)
        some = self._holds(q_first) | self._holds(q_last) | self._holds(k_first) | self._holds(k_last)

        def inside(first: np.ndarray, last: np.ndarray) -> np.ndarray:
            return (last < self.first) | (first >= self.num_units - self.last)

        return some[None], (inside(q_first, q_last) | inside(k_first, k_last))[None]


@dataclasses.dataclass(frozen=True)
class Random(Pattern):
    """Each query unit outside `taken`'s full rows sees `count` random key units that `taken` does not show it.

    Drawn without replacement from all `num_units` units (with `past_only`, from those before the query's own), all of
    them where there are fewer. Every head draws for itself, from the seed sequence (seed, layer, head), so the same
    numbers give the same blocks in every process and for every subset of heads.
    """

    count: int
    num_units: int
    unit: int
    num_heads: int
    taken: Pattern
    seed: int
    layer: int = 0
    past_only: bool = False

    @property
    def table(self) -> np.ndarray:
        """int32 `[num_heads, num_units, count]`: the key units of every query unit, -1 where there are fewer."""
        return _random_table(self)

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        xp = np if isinstance(q_positions, np.ndarray) else jnp
        units = xp.clip(q_positions // self.unit, 0, self.num_units - 1)
        rows = xp.asarray(self.table)[:, units]  # [heads, q_len, count]
        return (rows[:, :, None, :] == (k_positions // self.unit)[None, None, :, None]).any(-1)

    def tiles(self, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
        q_first, q_last, k_first, k_last = bounds.units(self.unit)
        sums = _random_sums(self)

        def at(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
            return sums[:, np.minimum(rows, self.num_units), np.minimum(columns, self.num_units)]

        held = at(q_last + 1, k_last + 1) - at(q_first, k_last + 1) - at(q_last + 1, k_first) + at(q_first, k_first)
        return held > 0, held == (q_last + 1 - q_first) * (k_last + 1 - k_first)


@functools.lru_cache(maxsize=256)
def _random_table(pattern: Random) -> np.ndarray:
    units = np.arange(pattern.num_units)
    starts, ends = units * pattern.unit, (units + 1) * pattern.unit - 1
    hidden = ~pattern.taken.tiles(Bounds(starts, ends, starts, ends))[1][0]
    if pattern.past_only:
        hidden &= units[None] < units[:, None]
    available = hidden.sum(-1, keepdims=True)
    width = min(pattern.count, pattern.num_units)
    table = np.full((pattern.num_heads, pattern.num_units, pattern.count), -1, np.int32)
    for head in range(pattern.num_heads):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((pattern.seed, pattern.layer, head))))
        draw = np.where(hidden, generator.random(hidden.shape, np.float32), np.inf)
        chosen = np.argsort(draw, axis=-1, kind="stable")[:, :width]
        chosen = np.where(np.arange(width) < available, chosen, pattern.num_units)
        chosen.sort(axis=-1)
        table[head, :, :width] = np.where(chosen == pattern.num_units, -1, chosen)
    table.setflags(write=False)
    return table


@functools.lru_cache(maxsize=16)
def _random_sums(pattern: Random) -> np.ndarray:
    """Two-dimensional prefix sums of the block mask, int32 `[num_heads, num_units + 1, num_units + 1]`."""
    table, size = _random_table(pattern), pattern.num_units
    mask = np.zeros((pattern.num_heads, size + 1, size + 2), np.int32)
    heads, rows, _ = np.indices(table.shape)
    mask[heads, rows + 1, table + 1] = 1  # column 0 takes the -1 of rows that have fewer
    mask[:, :, 0] = 0
    return mask[:, :, : size + 1].cumsum(1).cumsum(2)


@dataclasses.dataclass(frozen=True)
class Heads(Pattern):
    """Patterns side by side: the heads of each, of equal number, after those of the one before."""

    parts: tuple[Pattern, ...]

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        xp = np if isinstance(q_positions, np.ndarray) else jnp
        return xp.concatenate([part.allows(q_positions, k_positions) for part in self.parts])

    def tiles(self, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
        some, every = zip(*(part.tiles(bounds) for part in self.parts), strict=True)
        return np.concatenate(some), np.concatenate(every)


def dense(pattern: Pattern, q_len: int, kv_len: int, *, query_offset: int = 0) -> np.ndarray:
    """The whole pattern, bool `[heads or 1, q_len, kv_len]`; for tests and pictures."""
    allowed = pattern.allows(np.arange(q_len) + query_offset, np.arange(kv_len))
    return np.broadcast_to(allowed, (allowed.shape[0], q_len, kv_len))
