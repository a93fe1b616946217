"""Operations on one tile of the score matrix: picking key blocks, masks, dropout.

Arrays carry two head axes, `kv_heads` and `groups` (query heads per key head); either is 1 where heads share a value.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from xformer.attention.bernoulli import bernoulli

Array = jax.Array


def take_keys(blocks: Array, key_tiles: Array) -> Array:
    """Picks blocks of keys or values.

    Args:
      blocks: `[batch, num_blocks, kv_block, kv_heads, depth]`.
      key_tiles: int `[kv_heads, groups, chunk]`, or `[1, 1, chunk]` where all heads pick the same.

    Returns:
      `[batch, kv_heads, groups, chunk, kv_block, depth]`, or `[batch, kv_heads, chunk * kv_block, depth]` where all
      heads pick the same.
    """
    if key_tiles.shape[:2] != (1, 1):
        # blocks of one kv head are `[batch, num_blocks, kv_block, depth]`
        pick = lambda head, key_tiles: jnp.take(head, key_tiles, axis=1, mode="clip")
        pick = jax.vmap(pick, in_axes=(None, 0), out_axes=1)
        return jax.vmap(pick, in_axes=(3, 0), out_axes=1)(blocks, key_tiles)
    if key_tiles.shape[2] == 1:
        picked = jax.lax.dynamic_index_in_dim(blocks, key_tiles[0, 0, 0], 1, keepdims=False)
    else:
        picked = jnp.take(blocks, key_tiles[0, 0], axis=1, mode="clip")
        picked = picked.reshape(picked.shape[0], -1, *picked.shape[3:])
    return jnp.moveaxis(picked, 2, 1)


def add_keys(total: Array, key_tiles: Array, update: Array) -> Array:
    """Adds to gradients of keys or values where `take_keys` would pick.

    Args:
      total: `[batch, num_blocks, kv_heads, depth, kv_block]`.
      key_tiles: as for `take_keys`.
      update: `[batch, kv_heads, groups or 1, depth, chunk, kv_block]`.
    """
    kv_heads, groups, chunk = key_tiles.shape
    if (kv_heads, groups) == (1, 1):
        if chunk > 1:  # a scatter stays in place; of several dynamic-update-slices XLA makes copies of the whole
            update = jnp.moveaxis(update[:, :, 0], 3, 1)
            return total.at[:, key_tiles[0, 0]].add(update, mode="promise_in_bounds")
        key_tile = key_tiles[0, 0, 0]
        old = jax.lax.dynamic_index_in_dim(total, key_tile, 1, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, old + update[:, :, 0, :, 0], key_tile, 1)
    heads = jnp.arange(kv_heads)[:, None, None]
    return total.at[:, key_tiles, heads].add(jnp.moveaxis(update, 4, 3), mode="promise_in_bounds")


def take_blocks(blocks: Array, key_tiles: Array) -> Array:
    """Picks key blocks.

    Args:
      blocks: `[batch, kv_heads or 1, groups or 1, num_blocks, ...]`.
      key_tiles: int `[kv_heads, groups, chunk]`, or `[1, 1, chunk]` where all heads pick the same.

    Returns:
      `[batch, kv_heads or 1, groups or 1, chunk, ...]`, with the head axes of both.
    """
    if key_tiles.shape[:2] == (1, 1):
        if key_tiles.shape[2] == 1:
            return jax.lax.dynamic_index_in_dim(blocks, key_tiles[0, 0, 0], 3, keepdims=True)
        return jnp.take(blocks, key_tiles[0, 0], axis=3, mode="clip")
    x = jnp.squeeze(blocks, tuple(axis for axis in (1, 2) if blocks.shape[axis] == 1))
    pick = lambda x, key_tiles: jnp.take(x, key_tiles, axis=1, mode="clip")
    for axis in (2, 1):  # the inner map is over groups, the outer over kv_heads
        pick = jax.vmap(pick, in_axes=(1 if blocks.shape[axis] > 1 else None, 0), out_axes=1)
    return pick(x, key_tiles)


def add_blocks(total: Array, key_tiles: Array, update: Array) -> Array:
    """Adds `update` where `take_blocks` would pick; sums over head axes that `total` does not have."""
    kv_heads, groups, chunk = key_tiles.shape
    if (kv_heads, groups) == (1, 1):
        shared = tuple(axis for axis in (1, 2) if total.shape[axis] == 1 and update.shape[axis] > 1)
        update = update.sum(shared, keepdims=True) if shared else update
        for place in range(chunk):  # one dynamic-update-slice each, in place inside a loop
            key_tile = key_tiles[0, 0, place]
            old = jax.lax.dynamic_index_in_dim(total, key_tile, 3, keepdims=True)
            new = old + jax.lax.slice_in_dim(update, place, place + 1, axis=3)
            total = jax.lax.dynamic_update_slice_in_dim(total, new, key_tile, 3)
        return total
    rest = update.shape[4:]
    update = jnp.broadcast_to(update, (update.shape[0], kv_heads, groups, chunk, *rest))
    if total.shape[2] == 1 and groups > 1:
        update, key_tiles = update.reshape(-1, kv_heads, 1, groups * chunk, *rest), key_tiles.reshape(kv_heads, 1, -1)
    if total.shape[1] == 1 and kv_heads > 1:
        update = jnp.moveaxis(update, 1, 2).reshape(update.shape[0], 1, key_tiles.shape[1], -1, *rest)
        key_tiles = jnp.moveaxis(key_tiles, 0, 1).reshape(1, key_tiles.shape[1], -1)
    heads, group, _ = jnp.ix_(*(jnp.arange(size) for size in key_tiles.shape))
    return total.at[:, heads, group, key_tiles].add(update, mode="promise_in_bounds")


def take_pairs(pairs: Array, query_tile: Array, key_tiles: Array, q_block: int, kv_block: int) -> Array:
    """A mask or bias `[batch, kv_heads, groups, q_len or 1, kv_len or 1]` at a query tile and its key tiles."""
    if pairs.shape[3] > 1:
        pairs = jax.lax.dynamic_slice_in_dim(pairs, query_tile * q_block, q_block, 3)
    return pairs if pairs.shape[4] == 1 else take_rows(pairs, key_tiles, kv_block)


def take_rows(rows: Array, key_tiles: Array, kv_block: int) -> Array:
    """Rows over the keys `[batch, kv_heads or 1, groups or 1, rows, kv_len]` at some key tiles."""
    blocks = jnp.moveaxis(rows.reshape(*rows.shape[:4], -1, kv_block), 4, 3)
    return merge_pairs(take_blocks(blocks, key_tiles))


def add_pairs(total: Array, query_tile: Array, key_tiles: Array, update: Array, q_block: int, kv_block: int) -> Array:
    """Adds a tile's values where `take_pairs` would take them; sums over axes that `total` does not have."""
    keep = [axis for axis in (0, 3, 4) if total.shape[axis] == 1 and update.shape[axis] > 1]
    if total.shape[4] == 1:  # no key axis to scatter over, so heads can be summed at once too
        keep += [axis for axis in (1, 2) if total.shape[axis] == 1 and update.shape[axis] > 1]
    update = update.sum(tuple(keep), keepdims=True) if keep else update
    whole = total
    if whole.shape[3] > 1:
        total = jax.lax.dynamic_slice_in_dim(whole, query_tile * q_block, q_block, 3)
    if total.shape[4] == 1:
        total = total + update
    else:
        blocks = jnp.moveaxis(total.reshape(*total.shape[:4], -1, kv_block), 4, 3)
        update = jnp.moveaxis(update.reshape(*update.shape[:4], -1, kv_block), 4, 3)
        blocks = add_blocks(blocks, key_tiles, update)
        total = jnp.moveaxis(blocks, 3, 4).reshape(total.shape)
    if whole.shape[3] > 1:
        total = jax.lax.dynamic_update_slice_in_dim(whole, total, query_tile * q_block, 3)
    return total


def merge_pairs(blocks: Array) -> Array:
    """`[..., chunk, rows, kv_block]` -> `[..., rows, chunk * kv_block]`."""
    merged = jnp.moveaxis(blocks, -3, -2)
    return merged.reshape(*merged.shape[:-2], -1)


@functools.partial(jax.jit, static_argnames=("rate", "shape"))
def keep_mask(
    rng: Array, examples: Array, queries: Array, chunk: Array, *, rate: float, shape: tuple[int, ...]
) -> Array:
    """The dropout mask of a tile, bool `[examples, kv_heads, groups, queries, keys]`; `shape` is without the first and
    the queries.

    A function of the key, the example, the query and the chunk of keys: backward draws it again, whatever share of the
    batch and of the queries it is given.
    """
    chunk_rng = jax.random.fold_in(rng, chunk)

    def draw(example: Array, query: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(chunk_rng, example), query)
        return bernoulli(own, 1.0 - rate, shape)

    return jax.vmap(jax.vmap(draw, (None, 0), 2), (0, None))(examples, queries)
