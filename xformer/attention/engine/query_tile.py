"""A query tile and the key tiles that it visits: their queries, keys, scores, masks, dropout, and loops over them."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention.device import present
from xformer.attention.dtypes import compute_dtype
from xformer.attention.engine import gather, mesh_axes
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.relative_by_entries import places, reader
from xformer.attention.engine.relative_tiles import Relative
from xformer.attention.engine.tile_plan import TileGroup
from xformer.attention.engine.trees import pair_distances
from xformer.attention.late import after
from xformer.attention.pattern import Pattern

Array = jax.Array
HIDDEN = -math.inf  # the score of a hidden pair: below any bias, which is a number like any other


class Chunk(NamedTuple):
    """Some of the key tiles that a query tile visits, attended in one step.

    Attributes:
      query_tile: index of the query tile.
      key_tiles, mask_ids: indices of the key tiles and of their masks, `[kv_heads, groups, chunk]`.
      number: which chunk of the query tile this is.
      distant: all pairs are at a distance beyond which the position term is constant.
      masked: some pairs may not exist.
    """

    query_tile: Array
    key_tiles: Array
    mask_ids: Array
    number: Array
    distant: bool
    masked: bool


class Tables(NamedTuple):
    """The tables of `Relative` with heads split, `[kv_heads or 1, groups or 1, distances, ...]`, in the compute dtype.

    Tables that are read by tile are padded.
    """

    key: Any = None
    value: Any = None
    bias: Any = None


class QueryTiles:
    """One call's arrays, padded to whole tiles, and what is done with them for one query tile.

    Arrays by token keep the length before the heads, as callers do, so that no array is moved as a whole:
    `query [batch, q_len, kv_heads, groups, head_dim]`, `key` and `value [batch, kv_len, kv_heads, depth]`. A tile's
    are flat, `[n, m, ...]`, which is what compilers do best. Query heads that visit the same key tiles as others of
    their group are so many more queries: n is batch x kv_heads and m groups x q_block. Otherwise n is batch x kv_heads
    x groups and m q_block.
    """

    def __init__(self, settings: Settings, kv_len: int | None, inputs: Inputs, controls: Controls) -> None:
        self.settings, self.kv_len, self.inputs, self.controls = settings, kv_len, inputs, controls
        plan = controls.plan
        self.q_block, self.kv_block = plan.q_block, plan.kv_block
        self.batch, self.q_len, self.kv_heads, self.groups, _ = inputs.query.shape
        self.per_head = self.groups > 1 and plan.groups[0].key_tiles.shape[0] > 1
        self.n = self.batch * self.kv_heads * (self.groups if self.per_head else 1)
        self.dtype = compute_dtype(inputs.query.dtype)
        self.einsum = functools.partial(jnp.einsum, precision=settings.precision)
        self.queries = merge_heads(inputs.query)
        blocks = lambda x: x.reshape(x.shape[0], -1, self.kv_block, *x.shape[2:])
        # A product with a weight of zero would show a NaN or infinity that is hidden. Zeros stand in for it wherever
        # weights are multiplied; scores are masked by selection, so there a NaN for the whole key shows it to the
        # queries that see the key, and to no others.
        cleared = lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))
        self.key, self.value = blocks(cleared(inputs.key)), blocks(cleared(inputs.value))
        finite = jnp.isfinite(inputs.value).all(-1, keepdims=True)
        self.marked_key = blocks(jnp.where(finite, inputs.key, jnp.full((), jnp.nan, inputs.key.dtype)))
        # Mesh axes that anything here varies over, within `jax.shard_map`.
        self.axes = mesh_axes.axes_of(inputs, controls)
        self.tables, self.slopes = Tables(), None
        self.relative: Any = None  # a RelativeTiles where there are relative terms
        if inputs.relative is not None:
            terms = inputs.relative
            sizes = self.q_block, self.kv_block, plan.near_per_query_tile
            given = controls.q_positions is not None
            self.relative = reader(terms, *sizes, self.einsum, by_position=given)
            split = lambda x: None if x is None else self.heads(x).astype(self.dtype)
            pad = lambda x: x if x is None or self.relative.whole_table else self.relative.pad(x)
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
        """All groups' `[query tiles, batch, q_block, heads, ...]` -> `[batch, q_len, kv_heads, groups, ...]`."""
        tiles = parts[0]
        if len(parts) > 1:
            numbers = jnp.concatenate([jnp.asarray(group.query_tiles) for group in self.controls.plan.groups])
            order = jnp.argsort(numbers)[: self.q_len // self.q_block]  # entries that only pad a group come last
            tiles = jnp.take(jnp.concatenate(parts), order, axis=0, mode="clip")
        tiles = jnp.moveaxis(tiles, 0, 1)
        return tiles.reshape(self.batch, self.q_len, self.kv_heads, self.groups, *tiles.shape[4:])

    # Loops over the query tiles of a group.

    def _operands(self, group: TileGroup) -> tuple[Array, Array, Array]:
        by_tile = lambda x: jnp.transpose(self.heads(jnp.asarray(x)), (2, 3, 0, 1, 4))
        return jnp.asarray(group.query_tiles), by_tile(group.key_tiles), by_tile(group.mask_ids)

    def map(self, group: TileGroup, forward: Any) -> Any:
        """`forward` of every query tile: (output, log-sum-exp), stacked."""
        if group.num_query_tiles == 1:
            one = forward(jax.tree.map(lambda x: x[0], self._operands(group)))
            return jax.tree.map(lambda x: x[None], one)
        operands, together = self._operands(group), self._together(group)
        if together > 1:
            if together >= group.num_query_tiles:
                return jax.vmap(forward)(operands)
            return jax.lax.map(forward, operands, batch_size=together)
        step = lambda carry, operands: (carry, forward(operands))
        return jax.lax.scan(step, None, operands, unroll=self._unroll(group))[1]

    def _together(self, group: TileGroup) -> int:
        """Query tiles of a step of the forward pass: on accelerators as many as make it worth its launches."""
        scores = self.batch * self.kv_heads * self.groups * self.q_block * group.key_tiles.shape[3] * self.kv_block
        return self.settings.step_scores // scores if isinstance(scores, int) else 1

    def scan(self, group: TileGroup, backward: Any, totals: Any, grad: Array) -> Any:
        """`backward` of every query tile: totals and the query gradients, stacked; `grad` is the output's."""
        operands = self._operands(group)
        if group.num_query_tiles == 1:
            totals, one = backward(totals, jax.tree.map(lambda x: x[0], operands))
            return totals, one[None]
        # The gradients are put into zeros of the loop's own: those of a scan would be there long before `grad`.
        shape = group.num_query_tiles, self.batch, self.q_block, self.kv_heads * self.groups, self.queries.shape[-1]
        parts = mesh_axes.varying(after(grad, jnp.zeros(shape, self.dtype)), self.axes)

        def step(carry: Any, numbered: Any) -> Any:
            number, operands = numbered
            totals, one = backward(carry[0], operands)
            return (totals, jax.lax.dynamic_update_index_in_dim(carry[1], one, number, 0)), None

        numbered = jnp.arange(group.num_query_tiles), operands
        return jax.lax.scan(step, (totals, parts), numbered, unroll=self._unroll(group))[0]

    def _unroll(self, group: TileGroup) -> int:
        """Query tiles in a step of the loop: two where little is done for each, so that one's small operations fill the
        gaps of the other's. Not on a CPU where each has a single key tile: XLA would then copy all gradients of keys.
        """
        _, query_tiles, chunks, chunk = group.key_tiles.shape
        copied = chunk == 1 and present().platform == "cpu"
        return 2 if query_tiles > 2 and chunks == 1 and not copied else 1

    def chunks(self, step: Any, carry: Any, group: TileGroup, operands: tuple[Array, Array, Array]) -> Any:
        """Runs `step(carry, chunk)` over a query tile's chunks: distant ones, other unmasked ones, masked ones."""
        query_tile, key_tiles, mask_ids = operands
        numbers = jnp.arange(len(key_tiles))
        distant, unmasked = group.distant_chunks, group.unmasked_chunks
        kinds = (
            (True, False, slice(distant)),
            (False, False, slice(distant, unmasked)),
            (False, True, slice(unmasked, None)),
        )
        for *kind, some in kinds:
            chunks = jax.tree.map(lambda x, some=some: x[some], (key_tiles, mask_ids, numbers))
            if len(chunks[0]) == 1:
                carry = step(carry, Chunk(query_tile, *(x[0] for x in chunks), *kind))
            elif len(chunks[0]):
                each = lambda carry, x, kind=kind: (step(carry, Chunk(query_tile, *x, *kind)), None)
                carry = jax.lax.scan(each, carry, chunks)[0]
        return carry

    # One tile.

    def query(self, query_tile: Array) -> Array:
        """A query tile, scaled: scaling scores would be one more pass over them."""
        return self.at_query_tile(self.queries, query_tile) * self.settings.scale

    def at_query_tile(self, x: Array, query_tile: Array) -> Array:
        """A query tile's part of an array `[batch, q_len, heads, ...]`, flat."""
        tile = jax.lax.dynamic_slice_in_dim(x, query_tile * self.q_block, self.q_block, 1)
        return self._flat(jnp.moveaxis(tile, 1, 2), 3).astype(self.dtype)

    def keys(self, blocks: Array, chunk: Chunk) -> Array:
        """A chunk's keys or values `[n, keys, depth]` from `[batch, num_blocks, kv_block, kv_heads, depth]`."""
        return (
            gather.take_keys(blocks, self.local_key_tiles(chunk))
            .reshape(self.n, -1, blocks.shape[-1])
            .astype(self.dtype)
        )

    def sinks(self) -> Array | None:
        """The logit without a value of every query of a tile, `[n, m]`."""
        sinks = self.inputs.sinks
        if sinks is None:
            return None
        shape = self.batch, self.kv_heads, self.groups, self.q_block
        return self.flat(jnp.broadcast_to(sinks[None, :, :, None], shape).astype(self.dtype))

    def add_keys(self, total: Array, chunk: Chunk, update: Array) -> Array:
        """Adds a chunk's gradients `[n, depth, keys]` where `keys` reads."""
        heads = (self.kv_heads, self.groups) if self.per_head else (self.kv_heads, 1)
        update = update.reshape(self.batch, *heads, update.shape[1], -1, self.kv_block)
        return gather.add_keys(total, self.local_key_tiles(chunk), update)

    def local_key_tiles(self, chunk: Chunk) -> Array:
        """Indices of the key tiles among those that this device holds."""
        return chunk.key_tiles - self.controls.first_key_tile

    def _first_query(self, chunk: Chunk) -> Array:
        """The position of the tile's first query."""
        return self.controls.offset + (self.controls.first_query_tile + chunk.query_tile) * self.q_block

    def starts(self, chunk: Chunk) -> Any:
        """Where the tiles' distances start in the tables; see `RelativeTiles` and those derived from it."""
        terms, given = self.inputs.relative, self.controls.q_positions is not None
        if terms is None or (terms.entries_of is None and not given):
            return self.relative.starts(self._first_query(chunk), chunk.key_tiles)
        if given:
            positions = self._positions(chunk)
        else:
            of_queries = (self._first_query(chunk) + jnp.arange(self.q_block))[None, None, None, :, None]
            positions = of_queries, self._key_places(chunk)[None]
        return places(self.relative, terms, *positions, lambda: self._distances(chunk, terms))

    def _distances(self, chunk: Chunk, terms: Relative) -> Array:
        """Distances of pairs in their trees, int `[batch or 1, kv_heads or 1, groups or 1, q_block, keys]`."""
        controls, key_tiles = self.controls, chunk.key_tiles
        if controls.distances is not None:
            return gather.take_pairs(controls.distances, chunk.query_tile, key_tiles, self.q_block, self.kv_block)
        assert terms.trees is not None and controls.q_paths is not None and controls.kv_paths is not None
        of_queries = jax.lax.dynamic_slice_in_dim(controls.q_paths, chunk.query_tile * self.q_block, self.q_block, 3)
        of_keys = gather.take_rows(controls.kv_paths, key_tiles, self.kv_block)
        return pair_distances(of_queries, of_keys, terms.trees.through_root)

    def _key_places(self, chunk: Chunk) -> Array:
        """Where the keys of a chunk stand among all, int `[kv_heads, groups, 1, keys]`."""
        places = chunk.key_tiles[..., None] * self.kv_block + jnp.arange(self.kv_block)[None, None, None]
        return places.reshape(*chunk.key_tiles.shape[:2], 1, -1)

    def _positions(self, chunk: Chunk) -> tuple[Array, Array]:
        """Those that were given, `[batch or 1, 1, 1, q_block, 1]` and `[batch or 1, 1, 1, 1, keys]`."""
        q_positions, kv_positions = self.controls.q_positions, self.controls.kv_positions
        assert q_positions is not None and kv_positions is not None
        of_queries = jax.lax.dynamic_slice_in_dim(q_positions, chunk.query_tile * self.q_block, self.q_block, 3)
        pick = chunk.query_tile, chunk.key_tiles, self.q_block, self.kv_block
        return of_queries, gather.take_pairs(kv_positions, *pick)

    def scores(self, query: Array, key: Array, chunk: Chunk, products: Array | None) -> tuple[Array, Any]:
        """Masked scores `[n, m, keys]` of a scaled query tile with a chunk of keys, and the softcap's derivative there.

        `products`: what a table of keys adds, `[batch, kv_heads, groups, q_block, keys or 1]`.
        """
        scores = self.einsum("nmd,nsd->nms", query, key)
        if products is not None:
            scores = self.flat(self.full(scores) + products)
        scores, slope = soft_cap(scores, self.settings.softcap)
        bias, allowed = self.inputs.bias, self._allowed(chunk)
        if self.relative is None and bias is None and allowed is None:
            return scores, slope
        scores = self.full(scores)
        if self.tables.bias is not None:
            scores = scores + self.relative.bias_scores(self.tables.bias, self.starts(chunk), chunk.distant)
        if self.slopes is not None:
            scores = scores + self.relative.slope_scores(self.slopes, self.starts(chunk))
        if bias is not None:
            bias = gather.take_pairs(bias, chunk.query_tile, chunk.key_tiles, self.q_block, self.kv_block)
            scores = scores + bias.astype(self.dtype)
        if allowed is not None:
            scores = jnp.where(allowed, scores, jnp.asarray(HIDDEN, self.dtype))
            if not isinstance(slope, float):  # that of a hidden NaN must not meet a gradient of zero
                slope = self.flat(jnp.where(allowed, self.full(slope), jnp.zeros((), self.dtype)))
        return self.flat(scores), slope

    def _allowed(self, chunk: Chunk) -> Array | None:
        """Which pairs of the tile attend, broadcastable to the scores; None for all."""
        controls, masks = self.controls, []
        if chunk.masked:
            masks.append(
                gather.merge_pairs(jnp.take(jnp.asarray(controls.plan.pair_masks), chunk.mask_ids, axis=0))[None]
            )
        k_positions = self._key_places(chunk)
        if self.kv_len is not None:
            masks.append((k_positions < self.kv_len)[None])
        if self.settings.pattern is not None and controls.q_positions is not None:
            of_queries, of_keys = self._positions(chunk)
            heads = self.kv_heads, self.groups
            masks.append(allowed_by_position(self.settings.pattern, of_queries, of_keys, heads))
        elif self.settings.pattern is not None:
            q_positions = self._first_query(chunk) + jnp.arange(self.q_block)
            own = k_positions.reshape(-1, k_positions.shape[-1])  # of every head that has a list of its own
            masks.append(self.heads(self.settings.pattern.allows(q_positions, own))[None])
        if controls.mask is not None:
            masks.append(
                gather.take_pairs(controls.mask, chunk.query_tile, chunk.key_tiles, self.q_block, self.kv_block)
            )
        if controls.q_segments is not None and controls.kv_segments is not None:
            ids = jax.lax.dynamic_slice_in_dim(controls.q_segments, chunk.query_tile * self.q_block, self.q_block, 3)
            masks.append(
                ids
                == gather.take_pairs(
                    controls.kv_segments, chunk.query_tile, chunk.key_tiles, self.q_block, self.kv_block
                )
            )
        if self.settings.code_pairs is not None and controls.q_codes is not None and controls.kv_codes is not None:
            codes = jax.lax.dynamic_slice_in_dim(controls.q_codes, chunk.query_tile * self.q_block, self.q_block, 3)
            pick = chunk.query_tile, chunk.key_tiles, self.q_block, self.kv_block
            masks.append(self.settings.code_pairs.allows(codes, gather.take_pairs(controls.kv_codes, *pick)))
        return functools.reduce(jnp.logical_and, masks) if masks else None

    def kept(self, chunk: Chunk, num_keys: int) -> Array | float:
        """What dropout multiplies the weights `[n, m, keys]` by."""
        rate = self.settings.dropout_rate
        if not rate:
            return 1.0
        shape = (self.kv_heads, self.groups, num_keys)
        examples = self.controls.first_example + jnp.arange(self.batch)
        if self.settings.broadcast_dropout:
            shape, examples = (1, 1, num_keys), jnp.zeros(1, jnp.int32)
        queries = (self.controls.first_query_tile + chunk.query_tile) * self.q_block + jnp.arange(self.q_block)
        # Tiles attended one by one are known by their keys, whichever list they are on.
        number = chunk.key_tiles[0, 0, 0] if chunk.key_tiles.shape == (1, 1, 1) else chunk.number
        keep = gather.keep_mask(self.controls.dropout_rng, examples, queries, number, rate=rate, shape=shape)
        scale = keep.astype(self.dtype) / (1.0 - rate)
        whole = (self.batch, self.kv_heads, self.groups, self.q_block, num_keys)
        return self.flat(jnp.broadcast_to(scale, whole))


def allowed_by_position(pattern: Pattern, q_positions: Array, k_positions: Array, heads: tuple[int, int]) -> Array:
    """Which pairs of a pattern exist, `[batch or 1, kv_heads or 1, groups or 1, q_len, kv_len]`.

    Positions are int `[batch or 1, 1, 1, q_len, 1]` and `[batch or 1, 1, 1, 1, kv_len]`; `heads` is (kv_heads, groups).
    """
    q_positions, k_positions = q_positions[:, 0, 0, :, 0], k_positions[:, 0, 0, 0]
    batch = max(len(q_positions), len(k_positions))
    wide = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in (q_positions, k_positions))
    allowed = jax.vmap(pattern.allows)(*wide)
    return allowed.reshape(batch, *((1, 1) if allowed.shape[1] == 1 else heads), *allowed.shape[2:])


def soft_cap(scores: Array, softcap: float | None) -> tuple[Array, Any]:
    """`softcap * tanh(score / softcap)` and its derivative by the score; the scores and 1 where there is no cap."""
    if softcap is None:
        return scores, 1.0
    bent = jnp.tanh(scores / softcap)
    return softcap * bent, 1.0 - bent * bent


def merge_heads(x: Array) -> Array:
    """`[batch, q_len, kv_heads, groups, ...]` -> `[batch, q_len, heads, ...]`.

    Done outside the loops: inside, the compiler copies all of an array for an axis of size 1.
    """
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])
