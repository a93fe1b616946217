"""Makes plans: the listed tiles of a pattern in order, in groups of query tiles that visit about equally many.

Sizes follow from lengths and from the pattern without its draw, so that plans of all seeds have the same shapes.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from xformer.attention.engine.tile_listing import Grid, PairMasks, TileList, heads_of, list_tiles, parts_of, sizes
from xformer.attention.engine.tile_plan import TileGroup, TilePlan, ceil_div
from xformer.attention.pattern import Pattern
from xformer.attention.random_blocks import NOTHING, replace_random

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
    grid = Grid(q_len, kv_len, q_block, kv_block, query_offset)
    bounds, masks = sizes(pattern, grid), PairMasks(pattern, grid)
    slots = _Slots(bounds.most, max(chunk_tokens // kv_block, 1))
    parts = parts_of(pattern)
    num_heads = [heads_of(part) for part in parts]
    heads = sum(num_heads)
    key_tiles, mask_ids = np.zeros(heads * slots.size, np.int32), np.ones(heads * slots.size, np.int32)
    distant, whole = (np.full(grid.num_query_tiles, grid.num_key_tiles) for _ in range(2))
    for first, band in grid.bands():
        rows, first_head = slice(first, first + band.num_query_tiles), 0
        for part, own_heads in zip(parts, num_heads, strict=True):
            tiles = _ranked(part, band, masks, constant_beyond)
            head, query_tile = np.divmod(tiles.line, band.num_query_tiles)
            place = slots.place(heads, first_head + head, first + query_tile, tiles.place)
            key_tiles[place], mask_ids[place] = tiles.key_tile, tiles.mask_id
            distant[rows], whole[rows] = np.minimum(distant[rows], tiles.distant), np.minimum(whole[rows], tiles.whole)
            first_head += own_heads
    # Fewer than a draw happens to give: what is static must not follow from it.
    whole = np.minimum(bounds.whole, whole)
    distant = np.minimum(whole, distant)
    groups = []
    for group, (query_tiles, num_chunks, chunk) in enumerate(slots.groups):
        shape = heads, len(query_tiles), num_chunks, chunk
        cut = lambda x, group=group, shape=shape: x[heads * slots.starts[group] :][: math.prod(shape)].reshape(shape)
        chunks = (int(counts[query_tiles].min()) // chunk for counts in (distant, whole))
        groups.append(TileGroup(query_tiles.astype(np.int32), cut(key_tiles), cut(mask_ids), *chunks))
    return TilePlan(tuple(groups), masks.array(heads * int(bounds.most.sum())), q_block, kv_block)


@functools.lru_cache(maxsize=128)
def make_band_plan(
    before: int, after: int, q_len: int, kv_len: int, q_block: int, kv_block: int, chunk_tokens: int
) -> TilePlan:
    """A plan for any query offset, of a pattern in which a query sees keys at most `before` and `after` places away.

    It lists for every query tile as many key tiles as that touches wherever it stands; `TilePlan.at_offset` places
    them. All tiles are listed as whole: the pairs must be tested as the offset becomes known (`Settings.pattern`).
    Other arguments: see `make_tile_plan`.
    """
    num_query_tiles, num_key_tiles = ceil_div(q_len, q_block), ceil_div(kv_len, kv_block)
    before, after = min(before, kv_len + q_len), min(after, kv_len + q_len)  # as good as any larger
    width = min(ceil_div(before + q_block + after - 1, kv_block) + 1, num_key_tiles)
    num_chunks, chunk = _chunks(width, max(chunk_tokens // kv_block, 1))
    place = np.arange(num_chunks * chunk, dtype=np.int32).reshape(num_chunks, chunk)
    every = lambda x: np.broadcast_to(x, (1, num_query_tiles, *x.shape)).astype(np.int32)
    listed, whole = every(place), width // chunk
    group = TileGroup(np.arange(num_query_tiles, dtype=np.int32), listed, every(place >= width), 0, whole)
    masks = np.stack([np.full((q_block, kv_block), held) for held in (True, False)])
    return TilePlan((group,), masks, q_block, kv_block, before)


def _chunks(width: int, longest: int) -> tuple[int, int]:
    """Number and length of chunks: as many as are needed, each as short as that allows."""
    num_chunks = ceil_div(width, min(longest, width))
    return num_chunks, ceil_div(width, num_chunks)


class _Slots:
    """Where a plan's entries stand in one flat array: group by group, `[heads, query tiles, chunks x chunk]` each.

    Attributes:
      groups: (query tiles, number of chunks, tiles in a chunk).
      starts: where each group begins, for one head.
      size: entries of one head.
    """

    def __init__(self, most: np.ndarray, longest_chunk: int) -> None:
        self.groups, self.starts, self.size = [], [], 0
        self.row, self.width, self.start, self.rows = (np.zeros(len(most), np.int64) for _ in range(4))
        for query_tiles in _group_by_count(most):
            width = max(int(most[query_tiles].max()), 1)
            num_chunks, chunk = _chunks(width, longest_chunk)
            self.groups.append((query_tiles, num_chunks, chunk))
            self.starts.append(self.size)
            self.row[query_tiles], self.width[query_tiles] = np.arange(len(query_tiles)), num_chunks * chunk
            self.start[query_tiles], self.rows[query_tiles] = self.size, len(query_tiles)
            self.size += len(query_tiles) * num_chunks * chunk

    def place(self, heads: int, head: np.ndarray, query_tile: np.ndarray, place: np.ndarray) -> np.ndarray:
        """The index of the entry at `place` of the list of a head's query tile."""
        line = head * self.rows[query_tile] + self.row[query_tile]
        return heads * self.start[query_tile] + line * self.width[query_tile] + place


class _Ranked(NamedTuple):
    """A pattern's listed tiles, `[n]` each, and how many of each query tile are distant and whole at least, `[n_q]`."""

    line: np.ndarray
    key_tile: np.ndarray
    mask_id: np.ndarray
    place: np.ndarray
    distant: np.ndarray
    whole: np.ndarray


def _ranked(pattern: Pattern, grid: Grid, masks: PairMasks, constant_beyond: int | None) -> _Ranked:
    """Places distant whole key tiles first, then other whole ones, then partial ones."""
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
    # Random blocks may or may not be distant: only those that are not drawn are sure to be.
    fixed = replace_random(pattern, NOTHING)
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
