"""The engine's work on one row of tiles: forward, and backward with recomputation."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention import tiles
from xformer.attention.call import Controls, Inputs, Settings
from xformer.attention.layout import Group
from xformer.attention.relative import RelativeTiles, sum_to

Array = jax.Array
LOWEST = -1e30  # below any score, above the mask constants that callers put in a bias; finite, so that no NaN arises


class Place(NamedTuple):
    """Where a chunk of tiles is: query tile `row`, key tiles `columns`, `tests`; `[kv_heads, groups, chunk]` both."""

    row: Array
    columns: Array
    tests: Array
    chunk: Array


class Tables(NamedTuple):
    """The tables of `Relative` with heads split, `[kv_heads or 1, groups or 1, distances, ...]`, in the compute dtype.

    Tables that are read by tile are padded.
    """

    key: Any = None
    value: Any = None
    bias: Any = None


class Totals(NamedTuple):
    """Gradients summed over rows."""

    key: Array
    value: Array
    bias: Any
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
        self.tables, self.slopes = Tables(), None
        self.relative: Any = None  # a RelativeTiles where there are relative terms
        if inputs.relative is not None:
            terms = inputs.relative
            self.relative = RelativeTiles(self.q_block, self.kv_block, terms.radius, layout.tiles_per_row, self.einsum)
            split = lambda x: None if x is None else self.heads(x).astype(self.dtype)
            pad = lambda x: x if x is None or self.relative.by_row else self.relative.pad(x)
            key, value, bias, self.slopes = (
                split(x) for x in (terms.key_table, terms.value_table, terms.bias_table, terms.slopes)
            )
            self.tables = Tables(pad(key), pad(value), bias)

    # Shapes.

    def split(self, x: Array) -> Array:
        """Keys `[batch, kv_heads, 1, kv_len, depth]` as blocks `[batch, kv_heads, 1, num_blocks, kv_block, depth]`."""
        return x.reshape(*x.shape[:3], -1, self.kv_block, x.shape[-1])

    def heads(self, x: Array) -> Array:
        """`[heads or 1, ...]` -> `[kv_heads or 1, groups or 1, ...]`."""
        return x.reshape(*((1, 1) if x.shape[0] == 1 else (self.kv_heads, self.groups)), *x.shape[1:])

    def in_order(self, parts: Any) -> Array:
        """Rows of all groups, `[num_rows, batch, kv_heads, groups, q_block, ...]` -> `[batch, ..., q_len, ...]`."""
        rows = parts[0]
        if len(parts) > 1:
            numbers = jnp.concatenate([jnp.asarray(group.rows) for group in self.controls.layout.groups])
            order = jnp.argsort(numbers)[: self.q_len // self.q_block]  # rows that stand in for none come last
            rows = jnp.take(jnp.concatenate(parts), order, axis=0)
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
        return tiles.merge_keys(tiles.take_blocks(blocks, self._here(place))).astype(self.dtype)

    def _here(self, place: Place) -> Array:
        """Where the key tiles stand among the keys that are here."""
        return place.columns - self.controls.first_column

    def _first_query(self, place: Place) -> Array:
        """The position of the tile's first query."""
        return self.controls.offset + (self.controls.first_row + place.row) * self.q_block

    def _bias(self, place: Place) -> Array | None:
        bias = self.inputs.bias
        if bias is None:
            return None
        return tiles.take_pairs(bias, place.row, place.columns, self.q_block, self.kv_block).astype(self.dtype)

    def _starts(self, place: Place) -> Array:
        return self.relative.starts(self._first_query(place), place.columns)

    def _scores(self, query: Array, key: Array, bias: Array | None, extra: Array | float) -> Array:
        """`[batch, kv_heads, groups, q_block, keys]`; differentiated in `backward`."""
        scores = self.einsum("bkgqd,bkgsd->bkgqs", query, key) * self.settings.scale + extra
        return scores if bias is None else scores + bias

    def _relative_scores(self, query: Array, row: Array | None, place: Place) -> Array | float:
        """What relative positions add to the scores of a chunk."""
        if self.relative is None:
            return 0.0
        starts, extra = self._starts(place), 0.0
        if row is not None:
            extra = self.relative.expand(row, starts) * self.settings.scale
        elif self.tables.key is not None:
            near = self.relative.near(self.tables.key, starts)
            extra = self.relative.gather(self.einsum("bkgqd,kgcwd->bkgcqw", query, near)) * self.settings.scale
        if self.tables.bias is not None:
            extra = extra + self.relative.bias_scores(self.tables.bias, starts)
        if self.slopes is not None:
            extra = extra + self.relative.slope_scores(self.slopes, starts)
        return extra

    def _key_row(self, query: Array) -> Array | None:
        """Products of a query tile with the whole key table, if that is the way taken."""
        if self.tables.key is None or not self.relative.by_row:
            return None
        return self.einsum("bkgqd,kgnd->bkgqn", query, self.tables.key)

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
            q_positions = self._first_query(place) + jnp.arange(self.q_block)
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
        row = self.controls.first_row + place.row
        keep = tiles.keep_mask(self.controls.dropout_rng, row, place.chunk, rate=rate, shape=shape)
        return keep.astype(self.dtype) / (1.0 - rate)

    # One row.

    def forward(self, group: Group, operands: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        """Output `[batch, kv_heads, groups, q_block, head_dim]` and log-sum-exp `[..., q_block]` of a query tile."""
        query, value_table = self._row_of(self.inputs.query, operands[0]), self.tables.value
        row = self._key_row(query)
        by_row = value_table is not None and self.relative.by_row

        def step(carry: Any, place: Place) -> Any:
            top, norm, out, by_distance = carry
            key, value = self._keys(self.key, place), self._keys(self.value, place)
            scores = self._scores(query, key, self._bias(place), self._relative_scores(query, row, place))
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
            if by_row:
                by_distance = by_distance * shrink[..., None] + self.relative.collapse(weights, self._starts(place))
            elif value_table is not None:
                near = self.relative.near(value_table, self._starts(place))
                out = out + self.einsum("bkgcqw,kgcwd->bkgqd", self.relative.spread(weights), near)
            return new_top, norm, out, by_distance

        per_query = query.shape[:-1]
        start = (jnp.full(per_query, LOWEST, self.dtype), jnp.zeros(per_query, self.dtype), jnp.zeros_like(query))
        by_distance = jnp.zeros((*per_query, self.relative.size), self.dtype) if by_row else None
        top, norm, out, by_distance = self._chunks(step, (*start, by_distance), operands)
        if by_row:
            out = out + self.einsum("bkgqn,kgnd->bkgqd", by_distance, value_table)
        attended = norm > 0
        norm = jnp.where(attended, norm, 1.0)
        # -LOWEST makes every weight of a row with nothing to attend to zero in the backward pass too.
        return out / norm[..., None], jnp.where(attended, top + jnp.log(norm), -LOWEST)

    def backward(
        self, group: Group, d_out: Array, lse: Array, delta: Array, totals: Totals, operands: Any
    ) -> tuple[Totals, Array]:
        """Adds a query tile's part to the totals and returns its own gradient."""
        query, d_out, lse, delta = (self._row_of(x, operands[0]) for x in (self.inputs.query, d_out, lse, delta))
        row, tables = self._key_row(query), self.tables
        by_row = tables.value is not None and self.relative.by_row
        d_by_distance = self.einsum("bkgqd,kgnd->bkgqn", d_out, tables.value) if by_row else None

        def step(carry: Any, place: Place) -> Any:
            totals, d_query, d_row, by_distance = carry
            key, value, bias = self._keys(self.key, place), self._keys(self.value, place), self._bias(place)
            extra = self._relative_scores(query, row, place)
            scores, pull = jax.vjp(functools.partial(self._scores, extra=extra), query, key, bias)
            weights = jnp.exp(scores - lse[..., None])
            allowed = self._allowed(group, place)
            if allowed is not None:
                weights = jnp.where(allowed, weights, 0.0)
            kept = self._kept(place, weights.shape)
            dropped = weights * kept
            d_weights = self.einsum("bkgqd,bkgsd->bkgqs", d_out, value)
            d_value = self.einsum("bkgqs,bkgqd->bkgsd", dropped, d_out)
            new = totals.tables
            if by_row:
                by_distance = by_distance + self.relative.collapse(dropped, self._starts(place))
                d_weights = d_weights + self.relative.expand(d_by_distance, self._starts(place))
            elif tables.value is not None:
                near = self.relative.near(tables.value, self._starts(place))
                d_weights = d_weights + self.relative.gather(self.einsum("bkgqd,kgcwd->bkgcqw", d_out, near))
                d_near = self.einsum("bkgcqw,bkgqd->kgcwd", self.relative.spread(dropped), d_out)
                new = new._replace(value=self.relative.add_near(new.value, self._starts(place), d_near))
            d_scores = weights * (d_weights * kept - delta[..., None])
            dq, dk, d_bias = pull(d_scores)
            scaled = d_scores * self.settings.scale
            if row is not None:
                d_row = d_row + self.relative.collapse(scaled, self._starts(place))
            elif tables.key is not None:
                near, spread = self.relative.near(tables.key, self._starts(place)), self.relative.spread(scaled)
                dq = dq + self.einsum("bkgcqw,kgcwd->bkgqd", spread, near)
                d_near = self.einsum("bkgcqw,bkgqd->kgcwd", spread, query)
                new = new._replace(key=self.relative.add_near(new.key, self._starts(place), d_near))
            if tables.bias is not None:
                part = self.relative.bias_total(d_scores, self._starts(place), tables.bias.shape)
                new = new._replace(bias=new.bias + part)
            totals = Totals(
                self._add_keys(totals.key, place, dk), self._add_keys(totals.value, place, d_value), totals.bias, new
            )
            if bias is not None:
                sizes = self.q_block, self.kv_block
                totals = totals._replace(bias=tiles.add_pairs(totals.bias, place.row, place.columns, d_bias, *sizes))
            return totals, d_query + dq, d_row, by_distance

        zeros = lambda x: None if x is None else jnp.zeros_like(x)
        start = (totals, jnp.zeros_like(query), zeros(row), zeros(d_by_distance))
        totals, d_query, d_row, by_distance = self._chunks(step, start, operands)
        new = totals.tables
        if row is not None:
            d_query = d_query + self.einsum("bkgqn,kgnd->bkgqd", d_row, tables.key)
            part = self.einsum("bkgqn,bkgqd->kgnd", d_row, query)
            new = new._replace(key=new.key + sum_to(part, tables.key.shape))
        if by_row:
            part = self.einsum("bkgqn,bkgqd->kgnd", by_distance, d_out)
            new = new._replace(value=new.value + sum_to(part, tables.value.shape))
        return totals._replace(tables=new), d_query

    def _add_keys(self, total: Array, place: Place, update: Array) -> Array:
        """Adds gradients of keys or values `[batch, kv_heads, groups or 1, keys, head_dim]` where they belong."""
        if place.columns.shape[1] == 1 and update.shape[2] > 1:  # the group's queries picked the same blocks
            update = update.sum(2, keepdims=True)
        return tiles.add_blocks(total, self._here(place), self.split(update))

    # Gradients of the whole call.

    def zeros(self) -> Totals:
        """Totals to start from."""
        zeros: Any = lambda x: None if x is None else jnp.zeros(x.shape, self.dtype)
        tables = Tables(*(zeros(table) for table in self.tables))
        return Totals(zeros(self.key), zeros(self.value), zeros(self.inputs.bias), tables)

    def gradients(self, d_query: Array, totals: Totals) -> Inputs:
        """The totals in the shapes and dtypes of the inputs."""
        inputs, relative, tables = self.inputs, self.inputs.relative, totals.tables
        grads = Inputs(d_query, totals.key, totals.value, totals.bias, None)
        if relative is not None:
            unpad = lambda x: x if x is None or self.relative.by_row else self.relative.unpad(x)
            slopes = jax.tree.map(jnp.zeros_like, relative.slopes)
            terms = type(relative)(unpad(tables.key), unpad(tables.value), tables.bias, slopes, relative.radius)
            grads = grads._replace(relative=terms)
        return jax.tree.map(lambda grad, x: grad.reshape(x.shape).astype(x.dtype), grads, inputs)
