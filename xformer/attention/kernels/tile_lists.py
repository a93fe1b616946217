"""The tiles of a pattern in compressed sparse rows, by query tile and by key tile: what the GPU kernels walk along.

Every list has its own length, so global rows and columns lengthen no other. Arrays are host-made operands whose shapes
do not depend on a pattern's seed: they have room for as many tiles as any seed could need.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from xformer.attention.engine.tile_plan import PairMasks, ceil_div
from xformer.attention.pattern import And, Bounds, Full, Global, Or, Pattern, Random

NOTHING = Global(0, 0, 2**31 - 1)


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
    bounds = _bounds(q_len, kv_len, q_block, kv_block, query_offset)
    some, every = pattern.tiles(bounds)
    heads = max(some.shape[0], every.shape[0])
    some, every = (np.broadcast_to(x, (heads, *x.shape[1:])).copy() for x in (some, every))
    bank, tests = PairMasks(pattern, q_block, kv_block), np.zeros(some.shape, np.int32)
    for head, row, column in np.argwhere(some & ~every):
        test = bank.index(head, bounds.q_first[row], bounds.k_first[column])
        tests[head, row, column] = test
        every[head, row, column], some[head, row, column] = test == 0, test != 1
    every &= some
    room = num_tiles(pattern, q_len, kv_len, q_block, kv_block, query_offset)
    by_query = _lists(some, every, tests, room)
    turn = lambda x: np.swapaxes(x, 1, 2)
    by_key = _lists(turn(some), turn(every), turn(tests), room)
    array = bank.array().astype(np.int8) if (some & ~every).any() else None
    if array is not None and any(_leaves(pattern, Random)):
        # Blocks that are not whole tiles make partial tiles that depend on the seed; keep the shape from following.
        array = np.concatenate(
            [array, np.zeros((_next_power_of_two(len(array)) - len(array), *array.shape[1:]), np.int8)]
        )
    return TileLists(by_query, by_key, array, q_block, kv_block, room)


@functools.lru_cache(maxsize=256)
def num_tiles(pattern: Pattern, q_len: int, kv_len: int, q_block: int, kv_block: int, query_offset: int = 0) -> int:
    """The most tiles that a head visits, whatever the seed: those without random blocks and all that these can add."""
    bounds = _bounds(q_len, kv_len, q_block, kv_block, query_offset)
    low, high = (
        _with_random(pattern, leaf).tiles(bounds)[0].sum(-1).max(0) for leaf in (NOTHING, Full())
    )  # [query tiles]
    for leaf in _leaves(pattern, Random):
        units = bounds.q_last // leaf.unit - bounds.q_first // leaf.unit + 1
        whole = leaf.unit % kv_block == 0
        tiles = leaf.unit // kv_block if whole else ceil_div(leaf.unit - 1, kv_block) + 1
        low = low + units * leaf.count * tiles
    return max(int(np.minimum(low, high).sum()), 1)


def unit(pattern: Pattern) -> int | None:
    """The number of tokens in the pattern's blocks (their greatest common divisor); None without blocks."""
    units = [leaf.unit for leaf in _leaves(pattern, object) if getattr(leaf, "unit", 1) > 1]
    return math.gcd(*units) if units else None


def _bounds(q_len: int, kv_len: int, q_block: int, kv_block: int, query_offset: int) -> Bounds:
    q_first = np.arange(ceil_div(q_len, q_block)) * q_block + query_offset
    k_first = np.arange(ceil_div(kv_len, kv_block)) * kv_block
    # Bounds end at the true lengths, or a tile that only padding makes partial would need a test.
    q_last = np.minimum(q_first + q_block, q_len + query_offset) - 1
    return Bounds(q_first, q_last, k_first, np.minimum(k_first + kv_block, kv_len) - 1)


def _lists(some: np.ndarray, every: np.ndarray, tests: np.ndarray, room: int) -> Lists:
    heads = some.shape[0]
    tiles, kept = np.zeros((heads, room), np.int32), np.zeros((heads, room), np.int32)
    for head in range(heads):
        line, tile = np.nonzero(some[head])
        order = np.lexsort((tile, ~every[head, line, tile], line))
        line, tile = line[order], tile[order]
        tiles[head, : len(tile)], kept[head, : len(tile)] = tile, tests[head, line, tile]
    counts = some.sum(-1)
    starts = np.concatenate([np.zeros((heads, 1), np.int32), counts.cumsum(-1)], -1).astype(np.int32)
    partial_starts = (starts[:, :-1] + every.sum(-1)).astype(np.int32)
    order = np.argsort(-counts, axis=-1, kind="stable").astype(np.int32)
    return Lists(order, starts, partial_starts, tiles, kept)


def _leaves(pattern: Pattern, kind: type) -> Iterator[Any]:
    if isinstance(pattern, Or | And):
        yield from _leaves(pattern.left, kind)
        yield from _leaves(pattern.right, kind)
    elif isinstance(pattern, kind):
        yield pattern


def _with_random(pattern: Pattern, leaf: Pattern) -> Pattern:
    """The pattern with `leaf` in the place of random blocks."""
    if isinstance(pattern, Or | And):
        return type(pattern)(_with_random(pattern.left, leaf), _with_random(pattern.right, leaf))
    return leaf if isinstance(pattern, Random) else pattern


def _next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
