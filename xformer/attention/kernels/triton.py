"""Pallas kernels for GPUs (through Triton): attention over listed tiles, forward and backward.

FlashAttention-2's schedule (Dao 2023, sections 3.1 and 3.2) over lists of tiles instead of all: a program holds one
query tile and walks along its key tiles (forward and query gradient), or holds one key tile and walks along its query
tiles, for every query head that shares it (key and value gradients), so that nothing is added up through memory. In a
list the full tiles come first and are not tested. Scores are kept in base 2. On CPUs the same kernels run in Pallas's
interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from xformer.attention.kernels.tile_lists import Lists

Array = jax.Array
LOWEST = -1e30  # below any score, and finite: kernels read no bias
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Static:
    """What is known when tracing: the scale of the scores, the first query's position, the products' precision."""

    scale: float
    offset: int
    precision: Any


class Extras(NamedTuple):
    """What decides on pairs besides the lists; None where it is not needed.

    Attributes:
      real: int32 `[batch or 1, kv_len]`, 0 where a key is padding.
      q_segments, kv_segments: int32 `[batch or 1, length]`.
      slopes: float32 `[heads]`; `-slope * |distance|` is added to the scores.
    """

    real: Array | None = None
    q_segments: Array | None = None
    kv_segments: Array | None = None
    slopes: Array | None = None


class _Tile:
    """The score tile of a query tile and a key tile, for one head."""

    def __init__(self, static: Static, sizes: tuple[int, int], bank: Any, extras: Extras, head: Any) -> None:
        self.static, self.bank, self.extras, self.head = static, bank, extras, head
        self.q_block, self.kv_block = sizes

    def dot(self, a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False) -> Array:
        axes = ((0 if trans_a else 1,), (1 if trans_b else 0,))
        return jax.lax.dot_general(
            a, b, (axes, ((), ())), precision=self.static.precision, preferred_element_type=jnp.float32
        )

    def scores(self, query: Array, key: Array, row: Any, column: Any) -> Array:
        """Scores times log2(e), float32 `[q_block, kv_block]`."""
        scores = self.dot(query, key, trans_b=True) * (self.static.scale * LOG2_E)
        if self.extras.slopes is not None:
            q_positions = self.static.offset + row * self.q_block + jnp.arange(self.q_block)
            k_positions = column * self.kv_block + jnp.arange(self.kv_block)
            distance = jnp.abs(k_positions[None, :] - q_positions[:, None]).astype(jnp.float32)
            scores -= self.extras.slopes[self.head] * LOG2_E * distance
        return scores

    def allowed(self, row: Any, column: Any, test: Any) -> Array | None:
        """Which pairs attend, bool broadcastable to the tile; None for all. `test` is None in full tiles."""
        keys, tests = pl.ds(column * self.kv_block, self.kv_block), []
        if test is not None:
            tests.append(self.bank[test, :, :] != 0)
        if self.extras.real is not None:
            tests.append((self.extras.real[keys] != 0)[None, :])
        if self.extras.q_segments is not None and self.extras.kv_segments is not None:
            queries = pl.ds(row * self.q_block, self.q_block)
            tests.append(self.extras.q_segments[queries][:, None] == self.extras.kv_segments[keys][None, :])
        return functools.reduce(jnp.logical_and, tests) if tests else None


def _walk(lists: Any, line: Any, body: Any, carry: Any, partial: bool) -> Any:
    """`carry = body(carry, tile, test)` along a line; `test` is None in full tiles."""
    start, middle, end = lists.starts[line], lists.partial_starts[line], lists.starts[line + 1]
    carry = jax.lax.fori_loop(start, middle, lambda at, carry: body(carry, lists.tiles[at], None), carry)
    if not partial:
        return carry
    return jax.lax.fori_loop(middle, end, lambda at, carry: body(carry, lists.tiles[at], lists.tests[at]), carry)


# The kernels. References: query, key, value, ... `[length, head_dim]` of one head.


def forward_kernel(
    query: Any,
    key: Any,
    value: Any,
    lists: Any,
    bank: Any,
    extras: Any,
    out: Any,
    lse: Any,
    *,
    static: Static,
    sizes: Any,
) -> None:
    row = lists.order[pl.program_id(0)]
    tile = _Tile(static, sizes, bank, extras, 0)
    queries = pl.ds(row * tile.q_block, tile.q_block)
    q = query[queries, :]

    def body(carry: Any, column: Any, test: Any) -> Any:
        top, norm, total = carry
        keys = pl.ds(column * tile.kv_block, tile.kv_block)
        scores = tile.scores(q, key[keys, :], row, column)
        allowed = tile.allowed(row, column, test)
        if allowed is not None:
            scores = jnp.where(allowed, scores, LOWEST)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp2(scores - new_top[:, None])
        if allowed is not None:
            weights = jnp.where(allowed, weights, 0.0)
        shrink = jnp.exp2(top - new_top)
        v = value[keys, :]
        total = total * shrink[:, None] + tile.dot(weights.astype(v.dtype), v)
        return new_top, norm * shrink + weights.sum(-1), total

    start = jnp.full(tile.q_block, LOWEST, jnp.float32), jnp.zeros(tile.q_block, jnp.float32)
    total = jnp.zeros((tile.q_block, q.shape[1]), jnp.float32)
    top, norm, total = _walk(lists, row, body, (*start, total), bank is not None)
    attended = norm > 0
    norm = jnp.where(attended, norm, 1.0)
    out[queries, :] = (total / norm[:, None]).astype(out.dtype)
    # -LOWEST makes every weight of a row with nothing to attend to zero in the backward pass too.
    lse[queries] = jnp.where(attended, top + jnp.log2(norm), -LOWEST)


def query_kernel(
    query: Any, key: Any, value: Any, d_out: Any, lse: Any, delta: Any, lists: Any, bank: Any, extras: Any,
    d_query: Any, *, static: Static, sizes: Any,
) -> None:  # fmt: skip
    row = lists.order[pl.program_id(0)]
    tile = _Tile(static, sizes, bank, extras, 0)
    queries = pl.ds(row * tile.q_block, tile.q_block)
    q, do, row_lse, row_delta = query[queries, :], d_out[queries, :], lse[queries], delta[queries]

    def body(total: Any, column: Any, test: Any) -> Any:
        keys = pl.ds(column * tile.kv_block, tile.kv_block)
        k = key[keys, :]
        weights = jnp.exp2(tile.scores(q, k, row, column) - row_lse[:, None])
        allowed = tile.allowed(row, column, test)
        if allowed is not None:
            weights = jnp.where(allowed, weights, 0.0)
        d_scores = weights * (tile.dot(do, value[keys, :], trans_b=True) - row_delta[:, None])
        return total + tile.dot(d_scores.astype(k.dtype), k)

    total = _walk(lists, row, body, jnp.zeros(q.shape, jnp.float32), bank is not None)
    d_query[queries, :] = (total * static.scale).astype(d_query.dtype)


def key_kernel(
    query: Any, key: Any, value: Any, d_out: Any, lse: Any, delta: Any, lists: Any, bank: Any, extras: Any, d_key: Any,
    d_value: Any, *, static: Static, sizes: Any, groups: int, own_lists: bool,
) -> None:  # fmt: skip
    """Query, its gradient and its row statistics are those of all `groups` query heads of a key head."""
    # Where heads have their own lists they have their own orders too: any one will do.
    column = lists.order[0, pl.program_id(0)]
    keys = pl.ds(column * sizes[1], sizes[1])
    k, v = key[keys, :], value[keys, :]

    def one_head(head: Any, carry: Any) -> Any:
        own = head if own_lists else 0
        tile = _Tile(static, sizes, bank, extras, head)
        of_head = _OfHead(lists, own)

        def body(carry: Any, row: Any, test: Any) -> Any:
            d_k, d_v = carry
            queries = pl.ds(row * tile.q_block, tile.q_block)
            q, do = query[queries, head, :], d_out[queries, head, :]
            weights = jnp.exp2(tile.scores(q, k, row, column) - lse[head, queries][:, None])
            allowed = tile.allowed(row, column, test)
            if allowed is not None:
                weights = jnp.where(allowed, weights, 0.0)
            d_v += tile.dot(weights.astype(do.dtype), do, trans_a=True)
            d_scores = weights * (tile.dot(do, v, trans_b=True) - delta[head, queries][:, None])
            return d_k + tile.dot(d_scores.astype(q.dtype), q, trans_a=True), d_v

        return _walk(of_head, column, body, carry, bank is not None)

    carry = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    carry = one_head(0, carry) if groups == 1 else jax.lax.fori_loop(0, groups, one_head, carry)
    d_key[keys, :] = (carry[0] * static.scale).astype(d_key.dtype)
    d_value[keys, :] = carry[1].astype(d_value.dtype)


class _OfHead:
    """One head's lists, of references to the lists of several."""

    def __init__(self, lists: Any, head: Any) -> None:
        for field in dataclasses.fields(Lists):
            setattr(self, field.name, _Row(getattr(lists, field.name), head))


class _Row:
    def __init__(self, ref: Any, head: Any) -> None:
        self.ref, self.head = ref, head

    def __getitem__(self, index: Any) -> Any:
        return self.ref[self.head, index]
