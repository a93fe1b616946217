"""The tiles of a pattern in compressed sparse rows, by query tile and by key tile: what the GPU kernels walk along.

Every list has its own length, so global rows and columns lengthen no other. Arrays are host-made operands whose shapes
do not depend on a pattern's seed: they have room for as many tiles as any seed could need.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np

from xformer.attention.engine.tile_listing import Grid, PairMasks, list_tiles, sizes
from xformer.attention.pattern import Pattern, leaves


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["order", "starts", "partial_starts", "tiles", "tests"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Lists:
    """For every line (query tile, or key tile in a transposed list) the tiles across it: full ones, then partial ones.

    Attributes:
      order: int32 `[heads or 1, lines]`, the lines from the longest list to the shortest: long ones should start early.
      starts: int32 `[heads or 1, lines + 1]`, where each line's list begins; the next one's start is its end.
      partial_starts: int32 `[heads or 1, lines]`, where the partial tiles in it begin.
      tiles: int32 `[heads or 1, room]`, tile indices along the other axis.
      tests: int32 `[heads or 1, room]`, index in the bank of the pairs that exist; read for partial tiles only.
    """

    order: np.ndarray
    starts: np.ndarray
    partial_starts: np.ndarray
    tiles: np.ndarray
    tests: np.ndarray

    @property
    def heads(self) -> int:
        """1 where all heads share the lists."""
        return self.tiles.shape[0]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["by_query", "by_key", "bank"],
    meta_fields=["q_block", "kv_block", "num_tiles"],
)
@dataclasses.dataclass(frozen=True)
class TileLists:
    """A pattern's tiles, listed twice.

    Attributes:
      by_query: for each query tile its key tiles.
      by_key: for each key tile its query tiles.
      bank: int8 `[tests, q_block, kv_block]`, 1 where a pair exists; None where no tile is partial.
      q_block, kv_block: tile sizes in tokens.
      num_tiles: the most tiles that a head visits, over all seeds; the number itself where blocks are whole tiles.
    """

    by_query: Lists
    by_key: Lists
    bank: np.ndarray | None
    q_block: int
    kv_block: int
    num_tiles: int


@functools.lru_cache(maxsize=64)
def make_tile_lists(
    pattern: Pattern, q_len: int, kv_len: int, q_block: int, kv_block: int, query_offset: int = 0
) -> TileLists:
    """Lists the tiles of `pattern` for queries at `query_offset + [0, q_len)` and keys at `[0, kv_len)`."""
    grid = Grid(q_len, kv_len, q_block, kv_block, query_offset)
    listed, heads = list_tiles(pattern, grid)
    masks = PairMasks(pattern, grid)
    tests = np.zeros(len(listed.line), np.int64)
    tests[~listed.whole] = masks.of(pattern, listed.where(~listed.whole), grid)
    held = tests != 1
    (line, key_tile, _), tests = listed.where(held), tests[held]
    head, query_tile = np.divmod(line, grid.num_query_tiles)
    room = num_tiles(pattern, q_len, kv_len, q_block, kv_block, query_offset)
    by_query = _lists(heads, grid.num_query_tiles, head, query_tile, key_tile, tests, room)
    by_key = _lists(heads, grid.num_key_tiles, head, key_tile, query_tile, tests, room)
    # Where the draw decides whether any tile is partial, there is a bank whatever it decided.
    bank = masks.array(heads * room).astype(np.int8)
    return TileLists(by_query, by_key, bank if len(bank) > 2 else None, q_block, kv_block, room)


@functools.lru_cache(maxsize=256)
def num_tiles(pattern: Pattern, q_len: int, kv_len: int, q_block: int, kv_block: int, query_offset: int = 0) -> int:
    """The most tiles that a head visits, whatever the seed: those without random blocks and all that these can add."""
    return max(int(sizes(pattern, Grid(q_len, kv_len, q_block, kv_block, query_offset)).most.sum()), 1)


def unit(pattern: Pattern) -> int | None:
    """The number of tokens in the pattern's blocks (their greatest common divisor); None without blocks."""
    units = [size for leaf in leaves(pattern) if (size := getattr(leaf, "unit", 1)) > 1]
    return math.gcd(*units) if units else None


def _lists(
    heads: int, lines: int, head: np.ndarray, line: np.ndarray, tile: np.ndarray, tests: np.ndarray, room: int
) -> Lists:
    """The tiles at (`head`, `line`, `tile`), `[n]` each, line by line."""
    place, partial = head * lines + line, tests != 0
    order = np.lexsort((tile, partial, place))
    counts, whole = (np.bincount(of, minlength=heads * lines) for of in (place, place[~partial]))
    counts, whole = counts.reshape(heads, lines), whole.reshape(heads, lines)
    starts = np.concatenate([np.zeros((heads, 1), np.int64), counts.cumsum(-1)], -1)
    tiles, kept = np.zeros((heads, room), np.int32), np.zeros((heads, room), np.int32)
    where = head[order], np.arange(len(order)) - (np.cumsum(starts[:, -1]) - starts[:, -1])[head[order]]
    tiles[where], kept[where] = tile[order], tests[order]
    longest = np.argsort(-counts, axis=-1, kind="stable").astype(np.int32)
    return Lists(longest, starts.astype(np.int32), (starts[:, :-1] + whole).astype(np.int32), tiles, kept)
