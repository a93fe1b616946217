"""Which (query, key) pairs exist: leaves, joined by `|` and `&`.

A pattern is a frozen dataclass. It answers two questions: `allows` for single pairs and `spans` for whole query tiles,
so that the engine can list the tiles that hold any pair at all without looking at those that hold none, and test single
pairs only in tiles that hold some but not all. Positions count from 0 on both sides. Block patterns take `unit`, the
number of tokens in a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xformer.attention.spans import END, Spans


class Tiles(NamedTuple):
    """Some tiles of one size: int64 `[n]`, the head, the first query and the first key of each."""

    head: np.ndarray
    q_first: np.ndarray
    k_first: np.ndarray
    q_block: int
    kv_block: int


class Reach(NamedTuple):
    """Ranges of keys, all of one length.

    Attributes:
      first: int `[heads or 1, query tiles, ranges]`, the first key of each; those outside of the keys do not count.
      length: keys of a range.
      multiple_of: a number of which all of `first` are multiples; 0 where they are 0.
    """

    first: Any
    length: int
    multiple_of: int


class Pattern:
    """Base of all patterns. Subclasses are frozen dataclasses."""

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        """Whether each pair exists: int `[q_len]`, int `[kv_len]` -> bool `[heads or 1, q_len, kv_len]`.

        Keys may be `[heads, kv_len]`, of every head its own. NumPy and JAX arrays both work; the answer is of the same
        kind.
        """
        raise NotImplementedError

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        """The keys that some query of a tile may see, and keys that every query of it sees.

        `q_first`, `q_last`: first and last position (inclusive) of each query tile `[n_q]`. The first answer may hold
        keys that no query sees and the second lack keys that all see, never the other way round.
        """
        raise NotImplementedError

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        """Integers `[n]` of every tile: where all are equal, the same pairs of the tile exist."""
        raise NotImplementedError

    def reach(self, q_first: Any, q_block: int, *, causal: bool = False) -> list[Reach] | None:
        """Ranges that hold all keys that queries of a tile may see, as many and as long wherever the tile stands.

        None where the pattern has none, as where some query sees all keys. For tiles whose position is known only at
        run time. `q_first`: int `[query tiles]`, NumPy or JAX, the first position of each; `q_block`: queries of a
        tile; `causal`: keys after the last query of a tile need not be held.
        """
        return None

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

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        (some_l, every_l), (some_r, every_r) = self.left.spans(q_first, q_last), self.right.spans(q_first, q_last)
        return some_l.join(some_r), every_l.join(every_r)

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        return self.left.signature(tiles) + self.right.signature(tiles)

    def reach(self, q_first: Any, q_block: int, *, causal: bool = False) -> list[Reach] | None:
        left, right = (side.reach(q_first, q_block, causal=causal) for side in (self.left, self.right))
        return None if left is None or right is None else left + right


@dataclasses.dataclass(frozen=True)
class And(Pattern):
    """Pairs of both patterns."""

    left: Pattern
    right: Pattern

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        return self.left.allows(q_positions, k_positions) & self.right.allows(q_positions, k_positions)

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        (some_l, every_l), (some_r, every_r) = self.left.spans(q_first, q_last), self.right.spans(q_first, q_last)
        return some_l.meet(some_r), every_l.meet(every_r)

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        return self.left.signature(tiles) + self.right.signature(tiles)

    def reach(self, q_first: Any, q_block: int, *, causal: bool = False) -> list[Reach] | None:
        causal = causal or isinstance(self.left, Causal) or isinstance(self.right, Causal)
        left, right = (side.reach(q_first, q_block, causal=causal) for side in (self.left, self.right))
        return right if left is None else left


@dataclasses.dataclass(frozen=True)
class Full(Pattern):
    """Every pair."""

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = as_pairs(q_positions, k_positions)
        return (query >= 0) & (key >= 0)

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        every = Spans.of((np.zeros_like(q_first), END))
        return every, every

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        return []


@dataclasses.dataclass(frozen=True)
class Causal(Pattern):
    """Keys at or before the query."""

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = as_pairs(q_positions, k_positions)
        return key <= query

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        return Spans.of((0, q_last)), Spans.of((0, q_first))

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        return [np.clip(tiles.k_first - tiles.q_first, -tiles.kv_block, tiles.q_block)]


@dataclasses.dataclass(frozen=True)
class Window(Pattern):
    """Keys at most `left` units before and `right` units after the query's unit, both inclusive."""

    left: int
    right: int
    unit: int = 1

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = as_pairs(q_positions, k_positions)
        distance = key // self.unit - query // self.unit
        return (distance >= -min(self.left, END)) & (distance <= min(self.right, END))

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        low, high = q_first // self.unit, q_last // self.unit
        left, right = min(self.left, END), min(self.right, END)
        begin, end = lambda units: units * self.unit, lambda units: (units + 1) * self.unit - 1
        return (
            Spans.of((begin(low - left), end(high + right))),
            Spans.of((begin(high - left), end(low + right))),
        )

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        q_unit, k_unit = tiles.q_first // self.unit, tiles.k_first // self.unit
        # Beyond these distances no pair exists, wherever the tiles are.
        least = -min(self.left, END) - tiles.kv_block // self.unit - 2
        most = min(self.right, END) + tiles.q_block // self.unit + 2
        distance = np.clip(k_unit - q_unit, least, most)
        return [tiles.q_first % self.unit, tiles.k_first % self.unit, distance]

    def reach(self, q_first: Any, q_block: int, *, causal: bool = False) -> list[Reach] | None:
        num_units = self.left + units_of_tile(q_block, self.unit) + (0 if causal else self.right)
        first = (q_first // self.unit - self.left) * self.unit
        return [Reach(first[None, :, None], num_units * self.unit, self.unit)]


@dataclasses.dataclass(frozen=True)
class Global(Pattern):
    """The first `first` and the last `last` of `num_units` units see all and are seen by all."""

    first: int
    last: int
    num_units: int
    unit: int = 1

    def _holds(self, units: Any) -> Any:
        held = units < self.first
        return held | (units >= self.num_units - self.last) if self.last else held

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = as_pairs(q_positions, k_positions)
        return self._holds(query // self.unit) | self._holds(key // self.unit)

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        low, high, after = q_first // self.unit, q_last // self.unit, self.num_units - self.last
        some, every = low < self.first, high < self.first
        columns: list[tuple[Any, Any]] = [(0, self.first * self.unit - 1)]
        if self.last:
            some, every = some | (high >= after), every | (low >= after)
            columns.append((after * self.unit, END))
        # Most query tiles are not global: where none is, there is no span for them.
        row = lambda held: [(np.zeros_like(q_first), np.where(held, END, -1))] if held.any() else []
        columns = [(np.zeros_like(q_first) + first, last) for first, last in columns]
        return Spans.of(*row(some), *columns), Spans.of(*row(every), *columns)

    def reach(self, q_first: Any, q_block: int, *, causal: bool = False) -> list[Reach] | None:
        if self.last or (self.first and not causal):
            return None
        # The past of global queries at the start is global.
        first = np.zeros((1, len(q_first), 1), np.int32)
        return [Reach(first, self.first * self.unit, 0)] if self.first else []

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        edges = [self.first, self.num_units - self.last] if self.last else [self.first]
        sides = (tiles.q_first, tiles.q_block), (tiles.k_first, tiles.kv_block)
        return [np.clip(edge * self.unit - first, 0, block) for edge in edges for first, block in sides]


@dataclasses.dataclass(frozen=True)
class Heads(Pattern):
    """Patterns side by side: the heads of each, of equal number, after those of the one before.

    Listed part by part, so it has no spans of its own.
    """

    parts: tuple[Pattern, ...]

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        xp = np if isinstance(q_positions, np.ndarray) else jnp
        return xp.concatenate([part.allows(q_positions, k_positions) for part in self.parts])


def split_causal(pattern: Pattern) -> tuple[Pattern, bool]:
    """What a causal cut was put on, and True; any other pattern as it is, and False."""
    if isinstance(pattern, And) and isinstance(pattern.right, Causal):
        return pattern.left, True
    return pattern, False


def as_pairs(q_positions: Any, k_positions: Any) -> tuple[Any, Any]:
    """Positions that broadcast to `[heads or 1, q_len, kv_len]`."""
    return q_positions[None, :, None], k_positions.reshape(-1, 1, k_positions.shape[-1])


def units_of_tile(size: int, unit: int) -> int:
    """The most units that so many tokens in a row touch."""
    return (size + unit - 2) // unit + 1


def leaves(pattern: Pattern) -> Iterator[Pattern]:
    """The patterns that `|` and `&` join."""
    if isinstance(pattern, Or | And):
        yield from leaves(pattern.left)
        yield from leaves(pattern.right)
    else:
        yield pattern


def dense(pattern: Pattern, q_len: int, kv_len: int, *, query_offset: int = 0) -> np.ndarray:
    """The whole pattern, bool `[heads or 1, q_len, kv_len]`; for tests and pictures."""
    allowed = pattern.allows(np.arange(q_len) + query_offset, np.arange(kv_len))
    return np.broadcast_to(allowed, (allowed.shape[0], q_len, kv_len))
