"""The tiles of a pattern in order, whole or partial, and the masks of the partial ones, at the cost of what is listed.

How many tiles a query tile visits, and which masks can occur, is said for any seed of a pattern's random blocks: sizes
of plans must not depend on the draw.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.pattern import Heads, Pattern, Tiles, leaves
from xformer.attention.random_blocks import Random, bounds, undrawn
from xformer.attention.spans import Spans, expand

BAND = 512  # query tiles


@dataclasses.dataclass(frozen=True)
class Grid:
    """The score matrix, for queries at `query_offset + [0, q_len)` and keys at `[0, kv_len)`, cut into tiles.

    The last tiles may reach past the lengths. Sizes are in tokens.
    """

    q_len: int
    kv_len: int
    q_block: int
    kv_block: int
    query_offset: int = 0

    @property
    def num_query_tiles(self) -> int:
        """Query tiles."""
        return ceil_div(self.q_len, self.q_block)

    @property
    def num_key_tiles(self) -> int:
        """Key tiles."""
        return ceil_div(self.kv_len, self.kv_block)

    @functools.cached_property
    def q_first(self) -> np.ndarray:
        """Position of the first query of every query tile, int64."""
        return np.arange(self.num_query_tiles, dtype=np.int64) * self.q_block + self.query_offset

    @functools.cached_property
    def q_last(self) -> np.ndarray:
        """That of the last one. It ends at the true length: a tile that only padding makes partial needs no test."""
        return np.minimum(self.q_first + self.q_block, self.q_len + self.query_offset) - 1

    def bands(self) -> Iterator[tuple[int, Grid]]:
        """The grid in bands of query tiles, each with the number of its first; a band's lists fit the caches."""
        for first in range(0, self.num_query_tiles, BAND):
            start = first * self.q_block
            q_len = min(self.q_len - start, BAND * self.q_block)
            yield first, dataclasses.replace(self, q_len=q_len, query_offset=self.query_offset + start)

    def spans(self, pattern: Pattern) -> tuple[Spans, Spans]:
        """The key tiles that hold some pair and those that hold all, of every query tile; each once, ascending."""
        some, every = pattern.spans(self.q_first, self.q_last)
        return some.touched(self.kv_block, self.kv_len), every.covered(self.kv_block, self.kv_len)


class TileList(NamedTuple):
    """Tiles that hold a pair, by head, query tile and key tile.

    Attributes:
      line: int64 `[n]`, head x query tiles + query tile.
      key_tile: int64 `[n]`.
      whole: bool `[n]`, every pair exists; else pairs must be tested.
    """

    line: np.ndarray
    key_tile: np.ndarray
    whole: np.ndarray

    def tiles(self, grid: Grid) -> Tiles:
        """Where the tiles stand."""
        head, query_tile = np.divmod(self.line, grid.num_query_tiles)
        return Tiles(head, grid.q_first[query_tile], self.key_tile * grid.kv_block, grid.q_block, grid.kv_block)

    def where(self, some: np.ndarray) -> TileList:
        """Those where `some` `[n]` is True."""
        return TileList(self.line[some], self.key_tile[some], self.whole[some])


def list_tiles(pattern: Pattern, grid: Grid) -> tuple[TileList, int]:
    """The tiles of a pattern and the number of its heads, 1 where all share theirs."""
    some, every = grid.spans(pattern)
    heads = max(some.first.shape[0], every.first.shape[0])
    wide = lambda spans: Spans(*(np.broadcast_to(x, (heads, *x.shape[1:])) for x in spans))
    line, key_tile = expand(wide(some))
    whole = np.zeros(len(line), bool)
    key = line * grid.num_key_tiles + key_tile
    whole_line, whole_tile = expand(wide(every))
    if len(whole_line) == len(line):
        whole[:] = True
    else:
        whole[np.searchsorted(key, whole_line * grid.num_key_tiles + whole_tile)] = True
    return TileList(line, key_tile, whole), heads


def parts_of(pattern: Pattern) -> tuple[Pattern, ...]:
    """The patterns whose heads stand side by side."""
    return pattern.parts if isinstance(pattern, Heads) else (pattern,)


def heads_of(pattern: Pattern) -> int:
    """The number of heads that the pattern tells apart, 1 where all share theirs."""
    position = np.zeros(1, np.int64)
    return pattern.spans(position, position)[0].first.shape[0]


class Sizes(NamedTuple):
    """Of every query tile `[n_q]`, for any seed and head.

    Attributes:
      most: the most key tiles that it can visit; what it does visit where blocks are whole tiles.
      whole: the number of whole key tiles that it visits at least.
    """

    most: np.ndarray
    whole: np.ndarray


def sizes(pattern: Pattern, grid: Grid) -> Sizes:
    """What the numbers of listed tiles can be: those without random blocks and what these can add."""
    each = [_sizes(part, grid) for part in {undrawn(part): part for part in parts_of(pattern)}.values()]
    most, whole = zip(*each, strict=True)
    return Sizes(np.max(most, 0), np.min(whole, 0))


