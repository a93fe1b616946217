"""Tiles of queries whose position is known only at run time, as in decoding: as many wherever the queries stand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine.listed_tiles import ListedTiles
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.pattern import Pattern, Reach

Array = jax.Array


def list_at_offset(
    pattern: Pattern, offset: Array, q_len: int, kv_len: int, q_block: int, kv_block: int
) -> ListedTiles | None:
    """Lists on the device the key tiles that hold all that queries from position `offset` on may see.

    The arrays have no batch axis. Pairs in the tiles are to be tested by the pattern (`Settings.pattern`). None where
    the pattern does not bound what a query sees, or bounds it to no less than all tiles.
    """
    num_query_tiles, num_key_tiles = ceil_div(q_len, q_block), ceil_div(kv_len, kv_block)
    anywhere = pattern.reach(np.zeros(1, np.int64), q_block)
    if anywhere is None or sum(r.first.shape[-1] * _width(r, kv_block) for r in anywhere) >= num_key_tiles:
        return None
    q_first = offset + jnp.arange(num_query_tiles, dtype=jnp.int32) * q_block
    lists = []
    for reach in pattern.reach(q_first, q_block) or ():
        tiles = jnp.asarray(reach.first)[..., None] // kv_block + jnp.arange(_width(reach, kv_block))
        lists.append(tiles.reshape(*tiles.shape[:2], -1))
    heads = max(len(tiles) for tiles in lists)
    key_tiles = jnp.concatenate([jnp.broadcast_to(x, (heads, num_query_tiles, x.shape[2])) for x in lists], -1)
    # What is in reach twice counts once.
    key_tiles = jnp.sort(key_tiles, -1)
    first = jnp.ones_like(key_tiles[..., :1], bool)
    valid = jnp.concatenate([first, key_tiles[..., 1:] != key_tiles[..., :-1]], -1)
    return ListedTiles(key_tiles.astype(jnp.int32), valid, q_block, kv_block)


def _width(reach: Reach, kv_block: int) -> int:
    """Key tiles that a range can touch."""
    aligned = reach.multiple_of % kv_block == 0
    return ceil_div(reach.length, kv_block) if aligned else ceil_div(reach.length - 1, kv_block) + 1
