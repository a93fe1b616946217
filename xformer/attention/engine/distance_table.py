"""A table of distances beside a query tile: products with its entries, and sums over pairs weighted by them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from xformer.attention.engine.query_tile import Chunk, QueryTiles
from xformer.attention.engine.relative_tiles import Sums, ends_of, sum_to

Array = jax.Array


class DistanceTable:
    """A key or value table of `Tables`, and vectors `x` by query, `[n, m, head_dim]`.

    Keys: `x` are queries, scores get `pairs`, and the scores' gradients are summed. Values: the weights are summed, and
    in the backward pass `x` are the output's gradients, of whose `pairs` the weights' gradients are made.

    What is summed by distance (`add`) meets the table once a query tile, in `apply` and `table_gradient`. Near tiles
    where products are taken by tile can't wait for that: `apply_tile` and `tile_gradient`.
    """

    def __init__(self, tiles: QueryTiles, table: Array, x: Array) -> None:
        self.tiles, self.relative, self.table, self.x = tiles, tiles.relative, table, tiles.full(x)
        self.whole_table = self.relative.whole_table
        ends = ends_of(table, axis=2)
        self.met_once = [ends, table] if self.whole_table else [ends]  # the tables that meet sums

    def products(self) -> list[Array]:
        """Those of `x` with the tables, `[b, k, g, q_block, 2 or distances]`, for `pairs`."""
        return [self._einsum("bkgqd,kgnd->bkgqn", self.x, table) for table in self.met_once]

    def _einsum(self, equation: str, x: Array, table: Array) -> Array:
        """Of an array by query and a table; where heads share the table one plain product."""
        if table.shape[:2] != (1, 1):
            return self.tiles.einsum(equation, x, table)
        _, table_axes = equation.split("->")[0].split(",")
        return self.tiles.einsum(equation.replace(table_axes, table_axes[2:]), x, table[0, 0])

    def pairs(self, products: list[Array], chunk: Chunk) -> Array:
        """Products of `x` with the entry of each pair."""
        starts = self.tiles.starts(chunk)
        if chunk.distant or self.whole_table:
            ends, by_distance = (*products, None)[:2]
            return self.relative.expand(ends, by_distance, starts, chunk.distant)
        near = self.relative.near(self.table, starts)
        return self.relative.gather(self.tiles.einsum("kgcwd,bkgqd->bkgcqw", near, self.x))

    # Sums over pairs.

    def zeros(self) -> Sums:
        """Nothing summed."""
        zeros = lambda size: jnp.zeros((*self.x.shape[:-1], size), self.x.dtype)
        return Sums(zeros(2), zeros(self.relative.size) if self.whole_table else None)

    def add(self, sums: Sums, pairs: Array, chunk: Chunk) -> Sums:
        """Adds a chunk's pairs `[n, m, keys]`, but for near tiles by tile."""
        if not chunk.distant and not self.whole_table:
            return sums
        return sums.add(self.relative.collapse(self.tiles.full(pairs), self.tiles.starts(chunk), chunk.distant))

    def apply(self, sums: Sums) -> Array:
        """The sum over pairs of their entries of the table, `[n, m, head_dim]`."""
        pairs = zip(jax.tree.leaves(sums), self.met_once, strict=True)
        parts = [self._einsum("bkgqn,kgnd->bkgqd", part, table) for part, table in pairs]
        return self.tiles.flat(functools.reduce(jnp.add, parts))

    def table_gradient(self, total: Array, sums: Sums) -> Array:
        """Adds the sum over pairs of `x` to the table's gradient, where their entry is."""
        for end in (0, -1):
            part = (self.x * sums.ends[..., end, None]).sum((0, 3))
            total = total.at[:, :, end].add(sum_to(part, (*total.shape[:2], *part.shape[2:])))
        if sums.by_distance is None:
            return total
        shared = total.shape[:2] == (1, 1)
        # The small operand is the one that is transposed, behind a barrier: see `backward`.
        x = jax.lax.optimization_barrier(jnp.moveaxis(self.x, -1, 0 if shared else -2))
        equation = "dbkgq,bkgqn->dn" if shared else "bkgdq,bkgqn->kgdn"
        part = jnp.swapaxes(self.tiles.einsum(equation, x, sums.by_distance), -1, -2)
        return total + part.reshape(total.shape)

    def apply_tile(self, pairs: Array, chunk: Chunk) -> Array | float:
        """`apply` of what `add` leaves out of a chunk."""
        if self.whole_table or chunk.distant:
            return 0.0
        spread, near = self._by_tile(pairs, chunk)
        return self.tiles.flat(self.tiles.einsum("kgcwd,bkgcqw->bkgqd", near, spread))

    def tile_gradient(self, total: Array, pairs: Array, chunk: Chunk) -> Array:
        """`table_gradient` of what `add` leaves out of a chunk."""
        if self.whole_table or chunk.distant:
            return total
        spread, _ = self._by_tile(pairs, chunk)
        part = self.tiles.einsum("bkgqd,bkgcqw->kgdcw", self.x, spread)
        return self.relative.add_near(total, self.tiles.starts(chunk), jnp.moveaxis(part, 2, 4))

    def _by_tile(self, pairs: Array, chunk: Chunk) -> tuple[Array, Array]:
        return self.relative.spread(self.tiles.full(pairs)), self.relative.near(self.table, self.tiles.starts(chunk))
