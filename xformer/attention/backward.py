"""The backward pass of one row of tiles, which are computed once more, and the gradients of a whole call."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention import tiles
from xformer.attention.call import Inputs
from xformer.attention.layout import Group
from xformer.attention.meshes import sum_like, varying
from xformer.attention.relative import sum_to
from xformer.attention.rows import Place, Rows, Tables

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
    table_row, tables = rows.table_row(query), rows.tables
    # Products by key are computed, and kept, with the keys last: so it is the small operand that is transposed. Without
    # the barrier compilers make one product of both.
    query_t, d_out_t = jax.lax.optimization_barrier(tuple(jnp.swapaxes(x, 1, 2) for x in (query, d_out)))
    full_query, full_d_out = rows.full(query), rows.full(d_out)
    by_row = tables.value is not None and rows.relative.by_row
    d_by_distance = rows.einsum("bkgqd,kgnd->bkgqn", full_d_out, tables.value) if by_row else None

    def step(carry: Any, place: Place, tested: bool) -> Any:
        totals, d_query, d_table_row, by_distance = carry
        key, value = rows.keys(rows.key, place), rows.keys(rows.value, place)
        weights = jnp.exp(rows.scores(query, table_row, key, place, tested) - lse[..., None])
        kept = rows.kept(place, key.shape[1])
        dropped = weights * kept
        d_weights = rows.einsum("nmd,nsd->nms", d_out, value)
        d_value = rows.einsum("ndm,nms->nds", d_out_t, dropped)
        new = totals.tables
        if by_row:
            by_distance = by_distance + rows.relative.collapse(rows.full(dropped), rows.starts(place))
            d_weights = d_weights + rows.flat(rows.relative.expand(d_by_distance, rows.starts(place)))
        elif tables.value is not None:
            near, spread = (
                rows.relative.near(tables.value, rows.starts(place)),
                rows.relative.spread(rows.full(dropped)),
            )
            by_tile = rows.relative.gather(rows.einsum("bkgqd,kgcwd->bkgcqw", full_d_out, near))
            d_weights = d_weights + rows.flat(by_tile)
            d_near = rows.einsum("bkgcqw,bkgqd->kgcwd", spread, full_d_out)
            new = new._replace(value=rows.relative.add_near(new.value, rows.starts(place), d_near))
        d_scores = weights * (d_weights * kept - delta[..., None])
        d_query = d_query + rows.einsum("nms,nsd->nmd", d_scores, key)
        d_key = rows.einsum("ndm,nms->nds", query_t, d_scores)
        if table_row is not None:
            d_table_row = d_table_row + rows.relative.collapse(rows.full(d_scores), rows.starts(place))
        elif tables.key is not None:
            near, spread = rows.relative.near(tables.key, rows.starts(place)), rows.relative.spread(rows.full(d_scores))
            d_query = d_query + rows.flat(rows.einsum("bkgcqw,kgcwd->bkgqd", spread, near))
            d_near = rows.einsum("bkgcqw,bkgqd->kgcwd", spread, full_query)
            new = new._replace(key=rows.relative.add_near(new.key, rows.starts(place), d_near))
        if tables.bias is not None:
            part = rows.relative.bias_total(rows.full(d_scores), rows.starts(place), tables.bias.shape)
            new = new._replace(bias=new.bias + part)
        d_bias = totals.bias
        if d_bias is not None:
            pairs = rows.full(d_scores)
            d_bias = tiles.add_pairs(d_bias, place.row, place.columns, pairs, rows.q_block, rows.kv_block)
        d_keys = rows.add_keys(totals.key, place, d_key), rows.add_keys(totals.value, place, d_value)
        return Totals(*d_keys, d_bias, new), d_query, d_table_row, by_distance

    zeros = lambda x: None if x is None else jnp.zeros_like(x)
    start = (totals, jnp.zeros_like(query), zeros(table_row), zeros(d_by_distance))
    totals, d_query, d_table_row, by_distance = rows.chunks(step, varying(start, rows.axes), group, operands)
    new = totals.tables
    if table_row is not None:
        d_query = d_query + rows.flat(rows.einsum("bkgqn,kgnd->bkgqd", d_table_row, tables.key))
        part = rows.einsum("bkgqn,bkgqd->kgnd", d_table_row, full_query)
        new = new._replace(key=new.key + sum_to(part, tables.key.shape))
    if by_row:
        part = rows.einsum("bkgqn,bkgqd->kgnd", by_distance, full_d_out)
        new = new._replace(value=new.value + sum_to(part, tables.value.shape))
    return totals._replace(tables=new), rows.by_token(d_query * rows.settings.scale)
