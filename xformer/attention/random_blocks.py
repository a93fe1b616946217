"""Random key blocks for every query block: drawn uniformly, without replacement, at the cost of what is drawn."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xformer.attention.pattern import And, Full, Global, Or, Pattern, Reach, Tiles, units_of_tile
from xformer.attention.spans import Spans


@dataclasses.dataclass(frozen=True)
class Random(Pattern):
    """Each query unit outside `taken`'s full rows sees `count` random key units that `taken` does not show it.

    Drawn without replacement from all `num_units` units (with `past_only`, from those before the query's own), all of
    them where there are fewer. Every head draws for itself, from the seed (seed, layer, head), so the same numbers give
    the same blocks in every process and for every subset of heads. With `past_only` what a unit draws depends on its
    index and not on `num_units`.
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
        """int32 `[num_heads, num_units, count or fewer]`: the key units of every query unit, -1 where fewer.

        Those that were drawn come first, in ascending order; how many these are does not depend on the seed.
        """
        return _draw(self)

    @property
    def choices(self) -> Choices:
        """What each query unit draws from, whatever the seed."""
        return _choices(undrawn(self))

    @property
    def limits(self) -> np.ndarray:
        """int64 `[num_units]`: each query unit draws from the units below its limit."""
        return np.arange(self.num_units) if self.past_only else np.full(self.num_units, self.num_units)

    def units_of(self, positions: Any) -> Any:
        """The unit of each position; the first or the last of positions that lie beyond them."""
        xp = np if isinstance(positions, np.ndarray) else jnp
        return xp.clip(positions // self.unit, 0, self.num_units - 1)

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        xp = np if isinstance(q_positions, np.ndarray) else jnp
        units = self.units_of(q_positions)
        rows = xp.asarray(self.table)[:, units]  # [heads, q_len, count]
        key_units = k_positions.reshape(-1, 1, k_positions.shape[-1], 1) // self.unit
        return (rows[:, :, None, :] == key_units).any(-1)

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        low, high = self.units_of(q_first), self.units_of(q_last)
        units = low[:, None] + np.arange(int((high - low).max()) + 1)  # [query tiles, units of each]
        drawn = self.table[:, np.minimum(units, high[:, None])].astype(np.int64)
        drawn = drawn.reshape(self.num_heads, len(q_first), -1)
        some = Spans(drawn * self.unit, np.where(drawn < 0, -1, (drawn + 1) * self.unit - 1))
        # Of a tile that has queries of several units no key is said to be seen by all: its pairs are tested.
        return some, Spans(some.first, np.where((low == high)[:, None], some.last, -1))

    def reach(self, q_first: Any, q_block: int, *, causal: bool = False) -> list[Reach] | None:
        units = self.units_of(q_first[:, None] + np.arange(units_of_tile(q_block, self.unit)) * self.unit)
        drawn = (np if isinstance(q_first, np.ndarray) else jnp).asarray(self.table)[:, units]
        return [Reach(drawn.reshape(*drawn.shape[:2], -1) * self.unit, self.unit, self.unit)]

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        q_unit, k_unit = tiles.q_first // self.unit, tiles.k_first // self.unit
        q_place, k_place = tiles.q_first % self.unit, tiles.k_first % self.unit
        q_units, k_units = (
            int((place.max(initial=0) + block - 1) // self.unit) + 1
            for place, block in ((q_place, tiles.q_block), (k_place, tiles.kv_block))
        )
        if q_units * k_units > 62:  # more than an integer holds: every tile for itself
            return [tiles.head, tiles.q_first, tiles.k_first]
        drawn = np.zeros(len(q_unit), np.int64)
        for row in range(q_units):
            rows = self.table[tiles.head % self.num_heads, np.minimum(q_unit + row, self.num_units - 1)]
            for column in range(k_units):
                drawn = drawn * 2 + (rows == (k_unit + column)[:, None]).any(-1)
        return [q_place, k_place, drawn]


class Choices(NamedTuple):
    """What query units draw from, whatever the seed.

    Attributes:
      visible: disjoint, ascending spans of units that are not drawn, `[1, num_units, spans]`; all below the limits.
      steps: of the spans that are not empty everywhere, how many units could be drawn before each, and how many it has:
        int32 `[num_units]`.
      available: int64 `[num_units]`, from how many units each draws.
      drawn: int64 `[num_units]`, how many each draws.
    """

    visible: Spans
    steps: tuple[tuple[np.ndarray, np.ndarray], ...]
    available: np.ndarray
    drawn: np.ndarray


@functools.lru_cache(maxsize=32)
def _choices(pattern: Random) -> Choices:
    first = np.arange(pattern.num_units, dtype=np.int64) * pattern.unit
    every = pattern.taken.spans(first, first + pattern.unit - 1)[1]
    visible = every.covered(pattern.unit, pattern.num_units * pattern.unit)
    visible = Spans(visible.first, np.minimum(visible.last, pattern.limits[:, None] - 1))
    sizes = visible.counts()[0]
    free_before = visible.first[0] - (np.cumsum(sizes, -1) - sizes)
    by_span = lambda x: np.ascontiguousarray(x[:, sizes.any(0)].T, np.int32)
    steps = tuple(zip(by_span(free_before), by_span(sizes), strict=True))
    available = pattern.limits - sizes.sum(-1)
    return Choices(visible, steps, available, np.minimum(available, pattern.count))


@functools.lru_cache(maxsize=256)
def _draw(pattern: Random) -> np.ndarray:
    table = draw_blocks(pattern.choices, pattern.num_heads, (pattern.seed, pattern.layer))
    table.setflags(write=False)
    return table


def replace_random(pattern: Pattern, leaf: Callable[[Random], Pattern]) -> Pattern:
    """The pattern with `leaf(random)` in the place of random blocks."""
    if isinstance(pattern, Or | And):
        return type(pattern)(replace_random(pattern.left, leaf), replace_random(pattern.right, leaf))
    return leaf(pattern) if isinstance(pattern, Random) else pattern


def undrawn(pattern: Pattern) -> Any:
    """The same pattern for every seed and layer."""
    return replace_random(pattern, lambda leaf: dataclasses.replace(leaf, seed=0, layer=0))


def bounds(pattern: Pattern) -> tuple[Pattern, Pattern]:
    """Patterns without and with all random blocks: any draw lies between them."""
    return replace_random(pattern, lambda _: Global(0, 0, 1)), replace_random(pattern, lambda _: Full())


def draw_blocks(choices: Choices, num_heads: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draws blocks for every query block.

    What a query block draws is a function of the seed, the head, its own index, and the blocks it may draw: more query
    blocks after it change nothing.

    Args:
      choices: what each query block draws from.
      num_heads: heads, each of which draws for itself.
      seed: non-negative integers.

    Returns:
      int32 `[num_heads, num_blocks, most drawn]`, the drawn blocks in ascending order, then -1 where fewer.
    """
    available, drawn = choices.available, choices.drawn
    num_blocks, width = len(drawn), int(drawn.max(initial=0))
    ranks: list[np.ndarray] = []
    # Floyd's sampling (Bentley & Floyd 1987): the place-th draw is uniform up to `top`, or `top` if that is taken.
    for place in range(width):
        top = (available - drawn + place).astype(np.int32)
        rank = np.empty((num_heads, num_blocks), np.int32)
        for head in range(num_heads):
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((*seed, head, place))))
            rank[head] = generator.random(num_blocks) * (top + 1)
        for taken in ranks:
            np.copyto(rank, top, where=rank == taken)
        rank[:, place >= drawn] = num_blocks  # nothing: above every rank, so that it comes last
        ranks.append(rank)
    table = np.empty((num_heads, num_blocks, width), np.int32)
    for place, rank in enumerate(ranks):
        # The rank among the blocks that may be drawn becomes a block: visible ones before it are stepped over.
        table[..., place] = rank
        for free_before, size in choices.steps:
            table[..., place] += (rank >= free_before) * size
    table.sort(-1)
    table[table >= num_blocks] = -1
    return table
