"""Which tiles of the score matrix hold pairs, listed by query tile: the plan that the engine follows.

A plan is made on the host from a pattern (`plan_making`) and handed to the engine as integer operands. Only its shapes
are static and they do not depend on a pattern's seed, so one trace serves every layer. Query tiles that visit about
equally many key tiles form a group, so that the few that visit every key tile do not make the others longer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
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
    meta_fields=["q_block", "kv_block", "before"],
)
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Groups that together hold every query tile once.

    Attributes:
      groups: the groups.
      pair_masks: bool `[num_masks, q_block, kv_block]`, the distinct masks of partial tiles; 0 is all, 1 is none.
      q_block, kv_block: tile sizes in tokens.
      before: None where key tiles count from the first. Else they count from the one that holds the key so many places
        before the tile's first query: a plan for any query offset, to be placed by `at_offset`.
    """

    groups: tuple[TileGroup, ...]
    pair_masks: np.ndarray
    q_block: int
    kv_block: int
    before: int | None = None

    @property
    def num_tiles(self) -> int:
        """Tiles computed for each head."""
        return sum(group.num_tiles for group in self.groups)

    @property
    def near_per_query_tile(self) -> float:
        """Key tiles in other than distant chunks that a query tile visits, on average."""
        return sum(group.num_near_tiles for group in self.groups) / sum(group.num_query_tiles for group in self.groups)

    def at_offset(self, offset: Any, kv_len: int) -> TilePlan:
        """The plan for queries from position `offset` on, an int scalar that may be known only at run time."""
        if self.before is None:
            return self
        (group,) = self.groups
        num_key_tiles, width = ceil_div(kv_len, self.kv_block), int((group.mask_ids[0, 0] == 0).sum())
        first = (offset + group.query_tiles * self.q_block - self.before) // self.kv_block
        # Moved as one, so that no tile is listed twice: at the ends there are tiles beyond what the queries see.
        first = jnp.clip(first, 0, num_key_tiles - width)[None, :, None, None]
        key_tiles: Any = jnp.minimum(group.key_tiles + first, num_key_tiles - 1)
        return dataclasses.replace(self, groups=(dataclasses.replace(group, key_tiles=key_tiles),), before=None)


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b not below a."""
    return ceil_div(a, b) * b
