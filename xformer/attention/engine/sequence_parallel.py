"""Attention over a sequence that is cut along the mesh axis `sequence` (context parallelism).

The devices share out the query tiles of one and the same plan, consecutive ones each, so the result, dropout
included, is that of one device. Every device computes its own queries and needs keys and values of others:

- Where the plan reaches only so many tiles to each side (windows), neighbours send each other just these.
- Else all are gathered. That goes for random blocks too: nothing that is traced may depend on the draw, so an exchange
  of single blocks would have to be sized for the worst draw, in which one device needs all blocks of another. And
  whoever computes a row of global blocks needs every key anyway.

Sequences so short that they have fewer query tiles than there are devices leave devices idle. Only the axis `sequence`
is handled here; batch and heads stay with the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xformer.attention.dtypes import exact
from xformer.attention.engine.attend import attend as attend_plan
from xformer.attention.engine.attend import attend_tiles, for_device, pad, pad_pairs
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.tile_plan import TileGroup, TilePlan, ceil_div, round_up

Array = jax.Array
AXIS = "sequence"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["plan"],
    meta_fields=["num_shards", "num_query_tiles", "halo"],
)
@dataclasses.dataclass(frozen=True)
class ShardedPlan:
    """A plan shared out to the devices of the axis.

    Attributes:
      plan: every array has a leading axis `[num_shards]`. Rows count from the device's first; those of a device that
        has fewer than others in a group are numbered `num_query_tiles` and attend to nothing.
      num_query_tiles: query tiles of a device.
      halo: key tiles that a device needs before and after its own, as many as its query tiles; None: it needs all.
    """

    plan: TilePlan
    num_shards: int
    num_query_tiles: int
    halo: tuple[int, int] | None


def num_shards() -> int:
    """Devices along the axis `sequence` of the mesh in scope (`jax.set_mesh`); 1 where there is no such axis.

    1 too where the caller handles the axis itself (`shard_map`).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AXIS not in mesh.axis_names or mesh.axis_types[mesh.axis_names.index(AXIS)] != AxisType.Auto:
        return 1
    return mesh.shape[AXIS]


def share(plans: Sequence[TilePlan], q_len: int, kv_len: int) -> list[Any]:
    """Each plan shared out to the devices of the axis; as it is where there is one. All must have the same shapes."""
    shards = num_shards()
    if shards == 1:
        return list(plans)
    num_query_tiles = ceil_div(ceil_div(q_len, plans[0].q_block), shards)
    halo = _halo(plans[0], shards, num_query_tiles) if q_len == kv_len else None
    return [ShardedPlan(_share(plan, shards, num_query_tiles), shards, num_query_tiles, halo) for plan in plans]


def _share(plan: TilePlan, shards: int, num_query_tiles: int) -> TilePlan:
    groups = []
    for group in plan.groups:
        owner = group.query_tiles // num_query_tiles
        most = int(np.bincount(owner, minlength=shards).max())
        query_tiles = np.full((shards, most), num_query_tiles, np.int32)
        key_tiles = np.zeros((shards, *group.key_tiles.shape[:1], most, *group.key_tiles.shape[2:]), np.int32)
        mask_ids = np.ones_like(key_tiles)
        for shard in range(shards):
            mine = np.flatnonzero(owner == shard)
            query_tiles[shard, : len(mine)] = group.query_tiles[mine] - shard * num_query_tiles
            key_tiles[shard, :, : len(mine)] = group.key_tiles[:, mine]
            mask_ids[shard, :, : len(mine)] = group.mask_ids[:, mine]
        chunks = (0, 0) if (query_tiles == num_query_tiles).any() else (group.distant_chunks, group.unmasked_chunks)
        groups.append(TileGroup(query_tiles, key_tiles, mask_ids, *chunks))
    pair_masks = np.broadcast_to(plan.pair_masks, (shards, *plan.pair_masks.shape))
    return dataclasses.replace(plan, groups=tuple(groups), pair_masks=pair_masks)


