"""The tiles of random blocks whose places in a plan are the same whatever is drawn.

So it is where tiles divide blocks. What a plan lists besides, and where the drawn tiles go, is then found once for all
heads, layers and seeds, and a draw only fills in which tiles they are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xformer.attention.engine.tile_listing import Grid, TileList, partial_tiles
from xformer.attention.pattern import Pattern, leaves
from xformer.attention.random_blocks import Random, bounds
from xformer.attention.spans import Spans


class DrawnTiles(NamedTuple):
    """The tiles that a head draws; tables are `Random.table`.

    Attributes:
      counts: int64 `[n_q]`, how many tiles each query tile draws.
      query_tile: int64 `[n]`, the query tile of every drawn tile, in ascending order.
      number: int64 `[n]`, which of the query tile's drawn tiles it is.
      entry: int64 `[n]`, where its block stands in a head's table, flat.
      part: int32 `[n]`, which tile of the block it is.
      tiles_per_block: key tiles of a block.
      partial: tiles that the pattern lists as partial without random blocks, in blocks that may be drawn too.
      units: int64 like those, the table's row of each.
    """

    counts: np.ndarray
    query_tile: np.ndarray
    number: np.ndarray
    entry: np.ndarray
    part: np.ndarray
    tiles_per_block: int
    partial: TileList
    units: np.ndarray

    def key_tiles(self, table: np.ndarray) -> np.ndarray:
        """The key tiles `[n]` of a head with this table, `[num_units, count]`."""
        return table.reshape(-1)[self.entry] * self.tiles_per_block + self.part

    def made_whole(self, table: np.ndarray) -> np.ndarray:
        """Which of the `partial` tiles are drawn by a head with this table, bool."""
        blocks = self.partial.key_tile // self.tiles_per_block
        return (table[self.units] == blocks[:, None]).any(-1)


def table_of(pattern: Pattern) -> np.ndarray:
    """The table of a pattern's only random blocks, `[num_heads, num_units, count]`."""
    (leaf,) = (leaf for leaf in leaves(pattern) if isinstance(leaf, Random))
    return leaf.table


def find_drawn_tiles(pattern: Pattern, grid: Grid) -> DrawnTiles | None:
    """The drawn tiles of a pattern, for any seed; None where their places in a plan depend on the draw.

    Places are known where random blocks are one leaf of the pattern, a tile is drawn as a whole or not at all, and no
    tile that is whole without the draw is drawn.
    """
    drawing = [leaf for leaf in leaves(pattern) if isinstance(leaf, Random)]
    if len(drawing) != 1:
        return None
    (leaf,) = drawing
    units, tiles_per_block = leaf.units_of(grid.q_first), leaf.unit // grid.kv_block
    if grid.num_key_tiles != leaf.num_units * tiles_per_block or (units != leaf.units_of(grid.q_last)).any():
        return None
    without, with_all = bounds(pattern)
    limits = leaf.limits[units] * tiles_per_block
    below = lambda spans: Spans(spans.first, np.minimum(spans.last, limits[:, None] - 1))
    count = lambda spans: spans.counts().sum(-1)[0]
    visible = Spans(*(ends[:, units] for ends in leaf.choices.visible))
    visible = Spans(visible.first * tiles_per_block, (visible.last + 1) * tiles_per_block - 1)
    whole = below(grid.spans(without)[1])
    if (count(whole.meet(visible)) < count(whole)).any() or (count(below(grid.spans(with_all)[1])) < limits).any():
        return None
    partial = partial_tiles(without, grid)
    first, last = (ends[0, partial.line] for ends in visible)
    tile = partial.key_tile[:, None]
    seen = ((first <= tile) & (tile <= last)).any(-1)
    partial = partial.where(~seen & (partial.key_tile < limits[partial.line]))
    counts = leaf.choices.drawn[units] * tiles_per_block
    query_tile = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(query_tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = int(leaf.choices.drawn.max(initial=0))
    place, part = np.divmod(number, tiles_per_block)
    entry, part = units[query_tile] * width + place, part.astype(np.int32)
    return DrawnTiles(counts, query_tile, number, entry, part, tiles_per_block, partial, units[partial.line])