def _sizes(pattern: Pattern, grid: Grid) -> Sizes:
    least, most = (grid.spans(bound) for bound in bounds(pattern))
    count, whole = (spans.counts().sum(-1) for spans in least)
    for leaf in leaves(pattern):
        if not isinstance(leaf, Random):
            continue
        low, high = leaf.units_of(grid.q_first), leaf.units_of(grid.q_last)
        sums = np.concatenate([[0], np.cumsum(leaf.choices.drawn)])
        aligned = leaf.unit % grid.kv_block == 0
        each = leaf.unit // grid.kv_block if aligned else ceil_div(leaf.unit - 1, grid.kv_block) + 1
        count = count + (sums[high + 1] - sums[low]) * each
    return Sizes(np.minimum(count, most[0].counts().sum(-1)).max(0), whole.min(0))


class PairMasks:
    """The masks of partial tiles, each once. Mask 0 is all pairs, mask 1 none.

    The masks come first that tiles have without random blocks and with all of them: these are known whatever the seed.
    """

    def __init__(self, pattern: Pattern, grid: Grid) -> None:
        self.grid = grid
        shape = grid.q_block, grid.kv_block
        self.masks = [np.ones(shape, bool), np.zeros(shape, bool)]
        self.known = {mask.tobytes(): index for index, mask in enumerate(self.masks)}
        self.units = {leaf.unit for part in parts_of(pattern) for leaf in leaves(part) if isinstance(leaf, Random)}
        between = [bound for part in parts_of(pattern) for bound in bounds(part)] if self.units else []
        for bound in dict.fromkeys(between):
            self.of(bound, partial_tiles(bound, grid), grid)
        self.fixed = len(self.masks)

    def of(self, pattern: Pattern, partial: TileList, grid: Grid) -> np.ndarray:
        """The mask of every partial tile of the grid or of a band of it, int64 `[n]`."""
        tiles = partial.tiles(grid)
        kind, first = _distinct(pattern.signature(tiles), len(partial.line))
        ids = [self._index(pattern, *(int(x[at]) for x in tiles[:3])) for at in first]
        return np.asarray(ids, np.int64)[kind] if ids else np.zeros(0, np.int64)

    def _index(self, pattern: Pattern, head: int, q_first: int, k_first: int) -> int:
        allowed = pattern.allows(q_first + np.arange(self.grid.q_block), k_first + np.arange(self.grid.kv_block))
        mask = np.ascontiguousarray(np.broadcast_to(allowed[min(head, len(allowed) - 1)], self.masks[0].shape))
        index = self.known.setdefault(mask.tobytes(), len(self.masks))
        if index == len(self.masks):
            self.masks.append(mask)
        return index

    def array(self, most: int) -> np.ndarray:
        """bool `[masks, q_block, kv_block]`, with room for those of any seed; at most `most` tiles are listed."""
        room = max(len(self.masks), self.fixed + min(self._drawn_masks(), most))
        out = np.zeros((room, *self.masks[0].shape), bool)
        out[: len(self.masks)] = self.masks
        return out

    def _drawn_masks(self) -> int:
        """The most masks that random blocks can add: none where a tile is all in one block or out of it."""
        grid, added = self.grid, 0
        for unit in self.units:
            q_places = np.unique(grid.q_first % unit)
            k_places = np.unique(np.arange(grid.num_key_tiles) * grid.kv_block % unit)
            q_units = (int(q_places[-1]) + grid.q_block - 1) // unit + 1
            k_units = (int(k_places[-1]) + grid.kv_block - 1) // unit + 1
            if q_units * k_units > 1:
                added += len(q_places) * len(k_places) * self.fixed**2 << min(q_units * k_units, 40)
        return added


def partial_tiles(pattern: Pattern, grid: Grid) -> TileList:
    """The partial tiles of a pattern without random blocks; whole ones, which may be many more, are not listed."""
    some, every = grid.spans(pattern)
    # Between the whole tiles of a query tile, which are few runs, lie the others.
    end = np.full((*every.first.shape[:2], 1), grid.num_key_tiles, np.int64)
    reached = np.maximum.accumulate(np.where(every.last < every.first, -1, every.last), -1)
    first = np.concatenate([np.zeros_like(end), reached + 1], -1)
    last = np.concatenate([np.where(every.last < every.first, first[..., :-1], every.first), end], -1) - 1
    gaps = some.meet(Spans(first, last))
    lines, tiles = expand(gaps)
    return TileList(lines, tiles, np.zeros(len(lines), bool))


def _distinct(columns: Iterable[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """For rows of integer columns: the number of each row's kind, and the first row of every kind."""
    kind = np.zeros(length, np.int64)
    first = np.zeros(min(length, 1), np.int64)
    for column in columns:
        values, column = np.unique(column, return_inverse=True)
        _, first, kind = np.unique(kind * len(values) + column, return_index=True, return_inverse=True)
    return kind, first
