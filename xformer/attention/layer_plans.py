"""Plans of several layers as data, so that one trace serves them all: made, checked, and read pair by pair."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine import sequence_parallel
from xformer.attention.engine.sequence_parallel import ShardedPlan
from xformer.attention.engine.tile_plan import TileGroup, TilePlan, ceil_div
from xformer.attention.shape import Shape

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class MadeFor:
    """What a plan was made for. Equal for all layers, as a program that serves them all must find it.

    Attributes:
      op: the op, with 0 in the fields that only choose what a plan lists (`PLAN_FIELDS`).
      q_len, kv_len, num_heads, num_shards: sizes; shards of the mesh axis "sequence".
      shapes: of one layer's arrays.
    """

    op: Any
    q_len: int
    kv_len: int
    num_heads: int
    num_shards: int
    shapes: tuple[tuple[int, ...], ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tiles"], meta_fields=["made_for"])
@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The tiles of one layer, or of all layers where every array has a leading axis `[num_layers]`."""

    tiles: TilePlan | ShardedPlan
    made_for: MadeFor


def stacked(op: Any, tiles: TilePlan, shape: Shape, num_layers: int) -> LayerPlan:
    """The plans of an op's layers, whose heads follow each other in `tiles`."""
    (shared_out,) = sequence_parallel.share([tiles], shape.q_len, shape.kv_len)
    sharded = isinstance(shared_out, ShardedPlan)
    heads_axis = 1 if sharded else 0
    of_all = lambda x: np.broadcast_to(x, (num_layers, *x.shape))

    def by_layer(x: np.ndarray) -> np.ndarray:
        heads = num_layers, x.shape[heads_axis] // num_layers
        return np.moveaxis(x.reshape(*x.shape[:heads_axis], *heads, *x.shape[heads_axis + 1 :]), heads_axis, 0)

    plan = shared_out.plan if sharded else shared_out
    groups = tuple(
        TileGroup(
            of_all(group.query_tiles), by_layer(group.key_tiles), by_layer(group.mask_ids),
            group.distant_chunks, group.unmasked_chunks,
        )
        for group in plan.groups
    )  # fmt: skip
    plan = dataclasses.replace(plan, groups=groups, pair_masks=of_all(plan.pair_masks))
    layers = dataclasses.replace(shared_out, plan=plan) if sharded else plan
    shapes = tuple(leaf.shape[1:] for leaf in jax.tree.leaves(layers))
    sizes = shape.q_len, shape.kv_len, shape.num_heads, sequence_parallel.num_shards()
    return LayerPlan(layers, MadeFor(_any_layer(op), *sizes, shapes))


def tiles_of(plan: Any, op: Any, q_len: int, kv_len: int, num_heads: int) -> TilePlan | ShardedPlan:
    """The tiles of a plan for a call of `op`. Raises ValueError unless it is one layer's, made for such a call."""
    name = type(op).__name__
    if not isinstance(plan, LayerPlan):
        raise ValueError(f"{name}: plan must be one layer's slice of what plans() gave, got {type(plan).__name__}")
    made = plan.made_for
    if made.op != _any_layer(op):
        raise ValueError(f"{name}: the plan was made for {made.op} and cannot serve {_any_layer(op)}")
    sizes = {"q_len": q_len, "kv_len": kv_len, "num_heads": num_heads, "num_shards": sequence_parallel.num_shards()}
    for size, called in sizes.items():
        if getattr(made, size) != called:
            raise ValueError(f"{name}: the plan was made for {size} {getattr(made, size)}, this call has {called}")
    shapes = tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(plan.tiles))
    if shapes != made.shapes:
        raise ValueError(
            f"{name}: plan must be one layer's slice, jax.tree.map(lambda x: x[i], plans), whose first array has shape "
            f"{made.shapes[0]}; got {shapes[0]}"
        )
    return plan.tiles


def _any_layer(op: Any) -> Any:
    return dataclasses.replace(op, implementation=None, **dict.fromkeys(op.PLAN_FIELDS, 0))


def pairs(tiles: TilePlan | ShardedPlan, q_len: int, kv_len: int) -> Array:
    """The pairs that a plan lists, bool `[heads or 1, q_len, kv_len]`: for dense computation."""
    groups: list[tuple[Any, Any, Any]]
    if isinstance(tiles, ShardedPlan):  # number the query tiles through, and let the shards' lists follow each other
        first = jnp.arange(tiles.num_shards)[:, None] * tiles.num_query_tiles
        in_line = lambda x: jnp.moveaxis(jnp.asarray(x), 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
        plan = tiles.plan
        groups = [
            ((group.query_tiles + first).reshape(-1), in_line(group.key_tiles), in_line(group.mask_ids))
            for group in plan.groups
        ]
        masks = jnp.asarray(plan.pair_masks)[0]
    else:
        plan = tiles
        groups = [(jnp.asarray(group.query_tiles), group.key_tiles, group.mask_ids) for group in plan.groups]
        masks = jnp.asarray(plan.pair_masks)
    q_block, kv_block = plan.q_block, plan.kv_block
    heads, num_query_tiles, num_key_tiles = groups[0][1].shape[0], ceil_div(q_len, q_block), ceil_div(kv_len, kv_block)
    found = jnp.zeros((heads, num_query_tiles, num_key_tiles, q_block, kv_block), jnp.uint8)
    for query_tiles, key_tiles, mask_ids in groups:
        flat = lambda x: jnp.asarray(x).reshape(*x.shape[:2], -1)
        at = jnp.arange(heads)[:, None, None], query_tiles[None, :, None], flat(key_tiles)
        # Places that only pad a list have a mask of no pairs: they change nothing.
        found = found.at[at].max(masks[flat(mask_ids)].astype(jnp.uint8), mode="drop")
    whole = jnp.moveaxis(found, 3, 2).reshape(heads, num_query_tiles * q_block, num_key_tiles * kv_block)
    return whole[:, :q_len, :kv_len] > 0
