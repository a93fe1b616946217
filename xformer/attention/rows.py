"""One row of tiles as the engine reads it: its queries, keys, scores, masks and dropout, and loops over rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention import meshes, tiles
from xformer.attention.call import Controls, Inputs, Settings
from xformer.attention.layout import Group
from xformer.attention.relative import RelativeTiles

Array = jax.Array
LOWEST = -1e30  # below any score, above the mask constants that callers put in a bias; finite, so that no NaN arises


class Place(NamedTuple):
    """Where a chunk of tiles is: query tile `row`, key tiles `columns`, `tests`; `[kv_heads, groups, chunk]` both.

    And of which kind: `far` if all pairs are beyond the reach of the position term, `tested` if some may not exist.
    """

    row: Array
    columns: Array
    tests: Array
    chunk: Array
    far: bool
    tested: bool


class Tables(NamedTuple):
    """The tables of `Relative` with heads split, `[kv_heads or 1, groups or 1, distances, ...]`, in the compute dtype.

    Tables that are read by tile are padded.
    """

    key: Any = None
    value: Any = None
    bias: Any = None


class Rows:
    """One call's arrays, padded to whole tiles, and what is done with them for one query tile.

    Arrays by token keep the length before the heads, as callers do, so that no array is moved as a whole:
    `query [batch, q_len, kv_heads, groups, head_dim]`, `key` and `value [batch, kv_len, kv_heads, head_dim]`. A tile's
    are flat, `[n, m, ...]`, which is what compilers do best. Query heads that visit the same key tiles as others of
    their group are so many more queries: n is batch x kv_heads and m groups x q_block. Otherwise n is batch x kv_heads
    x groups and m q_block.
    """

    def __init__(self, settings: Settings, kv_len: int | None, inputs: Inputs, controls: Controls) -> None:
        self.settings, self.kv_len, self.inputs, self.controls = settings, kv_len, inputs, controls
        layout = controls.layout
        self.q_block, self.kv_block = layout.q_block, layout.kv_block
        self.batch, self.q_len, self.kv_heads, self.groups, _ = inputs.query.shape
        self.per_head = self.groups > 1 and layout.groups[0].columns.shape[0] > 1
        self.n = self.batch * self.kv_heads * (self.groups if self.per_head else 1)
        self.dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
        self.einsum = functools.partial(jnp.einsum, precision=settings.precision)
        self.queries = merge_heads(inputs.query)
        blocks = lambda x: x.reshape(x.shape[0], -1, self.kv_block, *x.shape[2:])
        self.key, self.value = blocks(inputs.key), blocks(inputs.value)
        # Mesh axes that anything here varies over, within `jax.shard_map`.
        self.axes = meshes.axes_of(inputs, controls)
        self.tables, self.slopes = Tables(), None
        self.relative: Any = None  # a RelativeTiles where there are relative terms
        if inputs.relative is not None:
            terms = inputs.relative
            self.relative = RelativeTiles(self.q_block, self.kv_block, terms.radius, layout.near_per_row, self.einsum)
            split = lambda x: None if x is None else self.heads(x).astype(self.dtype)
            pad = lambda x: x if x is None or self.relative.by_row else self.relative.pad(x)
            key, value, bias, self.slopes = (
                split(x) for x in (terms.key_table, terms.value_table, terms.bias_table, terms.slopes)
            )
            self.tables = Tables(pad(key), pad(value), bias)

    # Shapes.

    def heads(self, x: Array) -> Array:
        """`[heads or 1, ...]` -> `[kv_heads or 1, groups or 1, ...]`."""
        return x.reshape(*((1, 1) if x.shape[0] == 1 else (self.kv_heads, self.groups)), *x.shape[1:])

    def flat(self, x: Array) -> Array:
        """`[batch, kv_heads, groups, q_block, ...]` -> `[n, m, ...]`."""
        return self._flat(x, 4)

    def _flat(self, x: Array, axes: int) -> Array:
        return x.reshape(self.n, -1, *x.shape[axes:])

    def full(self, x: Array) -> Array:
        """The inverse of `flat`."""
        return x.reshape(self.batch, self.kv_heads, self.groups, self.q_block, *x.shape[2:])

    def by_token(self, x: Array) -> Array:
        """A query tile's `[n, m, ...]` -> `[batch, q_block, heads, ...]`."""
        x = x.reshape(self.batch, -1, self.q_block, *x.shape[2:])
        return jnp.moveaxis(x, 2, 1)

    def in_order(self, parts: Any) -> Array:
        """Rows of all groups, `[num_rows, batch, q_block, heads, ...]` -> `[batch, q_len, kv_heads, groups, ...]`."""
        rows = parts[0]
        if len(parts) > 1:
            numbers = jnp.concatenate([jnp.asarray(group.rows) for group in self.controls.layout.groups])
            order = jnp.argsort(numbers)[: self.q_len // self.q_block]  # rows that stand in for none come last
            rows = jnp.take(jnp.concatenate(parts), order, axis=0, mode="clip")
        rows = jnp.moveaxis(rows, 0, 1)
        return rows.reshape(self.batch, self.q_len, self.kv_heads, self.groups, *rows.shape[4:])

    # Loops over the rows of a group.

    def _operands(self, group: Group) -> tuple[Array, Array, Array]:
        by_row = lambda x: jnp.transpose(self.heads(jnp.asarray(x)), (2, 3, 0, 1, 4))
        return jnp.asarray(group.rows), by_row(group.columns), by_row(group.tests)

    def map(self, group: Group, forward: Any) -> Any:
        """`forward` of every row: (output, log-sum-exp), stacked."""
        if group.num_rows == 1:
            one = forward(jax.tree.map(lambda x: x[0], self._operands(group)))
            return jax.tree.map(lambda x: x[None], one)
        step = lambda carry, operands: (carry, forward(operands))
        return jax.lax.scan(step, None, self._operands(group), unroll=self._unroll(group))[1]

    def scan(self, group: Group, backward: Any, totals: Any) -> Any:
        """`backward` of every row: totals and the query gradients, stacked."""
        if group.num_rows == 1:
            totals, one = backward(totals, jax.tree.map(lambda x: x[0], self._operands(group)))
            return totals, one[None]
        return jax.lax.scan(backward, totals, self._operands(group), unroll=self._unroll(group))

    def _unroll(self, group: Group) -> int:
        """Rows in a step of the loop: two short ones, so that one's small operations fill the gaps of the other's."""
        return 2 if group.num_rows > 2 and group.columns.shape[2] == 1 else 1

    def chunks(self, step: Any, carry: Any, group: Group, operands: tuple[Array, Array, Array]) -> Any:
        """Runs `step(carry, place)` over a row's chunks: far ones, the other full ones, and partial ones."""
        row, columns, tests = operands
        numbers = jnp.arange(len(columns))
        far, full = group.far_chunks, group.full_chunks
        kinds = ((True, False, slice(far)), (False, False, slice(far, full)), (False, True, slice(full, None)))
        for *kind, some in kinds:
            chunks = jax.tree.map(lambda x, some=some: x[some], (columns, tests, numbers))
            if len(chunks[0]) == 1:
                carry = step(carry, Place(row, *(x[0] for x in chunks), *kind))
            elif len(chunks[0]):
                each = lambda carry, x, kind=kind: (step(carry, Place(row, *x, *kind)), None)
                carry = jax.lax.scan(each, carry, chunks)[0]
        return carry

    # One tile.

    def query(self, row: Array) -> Array:
        """A query tile, scaled: scaling scores would be one more pass over them."""
        return self.row_of(self.queries, row) * self.settings.scale

    def row_of(self, x: Array, row: Array) -> Array:
        """A query tile's part of an array `[batch, q_len, heads, ...]`, flat."""
        tile = jax.lax.dynamic_slice_in_dim(x, row * self.q_block, self.q_block, 1)
        return self._flat(jnp.moveaxis(tile, 1, 2), 3).astype(self.dtype)

    def keys(self, blocks: Array, place: Place) -> Array:
        """A chunk's keys or values `[n, keys, head_dim]` from `[batch, num_blocks, kv_block, kv_heads, head_dim]`."""
        return tiles.take_keys(blocks, self.here(place)).reshape(self.n, -1, blocks.shape[-1]).astype(self.dtype)

    def add_keys(self, total: Array, place: Place, update: Array) -> Array:
        """Adds a chunk's gradients `[n, head_dim, keys]` where `keys` reads."""
        heads = (self.kv_heads, self.groups) if self.per_head else (self.kv_heads, 1)
        update = update.reshape(self.batch, *heads, update.shape[1], -1, self.kv_block)
        return tiles.add_keys(total, self.here(place), update)

    def here(self, place: Place) -> Array:
        """Where the key tiles stand among the keys that are here."""
        return place.columns - self.controls.first_column

    def _first_query(self, place: Place) -> Array:
        """The position of the tile's first query."""
        return self.controls.offset + (self.controls.first_row + place.row) * self.q_block

    def starts(self, place: Place) -> Array:
        """Where the tiles' distances start in the tables; see `RelativeTiles`."""
        return self.relative.starts(self._first_query(place), place.columns)

    def scores(self, query: Array, key: Array, place: Place, products: Array | None) -> Array:
        """Masked scores `[n, m, keys]` of a scaled query tile with a chunk of keys.

        `products`: what a table of keys adds, `[batch, kv_heads, groups, q_block, keys or 1]`.
        """
        scores = self.einsum("nmd,nsd->nms", query, key)
        bias, allowed = self.inputs.bias, self._allowed(place)
        if self.relative is None and bias is None and allowed is None:
            return scores
        scores = self.full(scores)
        if products is not None:
            scores = scores + products
        if self.tables.bias is not None:
            scores = scores + self.relative.bias_scores(self.tables.bias, self.starts(place), place.far)
        if self.slopes is not None:
            scores = scores + self.relative.slope_scores(self.slopes, self.starts(place))
        if bias is not None:
            bias = tiles.take_pairs(bias, place.row, place.columns, self.q_block, self.kv_block)
            scores = scores + bias.astype(self.dtype)
        if allowed is not None:
            scores = jnp.where(allowed, scores, LOWEST)
        return self.flat(scores)

    def _allowed(self, place: Place) -> Array | None:
        """Which pairs of the tile attend, broadcastable to the scores; None for all."""
        controls, tests = self.controls, []
        if place.tested:
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

    def kept(self, place: Place, num_keys: int) -> Array | float:
        """What dropout multiplies the weights `[n, m, keys]` by."""
        rate = self.settings.dropout_rate
        if not rate:
            return 1.0
        shape = (self.kv_heads, self.groups, num_keys)
        examples = self.controls.first_example + jnp.arange(self.batch)
        if self.settings.broadcast_dropout:
            shape, examples = (1, 1, num_keys), jnp.zeros(1, jnp.int32)
        queries = (self.controls.first_row + place.row) * self.q_block + jnp.arange(self.q_block)
        # Tiles attended one by one are known by their keys, whichever list they are on.
        chunk = place.columns[0, 0, 0] if place.columns.shape == (1, 1, 1) else place.chunk
        keep = tiles.keep_mask(self.controls.dropout_rng, examples, queries, chunk, rate=rate, shape=shape)
        scale = keep.astype(self.dtype) / (1.0 - rate)
        whole = (self.batch, self.kv_heads, self.groups, self.q_block, num_keys)
        return self.flat(jnp.broadcast_to(scale, whole))


def merge_heads(x: Array) -> Array:
    """`[batch, q_len, kv_heads, groups, ...]` -> `[batch, q_len, heads, ...]`.

    Done outside the loops: inside, the compiler copies all of an array for an axis of size 1.
    """
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])
