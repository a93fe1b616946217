"""Attention of every query to blocks of keys that it chose, block after block instead of query after query.

The choices of all queries, sorted by the block that was chosen, are queries of their own: those of a block stand side
by side, and a tile of them attends to that block alone. So a block is read once for many queries, where a list of tiles
of each query (`ListedTiles`) gathers it for every one of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.chosen_pairs import list_flops, list_plan
from xformer.attention.engine import listed_tiles
from xformer.attention.engine.listed_tiles import ListedTiles
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.query_tile import merge_heads
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.merge_parts import merge_shares
from xformer.attention.row_products import row_products
from xformer.attention.shape import Shape
from xformer.attention.token_rows import at_tiles, gather_rows, num_places, sorted_by, sum_rows, take_rows

Array = jax.Array
MAX_QUERIES = 64  # of a tile


@dataclasses.dataclass(frozen=True)
class Sorting:
    """How many places the choices of a call take, sorted by block.

    A place holds one choice of one query. The choices of a block begin at a tile of `q_block` places; those that are
    not valid come last.

    Attributes:
      q_len: queries.
      count: blocks that each chooses.
      num_blocks: blocks to choose from.
      kv_block: tokens of a block.
    """

    q_len: int
    count: int
    num_blocks: int
    kv_block: int

    @property
    def q_block(self) -> int:
        """Places of a tile: so many that what is filled up is a sixth of the choices at most, 8 to `MAX_QUERIES`."""
        return min(max(self.q_len * self.count // (6 * self.num_blocks) // 8 * 8, 8), MAX_QUERIES)

    @property
    def num_places(self) -> int:
        return num_places(self.q_len * self.count, self.num_blocks + 1, self.q_block)

    def flops(self, shape: Shape, relative: Any) -> int:
        """FLOPs of `attend_chosen`, of one example and head."""
        key_tiles = np.zeros((self.num_places // self.q_block, 1), np.int32)  # which they are is of no consequence
        return list_flops(list_plan(key_tiles, self.q_block, self.kv_block), self.num_places, shape, relative)

    def tiles(self, order: Array, bucket: Array) -> ListedTiles:
        """The block of each tile; `order [batch, heads, places]` and `bucket [batch, heads, choices]` as sorted."""
        first = jnp.take_along_axis(bucket, order[:, :, :: self.q_block], -1, mode="fill", fill_value=self.num_blocks)
        return ListedTiles(first[..., None], first[..., None] < self.num_blocks, self.q_block, self.kv_block)


def attend_chosen(chosen: ListedTiles, inputs: Inputs, controls: Controls, settings: Settings) -> tuple[Array, Array]:
    """Attends to the chosen blocks, all keys of them that no mask hides.

    Args:
      chosen: the blocks of each query, `[batch, num_heads, q_len, count]`, `q_block` being 1.
      inputs: a bias is the same for all queries; sinks are left out.
      controls: with `offset` for the position of the first query.

    Returns:
      Output `[batch, q_len, num_heads, value depth]` and log-sum-exp `[batch, q_len, num_heads]`.
    """
    heads, q_len, count = chosen.key_tiles.shape[1:]
    sorting = Sorting(q_len, count, ceil_div(inputs.key.shape[1], chosen.kv_block), chosen.kv_block)
    # Choice c of query q is number q * count + c: those of a block stand in the order of queries.
    bucket = jnp.where(chosen.valid, chosen.key_tiles, sorting.num_blocks).astype(jnp.int32)
    bucket = bucket.reshape(-1, heads, 1, q_len * count)
    order, places = at_tiles(
        *sorted_by(bucket, sorting.num_blocks + 1), bucket, sorting.num_blocks + 1, sorting.q_block
    )
    bucket, order, places = (x[:, :, 0] for x in (bucket, order, places))
    tokens, head = order // count, jnp.arange(heads, dtype=jnp.int32)[:, None]  # no token: `q_len`
    # Rows of arrays `[length, heads, ...]`, the length before the heads as the engine has it.
    of_places = jnp.swapaxes(tokens * heads + head, 1, 2)  # [batch, places, heads]
    of_tokens = jnp.moveaxis((places * heads + head).reshape(-1, heads, q_len, count), 1, 2)
    of_choices = jnp.swapaxes((tokens * heads + head) * count + order % count, 1, 2)
    split = inputs.query.shape[2:4]
    query = take_rows(merge_heads(inputs.query), of_places, of_tokens)
    inputs = inputs._replace(query=query.reshape(*query.shape[:2], *split, -1), sinks=None)
    controls = _of_places(controls, inputs, jnp.minimum(tokens, q_len - 1), split)
    settings = dataclasses.replace(settings, delta_given=True)
    out, lse = listed_tiles.attend(inputs, controls, settings, sorting.tiles(order, bucket))
    return _merged(merge_heads(out), merge_heads(lse), of_tokens, of_choices, of_places)


@jax.custom_vjp
def _merged(out: Array, lse: Array, of_tokens: Array, of_choices: Array, of_places: Array) -> tuple[Array, Array]:
    """The output and log-sum-exp of queries, from those of places `[batch, places, heads, ...]`.

    The gradients are those that `Settings.delta_given` asks for, not those of this function alone: a choice's delta is
    that of its query times the share that the choice has. So no output of a place is kept for the backward pass.
    """
    return _merge(out, lse, of_tokens, of_choices, of_places)[0]


def _merge(out: Array, lse: Array, of_tokens: Array, of_choices: Array, of_places: Array) -> tuple[Any, Any]:
    by_token = gather_rows(lse[..., None], of_tokens)[..., 0]
    shares, lse = merge_shares([by_token[..., choice] for choice in range(by_token.shape[-1])])
    by_place = gather_rows(jnp.stack(shares, -1)[..., None], of_choices)
    # Weighted place by place: no array has the outputs of all choices once more.
    out = sum_rows(by_place * out, of_tokens, of_places)
    return (out, lse), (by_place, out, of_tokens, of_places)


def _merge_backward(saved: Any, gradient: tuple[Array, Array]) -> tuple[Array, Array, None, None, None]:
    shares, out, of_tokens, of_places = saved
    d_out, d_lse = gradient
    delta = row_products(d_out, out) - d_lse
    d_out, delta = (take_rows(x, of_places, of_tokens) for x in (d_out, delta[..., None]))
    return shares * d_out, -(shares * delta)[..., 0], None, None, None


_merged.defvjp(_merge, _merge_backward)


def _of_places(controls: Controls, inputs: Inputs, tokens: Array, split: tuple[int, ...]) -> Controls:
    """The controls of queries `tokens [batch, heads, places]`, which stand elsewhere in every head."""
    by_head: Any = lambda x: x.reshape(-1, *split, *x.shape[2:])
    if inputs.relative is not None:
        kv_positions = jnp.arange(inputs.key.shape[1], dtype=jnp.int32)[None, None, None, None]
        controls = controls._replace(
            q_positions=by_head(controls.offset + tokens)[..., None], kv_positions=kv_positions, offset=0
        )
    if controls.q_paths is not None:
        paths = controls.q_paths[:, 0, 0]
        paths = jnp.broadcast_to(paths, (tokens.shape[0], *paths.shape[1:]))
        pick = jax.vmap(lambda paths, tokens: jnp.take(paths, tokens, axis=0, mode="clip"))
        controls = controls._replace(q_paths=by_head(pick(paths, tokens)))
    return controls
