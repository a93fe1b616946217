"""Which tiles of the score matrix hold pairs, listed by query tile: the plan that the engine follows.

A plan is made on the host from a pattern (`plan_making`) and handed to the engine as integer operands. Only its shapes
are static and they do not depend on a pattern's seed, so one trace serves every layer. Query tiles that visit about
equally many key tiles form a group, so that the few that visit every key tile do not make the others longer.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query_tiles", "key_tiles", "mask_ids"],
    meta_fields=["distant_chunks", "unmasked_chunks"],
)
@dataclasses.dataclass(frozen=True)
class TileGroup:
    """Query tiles that visit the same number of key tiles.

    Attributes:
      query_tiles: int32 `[num_query_tiles]`, indices of query tiles.
      key_tiles: int32 `[heads or 1, num_query_tiles, num_chunks, chunk]`, indices of the key tiles that each visits.
      mask_ids: int32 like `key_tiles`, index into `TilePlan.pair_masks` of the pairs that exist in the tile.
      distant_chunks: number of leading chunks that hold only whole tiles whose pairs are all at a distance beyond which
        the position term is constant.
      unmasked_chunks: number of leading chunks, distant ones included, that hold only whole tiles: no mask is needed.
    """

    query_tiles: np.ndarray
    key_tiles: np.ndarray
    mask_ids: np.ndarray
    distant_chunks: int
    unmasked_chunks: int

    @property
    def num_query_tiles(self) -> int:
        """Query tiles in the group."""
        return self.query_tiles.shape[0]

    @property
    def num_tiles(self) -> int:
        """Tiles computed for each head, those that only pad a list of key tiles included."""
        _, num_query_tiles, num_chunks, chunk = self.key_tiles.shape
        return num_query_tiles * num_chunks * chunk

    @property
    def num_near_tiles(self) -> int:
        """Those that are not in distant chunks."""
        return self.num_tiles - self.num_query_tiles * self.distant_chunks * self.key_tiles.shape[3]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["groups", "pair_masks"],
    meta_fields=["q_block", "kv_block"],
)
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Groups that together hold every query tile once.

    Attributes:
      groups: the groups.
      pair_masks: bool `[num_masks, q_block, kv_block]`, the distinct masks of partial tiles; 0 is all, 1 is none.
      q_block, kv_block: tile sizes in tokens.
    """

    groups: tuple[TileGroup, ...]
    pair_masks: np.ndarray
    q_block: int
    kv_block: int

    @property
    def num_tiles(self) -> int:
        """Tiles computed for each head."""
        return sum(group.num_tiles for group in self.groups)

    @property
    def near_per_query_tile(self) -> float:
        """Key tiles in other than distant chunks that a query tile visits, on average."""
        return sum(group.num_near_tiles for group in self.groups) / sum(group.num_query_tiles for group in self.groups)


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b not below a."""
    return ceil_div(a, b) * b
