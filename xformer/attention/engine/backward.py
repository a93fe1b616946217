"""The backward pass of one query tile, whose scores are computed once more, and the gradients of a whole call."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention.engine import gather
from xformer.attention.engine.distance_table import DistanceTable
from xformer.attention.engine.mesh_axes import sum_like, varying
from xformer.attention.engine.operands import Inputs
from xformer.attention.engine.query_tile import Chunk, QueryTiles, Tables
from xformer.attention.engine.tile_plan import TileGroup

Array = jax.Array


class Totals(NamedTuple):
    """Gradients summed over tiles; key and value `[batch, num_blocks, kv_heads, depth, kv_block]`."""

    key: Array
    value: Array
    bias: Any
    tables: Tables


class Given(NamedTuple):
    """What the backward pass is given by query.

    Attributes:
      d_out: the output's gradient.
      lse: the log-sum-exp; 0, which stands for any number, where a query has nothing to attend to.
      delta: what is subtracted from the gradient of every weight: `(d_out * out).sum(-1)`, less the gradient of the
        log-sum-exp.
    """

    d_out: Array
    lse: Array
    delta: Array

    def examples(self, first: Array, size: int) -> Given:
        """Those of `size` examples of the batch."""
        return Given(*(jax.lax.dynamic_slice_in_dim(x, first, size) for x in self))


def zeros(tiles: QueryTiles) -> Totals:
    """Totals to start from."""
    zeros: Any = lambda x: None if x is None else jnp.zeros(x.shape, tiles.dtype)
    tables = Tables(*(zeros(table) for table in tiles.tables))
    by_key = lambda x: jnp.zeros((*x.shape[:2], *x.shape[3:], x.shape[2]), tiles.dtype)
    return varying(Totals(by_key(tiles.key), by_key(tiles.value), zeros(tiles.inputs.bias), tables), tiles.axes)


def gradients(tiles: QueryTiles, given: Given, d_query: Array, totals: Totals) -> Inputs:
    """The totals in the shapes of the inputs, in the dtype of the computation; `given` is that of the whole call."""
    inputs, relative, tables = tiles.inputs, tiles.inputs.relative, totals.tables
    key, value = (jnp.moveaxis(x, 4, 2) for x in (totals.key, totals.value))
    grads = Inputs(d_query, key, value, totals.bias)
    if inputs.sinks is not None:  # the weight of a sink, which has no value: the gradient of its weight is zero
        weights = jnp.exp(inputs.sinks.astype(tiles.dtype) - given.lse)
        grads = grads._replace(sinks=-(weights * given.delta).sum((0, 1)))
    if relative is not None:
        unpad = lambda x: x if x is None or tiles.relative.whole_table else tiles.relative.unpad(x)
        slopes = jax.tree.map(lambda x: jnp.zeros(x.shape, tiles.dtype), relative.slopes)
        key_table, value_table = unpad(tables.key), unpad(tables.value)
        of_tables: Any = {"key_table": key_table, "value_table": value_table, "bias_table": tables.bias}
        terms = dataclasses.replace(relative, **of_tables, slopes=slopes)
        grads = grads._replace(relative=terms)
    return jax.tree.map(lambda grad, x: sum_like(grad, x).reshape(x.shape), grads, inputs)


def backward(tiles: QueryTiles, group: TileGroup, given: Given, totals: Totals, operands: Any) -> tuple[Totals, Array]:
    """Adds a query tile's part to the totals and returns its own gradient."""
    query = tiles.query(operands[0])
    d_out, lse, delta = (tiles.at_query_tile(x, operands[0]) for x in given)
    # A row with anything that is not finite shows it to the keys that it sees and to no others. Its log-sum-exp or its
    # delta is not finite then. As in `QueryTiles`, zeros stand in for the row wherever its weights or the gradients of
    # its scores are multiplied; in its scores, which are masked by selection, there is a NaN.
    finite = jnp.isfinite(lse) & jnp.isfinite(delta)
    cleared = lambda x, keep: jnp.where(keep, x, jnp.zeros_like(x))
    marked_query = jnp.where(finite[..., None], query, jnp.full_like(query, jnp.nan))
    query, d_out = cleared(query, finite[..., None] & jnp.isfinite(query)), cleared(d_out, finite[..., None])
    lse, delta = cleared(lse, finite), cleared(delta, finite)
    tables = tiles.tables
    key_term = None if tables.key is None else DistanceTable(tiles, tables.key, query)
    value_term = None if tables.value is None else DistanceTable(tiles, tables.value, d_out)
    products, value_products = (term.products() if term else [] for term in (key_term, value_term))
    # Products by key are computed, and kept, with the keys last: so it is the small operand that is transposed. Without
    # the barrier compilers make one product of both.
    query_t, d_out_t = jax.lax.optimization_barrier(tuple(jnp.swapaxes(x, 1, 2) for x in (query, d_out)))

    def step(carry: Any, chunk: Chunk) -> Any:
        totals, d_query, key_sums, value_sums = carry
        key, value = tiles.keys(tiles.key, chunk), tiles.keys(tiles.value, chunk)
        pairs = key_term.pairs(products, chunk) if key_term else None
        scores, slope = tiles.scores(marked_query, key, chunk, pairs)
        weights = jnp.exp(scores - lse[..., None])
        kept = tiles.kept(chunk, key.shape[1])
        dropped = weights * kept
        d_weights = tiles.einsum("nmd,nsd->nms", d_out, value)
        d_value = tiles.einsum("ndm,nms->nds", d_out_t, dropped)
        new = totals.tables
        if value_term:
            d_weights = d_weights + tiles.flat(value_term.pairs(value_products, chunk))
            value_sums = value_term.add(value_sums, dropped, chunk)
            new = new._replace(value=value_term.tile_gradient(new.value, dropped, chunk))
        d_scores = weights * (d_weights * kept - delta[..., None])
        d_products = d_scores * slope
        d_query = d_query + tiles.einsum("nms,nsd->nmd", d_products, key)
        d_key = tiles.einsum("ndm,nms->nds", query_t, d_products)
        if key_term:
            d_query = d_query + key_term.apply_tile(d_products, chunk)
            key_sums = key_term.add(key_sums, d_products, chunk)
            new = new._replace(key=key_term.tile_gradient(new.key, d_products, chunk))
        if tables.bias is not None:
            pairs, starts = tiles.full(d_scores), tiles.starts(chunk)
            new = new._replace(bias=tiles.relative.add_bias(new.bias, pairs, starts, chunk.distant))
        d_bias = totals.bias
        if d_bias is not None:
            pairs = tiles.full(d_scores)
            d_bias = gather.add_pairs(d_bias, chunk.query_tile, chunk.key_tiles, pairs, tiles.q_block, tiles.kv_block)
        d_keys = tiles.add_keys(totals.key, chunk, d_key), tiles.add_keys(totals.value, chunk, d_value)
        return Totals(*d_keys, d_bias, new), d_query, key_sums, value_sums

    key_sums, value_sums = (term.zeros() if term else None for term in (key_term, value_term))
    start = (totals, jnp.zeros_like(query), key_sums, value_sums)
    totals, d_query, key_sums, value_sums = tiles.chunks(step, varying(start, tiles.axes), group, operands)
    new = totals.tables
    if key_term:
        d_query = d_query + key_term.apply(key_sums)
        new = new._replace(key=key_term.table_gradient(new.key, key_sums))
    if value_term:
        new = new._replace(value=value_term.table_gradient(new.value, value_sums))
    return totals._replace(tables=new), tiles.by_token(d_query * tiles.settings.scale)
