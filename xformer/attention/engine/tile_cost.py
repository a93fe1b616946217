"""FLOPs of one head's forward pass in closed form, from the tiles that the engine visits."""

from __future__ import annotations

import math
from typing import Any

from xformer.attention.engine.relative_by_entries import reader
from xformer.attention.engine.tile_plan import TilePlan, ceil_div


def tiled_flops(
    plan: TilePlan, q_len: int, head_dim: int, value_dim: int, relative: Any = None, *, by_position: bool = False
) -> int:
    """Of the tiled engine; `relative` is a `Relative` of arrays or their shapes, or None.

    `by_position`: every token has a position of its own, so tables are met as a whole.
    """
    flops = 2 * plan.num_tiles * plan.q_block * plan.kv_block * (head_dim + value_dim)
    tiles = plan.q_block, plan.kv_block, math.inf if by_position else plan.near_per_query_tile
    return flops + _table_flops(relative, *tiles, ceil_div(q_len, plan.q_block), head_dim, value_dim)


def dense_flops(q_len: int, kv_len: int, head_dim: int, value_dim: int, relative: Any = None) -> int:
    """Of the dense engine, for which all pairs are one tile."""
    pairs = 2 * q_len * kv_len * (head_dim + value_dim)
    return pairs + _table_flops(relative, q_len, kv_len, math.inf, 1, head_dim, value_dim)


def _table_flops(
    relative: Any,
    q_block: int,
    kv_block: int,
    near_per_query_tile: float,
    num_query_tiles: int,
    head_dim: int,
    value_dim: int,
) -> int:
    """Of the products with tables of distances."""
    if relative is None:
        return 0
    tile = reader(relative, q_block, kv_block, near_per_query_tile)
    tables = (relative.key_table, head_dim), (relative.value_table, value_dim)
    return sum(tile.flops(num_query_tiles, depth) for table, depth in tables if table is not None)
