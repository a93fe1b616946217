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
        key, value = tiles.keys(tiles.key, chunk), tiles.keys(tiles.value, chunk)
        scores, _ = tiles.scores(query, key, chunk, key_term.pairs(products, chunk) if key_term else None)
        new_top = jnp.maximum(top, scores.max(-1))
        # As long as a row has seen no pair its highest score is -inf; any other number gives weights of zero then.
        finite_top = jnp.where(new_top == HIDDEN, jnp.zeros_like(top), new_top)
        weights = jnp.exp(scores - finite_top[..., None])
        shrink = jnp.exp(top - finite_top)
        norm = norm * shrink + weights.sum(-1)
        weights = weights * tiles.kept(chunk, key.shape[1])
        out = out * shrink[..., None] + tiles.einsum("nms,nsd->nmd", weights, value)
        if value_term:
            sums = value_term.add(sums.scaled(tiles.full(shrink), chunk.distant), weights, chunk)
            out = out + value_term.apply_tile(weights, chunk)
        return new_top, norm, out, sums

    per_query = query.shape[:-1]
    top, norm, sinks = jnp.full(per_query, HIDDEN, tiles.dtype), jnp.zeros(per_query, tiles.dtype), tiles.sinks()
    if sinks is not None:  # as if a first key had this score, and a value of zero
        top = jnp.maximum(sinks, jnp.finfo(tiles.dtype).min)
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
