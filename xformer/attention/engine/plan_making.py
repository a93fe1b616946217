"""Makes plans: the listed tiles of a pattern in order, in groups of query tiles that visit about equally many.

Sizes follow from lengths and from the pattern without its draw, so that plans of all seeds have the same shapes.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from xformer.attention.engine.drawn_tiles import DrawnTiles, find_drawn_tiles, table_of
from xformer.attention.engine.tile_listing import Grid, PairMasks, TileList, heads_of, list_tiles, parts_of, sizes
from xformer.attention.engine.tile_plan import TileGroup, TilePlan, ceil_div
from xformer.attention.pattern import Pattern
from xformer.attention.random_blocks import bounds, undrawn

MAX_GROUPS = 6


@functools.lru_cache(maxsize=128)
def make_tile_plan(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    q_block: int,
    kv_block: int,
    chunk_tokens: int,
    query_offset: int = 0,
    constant_beyond: int | None = None,
) -> TilePlan:
    """Lists the tiles of `pattern` for queries at `query_offset + [0, q_len)` and keys at `[0, kv_len)`.

    Args:
      pattern: which pairs exist.
      q_len, kv_len: lengths in tokens; the last tiles may reach past them.
      q_block, kv_block: tile sizes in tokens.
      chunk_tokens: the most keys (but at least one tile) that are attended in one step.
      query_offset: position of the first query.
      constant_beyond: distance beyond which the position term is constant; None where it never is.
    """
    grid, longest_chunk = Grid(q_len, kv_len, q_block, kv_block, query_offset), max(chunk_tokens // kv_block, 1)
    parts = parts_of(pattern)
    if len(kinds := {undrawn(part) for part in parts}) == 1:
        shared = share(kinds.pop(), grid, longest_chunk, constant_beyond)
        if shared is not None:
            return shared.plan([table for part in parts for table in table_of(part)])
    most, least_whole = sizes(pattern, grid)
    slots, masks = _Slots(most, longest_chunk), PairMasks(pattern, grid)
    num_heads = [heads_of(part) for part in parts]
    heads = sum(num_heads)
    key_tiles, mask_ids = (np.full((heads, slots.size), empty, np.int32) for empty in (0, 1))
    distant, whole = (np.full(grid.num_query_tiles, grid.num_key_tiles) for _ in range(2))
    for first, band in grid.bands():
        rows, first_head = slice(first, first + band.num_query_tiles), 0
        for part, own_heads in zip(parts, num_heads, strict=True):
            tiles = _ranked(part, band, masks, constant_beyond)
            head, query_tile = np.divmod(tiles.line, band.num_query_tiles)
            at = first_head + head, slots.first[first + query_tile] + tiles.place
            key_tiles[at], mask_ids[at] = tiles.key_tile, tiles.mask_id
            distant[rows], whole[rows] = np.minimum(distant[rows], tiles.distant), np.minimum(whole[rows], tiles.whole)
            first_head += own_heads
    # Fewer than a draw happens to give: what is static must not follow from it.
    whole = np.minimum(least_whole, whole)
    distant = np.minimum(whole, distant)
    return slots.plan(key_tiles, mask_ids, distant, whole, masks.array(heads * int(most.sum())), grid)


class Shared(NamedTuple):
    """The plan of all seeds, layers and heads, but for which tiles they draw.

    Attributes:
      grid: the tiles.
      slots: of one head's entries.
      key_tiles, mask_ids: int32 `[slots.size]`; those of drawn tiles are filled in.
      distant, whole: `[n_q]`, how many of each query tile are.
      masks: `TilePlan.pair_masks`.
      drawn: the drawn tiles.
      drawn_slots: where they stand.
      partial_slots: where `drawn.partial` stand.
    """

    grid: Grid
    slots: _Slots
    key_tiles: np.ndarray
    mask_ids: np.ndarray
    distant: np.ndarray
    whole: np.ndarray
    masks: np.ndarray
    drawn: DrawnTiles
    drawn_slots: np.ndarray
    partial_slots: np.ndarray

    def plan(self, tables: list[np.ndarray]) -> TilePlan:
        """The plan of heads that draw by these tables, `[num_units, count]` each."""
        key_tiles = np.tile(self.key_tiles, (len(tables), 1))
        mask_ids = np.broadcast_to(self.mask_ids, key_tiles.shape)
        if len(self.partial_slots):
            mask_ids = mask_ids.copy()
        for head, table in enumerate(tables):
            key_tiles[head, self.drawn_slots] = self.drawn.key_tiles(table)
            if len(self.partial_slots):  # of a tile that is listed as partial and drawn too, only the latter counts
                mask_ids[head, self.partial_slots[self.drawn.made_whole(table)]] = 1
        return self.slots.plan(key_tiles, mask_ids, self.distant, self.whole, self.masks, self.grid)


@functools.lru_cache(maxsize=32)
def share(pattern: Pattern, grid: Grid, longest_chunk: int, constant_beyond: int | None) -> Shared | None:
    """Lists what does not depend on the draw; None where even the places of drawn tiles do."""
    drawn = find_drawn_tiles(pattern, grid)
    if drawn is None:
        return None
    fixed = bounds(pattern)[0]
    most, masks = sizes(fixed, grid).most + drawn.counts, PairMasks(fixed, grid)
    slots = _Slots(most, longest_chunk)
    tiles = _ranked(fixed, grid, masks, constant_beyond, drawn.counts)
    at = slots.first[tiles.line] + tiles.place
    drawn_slots = slots.first[drawn.query_tile] + tiles.whole[drawn.query_tile] + drawn.number
    key_tiles, mask_ids = (np.full(slots.size, empty, np.int32) for empty in (0, 1))
    key_tiles[at], mask_ids[at], mask_ids[drawn_slots] = tiles.key_tile, tiles.mask_id, 0
    number = lambda tiles: tiles.line * grid.num_key_tiles + tiles.key_tile
    partial_slots = at[np.searchsorted(number(tiles), number(drawn.partial))]
    whole = tiles.whole + drawn.counts
    return Shared(
        grid, slots, key_tiles, mask_ids, tiles.distant, whole, masks.array(0), drawn, drawn_slots, partial_slots
    )


def _chunks(width: int, longest: int) -> tuple[int, int]:
    """Number and length of chunks: as many as are needed, each as short as that allows."""
    num_chunks = ceil_div(width, min(longest, width))
    return num_chunks, ceil_div(width, num_chunks)


class _Slots:
    """Where the entries of a head stand in one flat array: group by group, `[query tiles, chunks x chunk]` each.

    Attributes:
      groups: (query tiles, number of chunks, tiles in a chunk).
      first: int64 `[n_q]`, where each query tile's entries begin.
      size: entries of a head.
    """

    def __init__(self, most: np.ndarray, longest_chunk: int) -> None:
        self.groups, self.size = [], 0
        self.first = np.zeros(len(most), np.int64)
        for query_tiles in _group_by_count(most):
            num_chunks, chunk = _chunks(max(int(most[query_tiles].max()), 1), longest_chunk)
            self.groups.append((query_tiles, num_chunks, chunk))
            self.first[query_tiles] = self.size + np.arange(len(query_tiles)) * num_chunks * chunk
            self.size += len(query_tiles) * num_chunks * chunk

    def plan(
        self,
        key_tiles: np.ndarray,
        mask_ids: np.ndarray,
        distant: np.ndarray,
        whole: np.ndarray,
        masks: np.ndarray,
        grid: Grid,
    ) -> TilePlan:
        """The plan of entries `[heads, size]`, and of how many of each query tile's are distant and whole `[n_q]`."""
        groups, start = [], 0
        for query_tiles, num_chunks, chunk in self.groups:
            shape = len(query_tiles), num_chunks, chunk
            own = slice(start, start := start + math.prod(shape))
            cut = lambda x, own=own, shape=shape: x[:, own].reshape(len(x), *shape)
            chunks = (int(counts[query_tiles].min()) // chunk for counts in (distant, whole))
            groups.append(TileGroup(query_tiles.astype(np.int32), cut(key_tiles), cut(mask_ids), *chunks))
        return TilePlan(tuple(groups), masks, grid.q_block, grid.kv_block)


class _Ranked(NamedTuple):
    """A pattern's listed tiles, `[n]` each, and how many of each query tile are distant and whole at least, `[n_q]`."""

    line: np.ndarray
    key_tile: np.ndarray
    mask_id: np.ndarray
    place: np.ndarray
    distant: np.ndarray
    whole: np.ndarray


def _ranked(
    pattern: Pattern, grid: Grid, masks: PairMasks, constant_beyond: int | None, kept: np.ndarray | None = None
) -> _Ranked:
    """Places distant whole key tiles first, then other whole ones, then partial ones.

    Before the last there are places kept for `kept` `[n_q]` more whole tiles of every query tile.
    """
    listed, heads = list_tiles(pattern, grid)
    mask_id = np.zeros(len(listed.line), np.int64)
    mask_id[~listed.whole] = masks.of(pattern, listed.where(~listed.whole), grid)
    whole = mask_id == 0
    distant = whole & _distant(listed, grid, constant_beyond)
    rank = 2 - whole.astype(np.int8) - distant
    lines = heads * grid.num_query_tiles
    counts = [np.bincount(listed.line[rank == kind], minlength=lines) for kind in range(3)]
    place = np.zeros(len(listed.line), np.int64)
    before = np.zeros(lines, np.int64)
    for kind, count in enumerate(counts):
        mine = np.flatnonzero(rank == kind)
        # Listed line by line, so a line's are the next ones.
        place[mine] = np.arange(len(mine)) - np.repeat(np.cumsum(count) - count - before, count)
        before += count
        if kind == 1 and kept is not None:
            before += np.tile(kept, heads)
    # Random blocks may or may not be distant: only those that are not drawn are sure to be.
    fixed = bounds(pattern)[0]
    sure = counts[0]
    if constant_beyond is not None and fixed != pattern:
        static, static_heads = list_tiles(fixed, grid)
        far = static.line[static.whole & _distant(static, grid, constant_beyond)]
        sure = np.bincount(far, minlength=static_heads * grid.num_query_tiles)
    least = lambda x: x.reshape(-1, grid.num_query_tiles).min(0)
    return _Ranked(listed.line, listed.key_tile, mask_id, place, least(sure), least(counts[0] + counts[1]))


def _distant(listed: TileList, grid: Grid, constant_beyond: int | None) -> np.ndarray:
    """Whether all pairs of each tile are at a distance beyond which the position term is constant."""
    if constant_beyond is None:
        return np.zeros(len(listed.line), bool)
    _, q_first, k_first, q_block, kv_block = listed.tiles(grid)
    ahead, behind = k_first - (q_first + q_block - 1), q_first - (k_first + kv_block - 1)
    return np.maximum(ahead, behind) >= constant_beyond


def _group_by_count(counts: np.ndarray) -> list[np.ndarray]:
    """Splits query tiles into at most `MAX_GROUPS` groups of like counts so that the padded work is least."""
    values = np.unique(counts)
    if len(values) > 64:  # enough steps to choose from; the search below is cubic in them
        values = np.unique(np.quantile(counts, np.linspace(0, 1, 64), method="higher"))
    sizes = [int(((counts <= top) & (counts > low)).sum()) for low, top in zip([-1, *values[:-1]], values, strict=True)]
    overhead = 1.0  # tiles' worth of work that one more group costs
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(values) + 1):
        options = []
        for start in range(end):
            cost, cuts = best[start]
            if len(cuts) < MAX_GROUPS:
                work = float(values[end - 1]) * sum(sizes[start:end]) + overhead
                options.append((cost + work, [*cuts, end]))
        best.append(min(options, key=lambda option: option[0]) if options else (np.inf, [0] * MAX_GROUPS))
    tops = [int(values[end - 1]) for end in best[-1][1]]
    lows = [-1, *tops[:-1]]
    return [np.flatnonzero((counts <= top) & (counts > low)) for low, top in zip(lows, tops, strict=True)]