def _halo(plan: TilePlan, shards: int, num_query_tiles: int) -> tuple[int, int] | None:
    """Key tiles needed on each side of a device's own, where that is less than all and does not depend on a draw."""
    if plan.q_block != plan.kv_block or any(len(group.key_tiles) > 1 for group in plan.groups):
        return None  # heads that differ draw at random
    before = after = 0
    for group in plan.groups:
        first = (group.query_tiles // num_query_tiles * num_query_tiles)[:, None, None]
        listed = group.mask_ids[0] != 1
        before = max(before, int(np.where(listed, first - group.key_tiles[0], 0).max()))
        after = max(after, int(np.where(listed, group.key_tiles[0] - (first + num_query_tiles - 1), 0).max()))
    return (before, after) if before + after < (shards - 1) * num_query_tiles else None


def attend(inputs: Inputs, controls: Controls, settings: Settings) -> tuple[Array, Array]:
    """`engine.attend.attend`, for a plan that is shared out (`ShardedPlan`) and for one that is not."""
    shares = controls.plan
    if not isinstance(shares, ShardedPlan):
        return attend_plan(inputs, controls, settings)
    q_len, kv_len = inputs.query.shape[1], inputs.key.shape[1]
    plan, shards = shares.plan, shares.num_shards
    q_total = shards * shares.num_query_tiles * plan.q_block
    kv_total = round_up(kv_len, shards) if shares.halo is None else q_total
    q_pad, pairs_pad = q_total - q_len, round_up(kv_len, plan.kv_block) - kv_len
    # Gradients of what all devices hold are summed over them: in float32, since XLA's CPU can't in bfloat16.
    inputs = inputs._replace(
        query=pad(inputs.query, 1, q_pad),
        key=pad(inputs.key, 1, kv_total - kv_len),
        value=pad(inputs.value, 1, kv_total - kv_len),
        bias=exact(pad_pairs(inputs.bias, q_pad, pairs_pad)),
        relative=jax.tree.map(exact, inputs.relative),
        sinks=exact(inputs.sinks),
    )
    controls = controls._replace(
        plan=None,
        mask=pad_pairs(controls.mask, q_pad, pairs_pad),
        q_segments=pad(controls.q_segments, 3, q_pad),
        kv_segments=pad(controls.kv_segments, 4, pairs_pad),
        q_positions=pad(controls.q_positions, 3, q_pad),
        kv_positions=pad(controls.kv_positions, 4, pairs_pad),
        q_paths=pad(controls.q_paths, 3, q_pad),
        kv_paths=pad(controls.kv_paths, 4, pairs_pad),
        distances=pad_pairs(controls.distances, q_pad, pairs_pad),
        offset=jnp.asarray(controls.offset, jnp.int32),
        first_query_tile=jnp.int32(0),
        first_key_tile=jnp.int32(0),
        first_example=jnp.int32(0),
    )
    out, lse = _attend(inputs, controls, shares, for_device(settings), kv_len)
    return out[:, :q_len], lse[:, :q_len]


# Jitted for calls outside jit, where shard_map can't leave axes to the compiler.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _attend(
    inputs: Inputs, controls: Controls, shares: ShardedPlan, settings: Settings, kv_len: int
) -> tuple[Array, Array]:
    """Arrays of whole shares; keys and values have `kv_len` tokens without padding."""
    along: Any = P(None, AXIS)
    pairs_along: Any = P(None, None, None, AXIS)
    whole: Any = P()
    by_query = lambda x: pairs_along if x is not None and x.shape[3] > 1 else whole
    cut = "mask", "q_segments", "q_positions", "q_paths", "distances"
    run = jax.shard_map(
        functools.partial(_local, settings=settings, kv_len=kv_len),
        in_specs=(
            Inputs(along, along, along, by_query(inputs.bias), whole, whole),
            Controls(*[whole] * len(Controls._fields))._replace(
                plan=None, **{name: by_query(getattr(controls, name)) for name in cut}
            ),
            P(AXIS),
        ),
        out_specs=(along, along),
        axis_names={AXIS},
        check_vma=False,
    )
    return run(inputs, controls, shares)


def _local(
    inputs: Inputs, controls: Controls, shares: ShardedPlan, *, settings: Settings, kv_len: int
) -> tuple[Array, Array]:
    """One device's queries."""
    plan = jax.tree.map(lambda x: x[0], shares.plan)
    kv_total = round_up(kv_len, plan.kv_block)
    first_query_tile = jax.lax.axis_index(AXIS) * shares.num_query_tiles
    first_key_tile: Array | int = 0
    if shares.halo is None:
        get = functools.partial(_gather, length=kv_total)
    else:
        get = functools.partial(fetch, block=plan.kv_block, halo=shares.halo, shards=shares.num_shards)
        first_key_tile = first_query_tile - shares.halo[0]
    inputs = inputs._replace(key=get(inputs.key), value=get(inputs.value))
    controls = controls._replace(plan=plan, first_query_tile=first_query_tile, first_key_tile=first_key_tile)
    return attend_tiles((settings, kv_len if kv_total > kv_len else None), inputs, controls)


def _gather(x: Array, length: int) -> Array:
    """All keys or values `[b, length, k, depth]` from a device's own, cut or padded to whole blocks."""
    x = _all_gather(x)[:, :length]
    return pad(x, 1, length - x.shape[1])


@jax.custom_vjp
def _all_gather(x: Array) -> Array:
    """Gathered in its own dtype; the gradient is summed over devices in float32."""
    return jax.lax.all_gather(x, AXIS, axis=1, tiled=True)


def _scatter(_: None, d_out: Array) -> tuple[Array]:
    return (jax.lax.psum_scatter(exact(d_out), AXIS, scatter_dimension=1, tiled=True).astype(d_out.dtype),)


_all_gather.defvjp(lambda x: (_all_gather(x), None), _scatter)


def fetch(x: Array, block: int, halo: tuple[int, int], shards: int) -> Array:
    """A device's own keys or values with `halo` blocks of the devices before and after; zeros beyond the ends."""
    length = x.shape[1]
    parts = [x]
    for direction, blocks in zip((1, -1), halo, strict=True):
        left, hop = blocks * block, 1
        while left:
            size = min(left, length)
            sent = x[:, length - size :] if direction == 1 else x[:, :size]
            pairs = [(i, i + direction * hop) for i in range(shards) if 0 <= i + direction * hop < shards]
            got = jax.lax.ppermute(sent, AXIS, pairs)
            parts = [got, *parts] if direction == 1 else [*parts, got]
            left, hop = left - size, hop + 1
    return jnp.concatenate(parts, axis=1)
