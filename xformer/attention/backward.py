"""The backward pass of one row of tiles, which are computed once more, and the gradients of a whole call."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention import tiles
from xformer.attention.call import Inputs
from xformer.attention.layout import Group
from xformer.attention.meshes import sum_like, varying
from xformer.attention.rows import Place, Rows, Tables
from xformer.attention.terms import Term

Array = jax.Array


class Totals(NamedTuple):
    """Gradients summed over rows; key and value `[batch, num_blocks, kv_heads, head_dim, kv_block]`."""

    key: Array
    value: Array
    bias: Any
    tables: Tables


class Given(NamedTuple):
    """What the backward pass is given, by query: the output's gradient, log-sum-exp, and `(d_out * out).sum(-1)`."""

    d_out: Array
    lse: Array
    delta: Array

    def examples(self, first: Array, size: int) -> Given:
        """Those of `size` examples of the batch."""
        return Given(*(jax.lax.dynamic_slice_in_dim(x, first, size) for x in self))


def zeros(rows: Rows) -> Totals:
    """Totals to start from."""
    zeros: Any = lambda x: None if x is None else jnp.zeros(x.shape, rows.dtype)
    tables = Tables(*(zeros(table) for table in rows.tables))
    by_key = lambda x: jnp.zeros((*x.shape[:2], *x.shape[3:], x.shape[2]), rows.dtype)
    return varying(Totals(by_key(rows.key), by_key(rows.value), zeros(rows.inputs.bias), tables), rows.axes)


def gradients(rows: Rows, d_query: Array, totals: Totals) -> Inputs:
    """The totals in the shapes and dtypes of the inputs."""
    inputs, relative, tables = rows.inputs, rows.inputs.relative, totals.tables
    key, value = (jnp.moveaxis(x, 4, 2) for x in (totals.key, totals.value))
    grads = Inputs(d_query, key, value, totals.bias, None)
    if relative is not None:
        unpad = lambda x: x if x is None or rows.relative.by_row else rows.relative.unpad(x)
        slopes = jax.tree.map(jnp.zeros_like, relative.slopes)
        terms = type(relative)(unpad(tables.key), unpad(tables.value), tables.bias, slopes, relative.radius)
        grads = grads._replace(relative=terms)
    return jax.tree.map(lambda grad, x: sum_like(grad, x).reshape(x.shape).astype(x.dtype), grads, inputs)


def backward(rows: Rows, group: Group, given: Given, totals: Totals, operands: Any) -> tuple[Totals, Array]:
    """Adds a query tile's part to the totals and returns its own gradient."""
    query = rows.query(operands[0])
    d_out, lse, delta = (rows.row_of(x, operands[0]) for x in given)
    tables = rows.tables
    key_term = None if tables.key is None else Term(rows, tables.key, query)
    value_term = None if tables.value is None else Term(rows, tables.value, d_out)
    products, d_products = (term.products() if term else [] for term in (key_term, value_term))
    # Products by key are computed, and kept, with the keys last: so it is the small operand that is transposed. Without
    # the barrier compilers make one product of both.
    query_t, d_out_t = jax.lax.optimization_barrier(tuple(jnp.swapaxes(x, 1, 2) for x in (query, d_out)))

    def step(carry: Any, place: Place) -> Any:
        totals, d_query, key_sums, value_sums = carry
        key, value = rows.keys(rows.key, place), rows.keys(rows.value, place)
        scores = rows.scores(query, key, place, key_term.pairs(products, place) if key_term else None)
        weights = jnp.exp(scores - lse[..., None])
        kept = rows.kept(place, key.shape[1])
        dropped = weights * kept
        d_weights = rows.einsum("nmd,nsd->nms", d_out, value)
        d_value = rows.einsum("ndm,nms->nds", d_out_t, dropped)
        new = totals.tables
        if value_term:
            d_weights = d_weights + rows.flat(value_term.pairs(d_products, place))
            value_sums = value_term.add(value_sums, dropped, place)
            new = new._replace(value=value_term.tile_gradient(new.value, dropped, place))
        d_scores = weights * (d_weights * kept - delta[..., None])
        d_query = d_query + rows.einsum("nms,nsd->nmd", d_scores, key)
        d_key = rows.einsum("ndm,nms->nds", query_t, d_scores)
        if key_term:
            d_query = d_query + key_term.apply_tile(d_scores, place)
            key_sums = key_term.add(key_sums, d_scores, place)
            new = new._replace(key=key_term.tile_gradient(new.key, d_scores, place))
        if tables.bias is not None:
            pairs, starts = rows.full(d_scores), rows.starts(place)
            new = new._replace(bias=rows.relative.add_bias(new.bias, pairs, starts, place.far))
        d_bias = totals.bias
        if d_bias is not None:
            pairs = rows.full(d_scores)
            d_bias = tiles.add_pairs(d_bias, place.row, place.columns, pairs, rows.q_block, rows.kv_block)
        d_keys = rows.add_keys(totals.key, place, d_key), rows.add_keys(totals.value, place, d_value)
        return Totals(*d_keys, d_bias, new), d_query, key_sums, value_sums

    key_sums, value_sums = (term.zeros() if term else None for term in (key_term, value_term))
    start = (totals, jnp.zeros_like(query), key_sums, value_sums)
    totals, d_query, key_sums, value_sums = rows.chunks(step, varying(start, rows.axes), group, operands)
    new = totals.tables
    if key_term:
        d_query = d_query + key_term.apply(key_sums)
        new = new._replace(key=key_term.table_gradient(new.key, key_sums))
    if value_term:
        new = new._replace(value=value_term.table_gradient(new.value, value_sums))
    return totals._replace(tables=new), rows.by_token(d_query * rows.settings.scale)
