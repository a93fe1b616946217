"""The forward pass of one query tile: an online softmax over its key tiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.engine.distance_table import DistanceTable
from xformer.attention.engine.mesh_axes import varying
from xformer.attention.engine.query_tile import HIDDEN, Chunk, QueryTiles
from xformer.attention.engine.tile_plan import TileGroup

Array = jax.Array


def forward(tiles: QueryTiles, group: TileGroup, operands: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """Output `[batch, q_block, heads, value depth]` and log-sum-exp `[batch, q_block, heads]`.

    The latter counts a sink, and is -inf where a query has nothing to attend to.
    """
    query, tables = tiles.query(operands[0]), tiles.tables
    key_term, value_term = (
        None if table is None else DistanceTable(tiles, table, query) for table in (tables.key, tables.value)
    )
    products = key_term.products() if key_term else []

    def step(carry: Any, chunk: Chunk) -> Any:
        top, norm, out, sums = carry
        key, value = tiles.keys(tiles.marked_key, chunk), tiles.keys(tiles.value, chunk)
        scores, _ = tiles.scores(query, key, chunk, key_term.pairs(products, chunk) if key_term else None)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        norm = norm * shrink + weights.sum(-1)
        weights = weights * tiles.kept(chunk, key.shape[1])
        out = out * shrink[..., None] + tiles.einsum("nms,nsd->nmd", weights, value)
        if value_term:
            sums = value_term.add(sums.scaled(tiles.full(shrink), chunk.distant), weights, chunk)
            out = out + value_term.apply_tile(weights, chunk)
        return new_top, norm, out, sums

    per_query = query.shape[:-1]
    # Finite, so that the weight of a hidden pair is exp(-inf) = 0 even before any other pair is seen.
    top = jnp.full(per_query, jnp.finfo(tiles.dtype).min, tiles.dtype)
    norm, sinks = jnp.zeros(per_query, tiles.dtype), tiles.sinks()
    if sinks is not None:  # as if a first key had this score, and a value of zero
        top = jnp.maximum(sinks, top)
        norm = jnp.exp(sinks - top)
    sums = value_term.zeros() if value_term else None
    start = (top, norm, jnp.zeros((*per_query, tiles.value.shape[-1]), tiles.dtype), sums)
    top, norm, out, sums = tiles.chunks(step, varying(start, tiles.axes), group, operands)
    if value_term:
        out = out + value_term.apply(sums)
    attended = norm != 0
    norm = jnp.where(attended, norm, jnp.ones_like(norm))
    lse = jnp.where(attended, top + jnp.log(norm), jnp.full_like(norm, HIDDEN))
    return tiles.by_token(out / norm[..., None]), tiles.by_token(lse)
