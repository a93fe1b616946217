"""The engine's work on one row of tiles: forward, and backward with recomputation."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention import tiles
from xformer.attention.call import Controls, Inputs, Settings
from xformer.attention.layout import Group
from xformer.attention.relative import RelativeTiles

Array = jax.Array
LOWEST = -1e30  # below any score, above the mask constants that callers put in a bias; finite, so that no NaN arises


class Place(NamedTuple):
    """Where a chunk of tiles is: query tile `row`, key tiles `columns` and their `tests` `[kv_heads, groups, chunk]`."""

    row: Array
    columns: Array
    tests: Array
    chunk: Array


class Tables(NamedTuple):
    """The tables of `Relative` with heads split, `[kv_heads or 1, groups or 1, distances, ...]`, in the compute dtype."""

    key: Array | None = None
    value: Array | None = None
    bias: Array | None = None


class Totals(NamedTuple):
    """Gradients summed over rows."""

    key: Array
    value: Array
    bias: Array | None
    tables: Tables


class Rows:
    """One call's arrays, padded to whole tiles, and what is done with them for one query tile."""

    def __init__(self, settings: Settings, kv_len: int | None, inputs: Inputs, controls: Controls) -> None:
        self.settings, self.kv_len, self.inputs, self.controls = settings, kv_len, inputs, controls
        layout = controls.layout
        self.q_block, self.kv_block = layout.q_block, layout.kv_block
        self.batch, self.kv_heads, self.groups, self.q_len, _ = inputs.query.shape
        self.dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
        self.einsum = functools.partial(jnp.einsum, precision=settings.precision)
        self.key, self.value = (self.split(x) for x in (inputs.key, inputs.value))
        self.tables, self.slopes, self.relative = Tables(), None, None
        if inputs.relative is not None:
            terms = inputs.relative
            split = lambda x: None if x is None else self.heads(x).astype(self.dtype)
            self.tables = Tables(*(split(x) for x in (terms.key_table, terms.value_table, terms.bias_table)))
            self.slopes = split(terms.slopes)
            self.relative = RelativeTiles(
                self.q_block, self.kv_block, terms.radius, layout.tiles_per_row, self.einsum
            )

    # Shapes.

    def split(self, x: Array) -> Array:
        """Keys `[batch, kv_heads, 1, kv_len, depth]` as blocks `[batch, kv_heads, 1, num_blocks, kv_block, depth]`."""
        return x.reshape(*x.shape[:3], -1, self.kv_block, x.shape[-1])

    def heads(self, x: Array) -> Array:
        """`[heads or 1, ...]` -> `[kv_heads or 1, groups or 1, ...]`."""
        return x.reshape(*((1, 1) if x.shape[0] == 1 else (self.kv_heads, self.groups)), *x.shape[1:])

    def in_order(self, parts: Any) -> Array:
        """Rows of all groups, each `[num_rows, batch, kv_heads, groups, q_block, ...]` -> `[batch, ..., q_len, ...]`."""
        rows = parts[0]
        if len(parts) > 1:
            numbers = jnp.concatenate([jnp.asarray(group.rows) for group in self.controls.layout.groups])
            rows = jnp.take(jnp.concatenate(parts), jnp.argsort(numbers), axis=0)
        rows = jnp.moveaxis(rows, 0, 3)
        return rows.reshape(*rows.shape[:3], self.q_len, *rows.shape[5:])

    # Loops over the rows of a group.

    def _operands(self, group: Group) -> tuple[Array, Array, Array]:
        by_row = lambda x: jnp.transpose(self.heads(jnp.asarray(x)), (2, 3, 0, 1, 4))
        return jnp.asarray(group.rows), by_row(group.columns), by_row(group.tests)

    def map(self, group: Group, forward: Any) -> Any:
        """`forward` of every row: (output, log-sum-exp), stacked."""
        if group.num_rows == 1:
            one = forward(jax.tree.map(lambda x: x[0], self._operands(group)))
            return jax.tree.map(lambda x: x[None], one)
        return jax.lax.map(forward, self._operands(group))

    def scan(self, group: Group, backward: Any, totals: Totals) -> Any:
        """`backward` of every row: totals and the query gradients, stacked."""
        if group.num_rows == 1:
            totals, one = backward(totals, jax.tree.map(lambda x: x[0], self._operands(group)))
            return totals, one[None]
        return jax.lax.scan(backward, totals, self._operands(group))

    def _chunks(self, step: Any, carry: Any, operands: tuple[Array, Array, Array]) -> Any:
        """Runs `step(carry, place)` over a row's chunks."""
        row, columns, tests = operands
        if len(columns) == 1:
            return step(carry, Place(row, columns[0], tests[0], jnp.zeros((), jnp.int32)))
        each = lambda carry, x: (step(carry, Place(row, *x)), None)
        return jax.lax.scan(each, carry, (columns, tests, jnp.arange(len(columns))))[0]

    # One tile.

    def _row_of(self, x: Array, row: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, row * self.q_block, self.q_block, 3).astype(self.dtype)

    def _keys(self, blocks: Array, place: Place) -> Array:
        return tiles.merge_keys(tiles.take_blocks(blocks, place.columns)).astype(self.dtype)

    def _bias(self, place: Place) -> Array | None:
        bias = self.inputs.bias
        if bias is None:
            return None
        return tiles.take_pairs(bias, place.row, place.columns, self.q_block, self.kv_block).astype(self.dtype)

    def _starts(self, place: Place) -> Array:
        first_query = self.controls.offset + place.row * self.q_block
        return self.relative.starts(first_query, place.columns)

    def _scores(
        self, query: Array, key: Array, bias: Array | None, row: Array | None, tables: Tables, place: Place
    ) -> Array:
        """`[batch, kv_heads, groups, q_block, keys]`; differentiated in `backward`."""
        scores = self.einsum("bkgqd,bkgsd->bkgqs", query, key)
        if tables.key is not None:
            scores = scores + self.relative.key_scores(query, row, tables.key, self._starts(place))
        scores = scores * self.settings.scale
        if tables.bias is not None:
            scores = scores + self.relative.bias_scores(tables.bias, self._starts(place))
        if self.slopes is not None:
            scores = scores + self.relative.slope_scores(self.slopes, self._starts(place))
        return scores if bias is None else scores + bias

    def _key_row(self, query: Array, table: Array | None) -> Array | None:
        return None if table is None else self.relative.key_row(query, table)

    def _allowed(self, group: Group, place: Place) -> Array | None:
        """Which pairs of the tile attend, broadcastable to the scores; None for all."""
        controls, tests = self.controls, []
        if group.partial:
            tests.append(tiles.merge_pairs(jnp.take(jnp.asarray(controls.layout.bank), place.tests, axis=0))[None])
        k_positions = place.columns[..., None] * self.kv_block + jnp.arange(self.kv_block)
        k_positions = k_positions.reshape(*place.columns.shape[:2], 1, -1)
        if self.kv_len is not None:
            tests.append((k_positions < self.kv_len)[None])
        if self.settings.pattern is not None:
            q_positions = controls.offset + place.row * self.q_block + jnp.arange(self.q_block)
            tests.append(self.heads(self.settings.pattern.allows(q_positions, k_positions[0, 0, 0]))[None])
        if controls.mask is not None:
            tests.append(tiles.take_pairs(controls.mask, place.row, place.columns, self.q_block, self.kv_block))
        if controls.q_segments is not None and controls.kv_segments is not None:
            ids = jax.lax.dynamic_slice_in_dim(controls.q_segments, place.row * self.q_block, self.q_block, 3)
            tests.append(
                ids == tiles.take_pairs(controls.kv_segments, place.row, place.columns, self.q_block, self.kv_block)
            )
        return functools.reduce(jnp.logical_and, tests) if tests else None

    def _kept(self, place: Place, shape: tuple[int, ...]) -> Array | float:
        """What dropout multiplies the weights by."""
        rate = self.settings.dropout_rate
        if not rate:
            return 1.0
        shape = (1, 1, 1, *shape[3:]) if self.settings.broadcast_dropout else shape
        keep = tiles.keep_mask(self.controls.dropout_rng, place.row, place.chunk, rate=rate, shape=shape)
        return keep.astype(self.dtype) / (1.0 - rate)

    # One row.

    def forward(self, group: Group, operands: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        """Output `[batch, kv_heads, groups, q_block, head_dim]` and log-sum-exp `[..., q_block]` of a query tile."""
        query = self._row_of(self.inputs.query, operands[0])
        row, tables = self._key_row(query, self.tables.key), self.tables
        sum_by_distance = tables.value is not None and self.relative.by_row

        def step(carry: Any, place: Place) -> Any:
            top, norm, out, by_distance = carry
            key, value = self._keys(self.key, place), self._keys(self.value, place)
            scores = self._scores(query, key, self._bias(place), row, tables, place)
            allowed = self._allowed(group, place)
            if allowed is not None:
                scores = jnp.where(allowed, scores, LOWEST)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            if allowed is not None:
                weights = jnp.where(allowed, weights, 0.0)
            shrink = jnp.exp(top - new_top)
            norm = norm * shrink + weights.sum(-1)
            weights = weights * self._kept(place, weights.shape)
            out = out * shrink[..., None] + self.einsum("bkgqs,bkgsd->bkgqd", weights, value)
            if tables.value is not None:
                part = self.relative.value_sum(weights, self._starts(place))
                if sum_by_distance:
                    by_distance = by_distance * shrink[..., None] + part
                else:
                    near = self.relative.value_near(tables.value, self._starts(place))
                    out = out + self.einsum("bkgcqw,kgcwd->bkgqd", part, near)
            return new_top, norm, out, by_distance

        per_query = query.shape[:-1]
        start = (jnp.full(per_query, LOWEST, self.dtype), jnp.zeros(per_query, self.dtype), jnp.zeros_like(query))
        by_distance = jnp.zeros((*per_query, self.relative.size), self.dtype) if sum_by_distance else None
        top, norm, out, by_distance = self._chunks(step, (*start, by_distance), operands)
        if sum_by_distance:
            out = out + self.einsum("bkgqn,kgnd->bkgqd", by_distance, tables.value)
        attended = norm > 0
        norm = jnp.where(attended, norm, 1.0)
        # -LOWEST makes every weight of a row with nothing to attend to zero in the backward pass too.
        return out / norm[..., None], jnp.where(attended, top + jnp.log(norm), -LOWEST)

    def backward(
        self, group: Group, d_out: Array, lse: Array, delta: Array, totals: Totals, operands: Any
    ) -> tuple[Totals, Array]:
        """Adds a query tile's part to the totals and returns its own gradient."""
        query, d_out, lse, delta = (
            self._row_of(x, operands[0]) for x in (self.inputs.query, d_out, lse, delta)
        )
        tables = self.tables
        row, pull_row = jax.vjp(self._key_row, query, tables.key)
        by_row = tables.value is not None and self.relative.by_row
        d_by_distance = self.einsum("bkgqd,kgnd->bkgqn", d_out, tables.value) if by_row else None

        def step(carry: Any, place: Place) -> Any:
            totals, d_query, d_row, by_distance = carry
            key, value, bias = self._keys(self.key, place), self._keys(self.value, place), self._bias(place)
            scores, pull = jax.vjp(functools.partial(self._scores, place=place), query, key, bias, row, tables)
            weights = jnp.exp(scores - lse[..., None])
            allowed = self._allowed(group, place)
            if allowed is not None:
                weights = jnp.where(allowed, weights, 0.0)
            kept = self._kept(place, weights.shape)
            dropped = weights * kept
            d_weights = self.einsum("bkgqd,bkgsd->bkgqs", d_out, value)
            d_value = self.einsum("bkgqs,bkgqd->bkgsd", dropped, d_out)
            d_value_table = None
            if tables.value is not None:
                starts = self._starts(place)
                part = self.relative.value_sum(dropped, starts)
                if by_row:
                    by_distance = by_distance + part
                    d_weights = d_weights + self.relative.expand(d_by_distance, starts)
                else:
                    near, pull_near = jax.vjp(lambda table: self.relative.value_near(table, starts), tables.value)
                    by_tile = self.einsum("bkgqd,kgcwd->bkgcqw", d_out, near)
                    d_weights = d_weights + tiles.merge_pairs(tiles.skew(by_tile, self.kv_block))
                    d_near = self.einsum("bkgcqw,bkgqd->kgcwd", part, d_out)
                    (d_value_table,) = pull_near(self._sum_heads(d_near, near.shape))
            d_scores = weights * (d_weights * kept - delta[..., None])
            dq, dk, d_bias, dr, d_tables = pull(d_scores)
            if d_value_table is not None:
                d_tables = d_tables._replace(value=d_value_table)
            add = functools.partial(tiles.add_blocks, columns=place.columns)
            split = lambda x: x.reshape(*x.shape[:3], -1, self.kv_block, x.shape[-1])
            new_bias = totals.bias
            if totals.bias is not None:
                new_bias = tiles.add_pairs(totals.bias, place.row, place.columns, d_bias, self.q_block, self.kv_block)
            totals = Totals(
                key=add(totals.key, update=split(self._sum_groups(dk, place))),
                value=add(totals.value, update=split(self._sum_groups(d_value, place))),
                bias=new_bias,
                tables=jax.tree.map(jnp.add, totals.tables, d_tables),
            )
            return totals, d_query + dq, jax.tree.map(jnp.add, d_row, dr), by_distance

        zeros = lambda x: None if x is None else jnp.zeros_like(x)
        start = (totals, jnp.zeros_like(query), zeros(row), zeros(d_by_distance))
        totals, d_query, d_row, by_distance = self._chunks(step, start, operands)
        if row is not None:
            dq, d_key_table = pull_row(d_row)
            d_query = d_query + dq
            totals = totals._replace(tables=totals.tables._replace(key=totals.tables.key + d_key_table))
        if by_row:
            d_table = self.einsum("bkgqn,bkgqd->kgnd", by_distance, d_out)
            d_table = totals.tables.value + self._sum_heads(d_table, tables.value.shape)
            totals = totals._replace(tables=totals.tables._replace(value=d_table))
        return totals, d_query

    def _sum_groups(self, x: Array, place: Place) -> Array:
        """Sums over the query heads of a key head where they pick the same blocks."""
        return x.sum(2, keepdims=True) if place.columns.shape[1] == 1 and x.shape[2] > 1 else x

    @staticmethod
    def _sum_heads(x: Array, shape: tuple[int, ...]) -> Array:
        shared = tuple(axis for axis in (0, 1) if shape[axis] == 1 and x.shape[axis] > 1)
        return x.sum(shared, keepdims=True) if shared else x

    # Gradients of the whole call.

    def zeros(self) -> Totals:
        """Totals to start from."""
        zeros = lambda x: None if x is None else jnp.zeros(x.shape, self.dtype)
        tables = Tables(*(zeros(table) for table in self.tables))
        return Totals(zeros(self.key), zeros(self.value), zeros(self.inputs.bias), tables)

    def gradients(self, d_query: Array, totals: Totals) -> Inputs:
        """The totals in the shapes and dtypes of the inputs."""
        inputs, relative = self.inputs, self.inputs.relative
        grads = Inputs(d_query, totals.key, totals.value, totals.bias, None)
        if relative is not None:
            grads = grads._replace(
                relative=type(relative)(*totals.tables, jax.tree.map(jnp.zeros_like, relative.slopes), relative.radius)
            )
        return jax.tree.map(lambda grad, x: grad.reshape(x.shape).astype(x.dtype), grads, inputs)
