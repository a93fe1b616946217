"""Random key blocks for every query block: drawn uniformly, without replacement, at the cost of what is drawn."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from xformer.attention.pattern import And, Global, Or, Pattern, Tiles
from xformer.attention.spans import Spans

NOTHING = Global(0, 0, 1)


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
        """int32 `[num_heads, num_units, count or fewer]`: the key units of every query unit, -1 where fewer."""
        return _draw(self)[0]

    @property
    def available(self) -> np.ndarray:
        """int64 `[num_units]`: the number of units from which each query unit draws."""
        return _draw(self)[1]

    @property
    def limits(self) -> np.ndarray:
        """int64 `[num_units]`: each query unit draws from the units below its limit."""
        return np.arange(self.num_units) if self.past_only else np.full(self.num_units, self.num_units)

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        xp = np if isinstance(q_positions, np.ndarray) else jnp
        units = xp.clip(q_positions // self.unit, 0, self.num_units - 1)
        rows = xp.asarray(self.table)[:, units]  # [heads, q_len, count]
        return (rows[:, :, None, :] == (k_positions // self.unit)[None, None, :, None]).any(-1)

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        low, high = (np.clip(ends // self.unit, 0, self.num_units - 1) for ends in (q_first, q_last))
        units = low[:, None] + np.arange(int((high - low).max()) + 1)  # [query tiles, units of each]
        drawn = self.table[:, np.minimum(units, high[:, None])].astype(np.int64)
        drawn = drawn.reshape(self.num_heads, len(q_first), -1)
        some = Spans(drawn * self.unit, np.where(drawn < 0, -1, (drawn + 1) * self.unit - 1))
        # Of a tile that has queries of several units no key is said to be seen by all: its pairs are tested.
        return some, Spans(some.first, np.where((low == high)[:, None], some.last, -1))

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


@functools.lru_cache(maxsize=256)
def _draw(pattern: Random) -> tuple[np.ndarray, np.ndarray]:
    first = np.arange(pattern.num_units, dtype=np.int64) * pattern.unit
    every = pattern.taken.spans(first, first + pattern.unit - 1)[1]
    visible = every.covered(pattern.unit, pattern.num_units * pattern.unit)
    table, available = draw_blocks(
        visible, pattern.limits, pattern.count, pattern.num_heads, (pattern.seed, pattern.layer)
    )
    table.setflags(write=False)
    return table, available


def replace_random(pattern: Pattern, leaf: Pattern) -> Pattern:
    """The pattern with `leaf` in the place of random blocks; any draw lies between `NOTHING` and `Full()`."""
    if isinstance(pattern, Or | And):
        return type(pattern)(replace_random(pattern.left, leaf), replace_random(pattern.right, leaf))
    return leaf if isinstance(pattern, Random) else pattern


def draw_blocks(
    visible: Spans, limits: np.ndarray, count: int, num_heads: int, seed: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Draws up to `count` of the blocks below `limits` that are not visible, for every query block.

    What a query block draws is a function of the seed, the head, its own index, `count`, and the blocks it may draw:
    more query blocks after it change nothing.

    Args:
      visible: disjoint, ascending spans of blocks that are not drawn, `[1, num_blocks, spans]`.
      limits: int `[num_blocks]`, each query block draws from the key blocks below its limit.
      count: blocks to draw, all that may be drawn where those are fewer.
      num_heads: heads, each of which draws for itself.
      seed: non-negative integers.

    Returns:
      int32 `[num_heads, num_blocks, count or fewer]`, the drawn blocks in ascending order, then -1 where fewer; and
      int64 `[num_blocks]`, how many blocks could be drawn.
    """
    num_blocks = len(limits)
    last = np.minimum(visible.last[0], limits[:, None] - 1)
    sizes = np.maximum(last - visible.first[0] + 1, 0)  # [num_blocks, spans]
    available = limits - sizes.sum(-1)
    width = min(count, int(available.max(initial=0)))
    drawn = np.minimum(available, count)
    ranks = np.full((num_heads, num_blocks, width), -1, np.int64)
    for head in range(num_heads):
        # Floyd's sampling (Bentley & Floyd 1987): the place-th draw is uniform up to `top`, or `top` if that is taken.
        for place in range(width):
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((*seed, head, place))))
            top = available - drawn + place
            rank = (generator.random(num_blocks) * (top + 1)).astype(np.int64)
            taken = (ranks[head, :, :place] == rank[:, None]).any(-1)
            ranks[head, :, place] = np.where(place < drawn, np.where(taken, top, rank), -1)
    # The rank among the blocks that may be drawn becomes a block: visible ones before it are stepped over.
    free_before = visible.first[0] - (np.cumsum(sizes, -1) - sizes)  # blocks before each span that may be drawn
    blocks = ranks.copy()
    for span in range(sizes.shape[-1]):
        blocks += np.where(ranks >= free_before[:, span, None], sizes[:, span, None], 0)
    blocks = np.where(ranks < 0, np.iinfo(np.int32).max, blocks)
    blocks.sort(-1)
    return np.where(blocks == np.iinfo(np.int32).max, -1, blocks).astype(np.int32), available
