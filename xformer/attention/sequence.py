"""Attention over a sequence that is cut along the mesh axis `sequence` (context parallelism).

The devices share out the query tiles of one and the same layout, consecutive ones each, so the result, dropout
included, is that of one device. Every device computes its own queries and needs keys and values of others:

- Where the layout reaches only so many tiles to each side (windows), neighbours send each other just these.
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

from xformer.attention import block_sparse
from xformer.attention.call import Controls, Inputs, Settings
from xformer.attention.layout import Group, Layout, ceil_div, round_up

Array = jax.Array
AXIS = "sequence"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["layout"],
    meta_fields=["num_shards", "num_rows", "halo"],
)
@dataclasses.dataclass(frozen=True)
class Shares:
    """A layout shared out to the devices of the axis.

    Attributes:
      layout: every array has a leading axis `[num_shards]`. Rows count from the device's first; those of a device that
        has fewer than others in a group are numbered `num_rows` and attend to nothing.
      num_rows: query tiles of a device.
      halo: key tiles that a device needs before and after its own, as many as its query tiles; None: it needs all.
    """

    layout: Layout
    num_shards: int
    num_rows: int
    halo: tuple[int, int] | None


def num_shards() -> int:
    """Devices along the axis `sequence` of the mesh in scope (`jax.set_mesh`); 1 where there is no such axis.

    1 too where the caller handles the axis itself (`shard_map`).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AXIS not in mesh.axis_names or mesh.axis_types[mesh.axis_names.index(AXIS)] != AxisType.Auto:
        return 1
    return mesh.shape[AXIS]


def share(layouts: Sequence[Layout], q_len: int, kv_len: int) -> list[Any]:
    """Each layout shared out to the devices of the axis; as it is where there is one. All must have the same shapes."""
    shards = num_shards()
    if shards == 1:
        return list(layouts)
    num_rows = ceil_div(ceil_div(q_len, layouts[0].q_block), shards)
    halo = _halo(layouts[0], shards, num_rows) if q_len == kv_len else None
    return [Shares(_share(layout, shards, num_rows), shards, num_rows, halo) for layout in layouts]


def _share(layout: Layout, shards: int, num_rows: int) -> Layout:
    groups = []
    for group in layout.groups:
        owner = group.rows // num_rows
        most = int(np.bincount(owner, minlength=shards).max())
        rows = np.full((shards, most), num_rows, np.int32)
        columns = np.zeros((shards, *group.columns.shape[:1], most, *group.columns.shape[2:]), np.int32)
        tests = np.ones_like(columns)
        for shard in range(shards):
            mine = np.flatnonzero(owner == shard)
            rows[shard, : len(mine)] = group.rows[mine] - shard * num_rows
            columns[shard, :, : len(mine)] = group.columns[:, mine]
            tests[shard, :, : len(mine)] = group.tests[:, mine]
        chunks = (0, 0) if (rows == num_rows).any() else (group.far_chunks, group.full_chunks)
        groups.append(Group(rows, columns, tests, *chunks))
    bank = np.broadcast_to(layout.bank, (shards, *layout.bank.shape))
    return dataclasses.replace(layout, groups=tuple(groups), bank=bank)


def _halo(layout: Layout, shards: int, num_rows: int) -> tuple[int, int] | None:
    """Key tiles needed on each side of a device's own, where that is less than all and does not depend on a draw."""
    if layout.q_block != layout.kv_block or any(len(group.columns) > 1 for group in layout.groups):
        return None  # heads that differ draw at random
    before = after = 0
    for group in layout.groups:
        first = (group.rows // num_rows * num_rows)[:, None, None]
        listed = group.tests[0] != 1
        before = max(before, int(np.where(listed, first - group.columns[0], 0).max()))
        after = max(after, int(np.where(listed, group.columns[0] - (first + num_rows - 1), 0).max()))
    return (before, after) if before + after < (shards - 1) * num_rows else None


def attend(inputs: Inputs, controls: Controls, settings: Settings) -> Array:
    """`block_sparse.attend`, for a layout that is shared out (`Shares`) and for one that is not."""
    shares = controls.layout
    if not isinstance(shares, Shares):
        return block_sparse.attend(inputs, controls, settings)
    q_len, kv_len = inputs.query.shape[1], inputs.key.shape[1]
    layout, shards = shares.layout, shares.num_shards
    q_total = shards * shares.num_rows * layout.q_block
    kv_total = round_up(kv_len, shards) if shares.halo is None else q_total
    q_pad, pairs_pad = q_total - q_len, round_up(kv_len, layout.kv_block) - kv_len
    inputs = inputs._replace(
        query=block_sparse.pad(inputs.query, 1, q_pad),
        key=block_sparse.pad(inputs.key, 1, kv_total - kv_len),
        value=block_sparse.pad(inputs.value, 1, kv_total - kv_len),
        bias=_exact(block_sparse.pad_pairs(inputs.bias, q_pad, pairs_pad)),
        relative=jax.tree.map(_exact, inputs.relative),
    )
    controls = controls._replace(
        layout=None,
        mask=block_sparse.pad_pairs(controls.mask, q_pad, pairs_pad),
        q_segments=block_sparse.pad(controls.q_segments, 3, q_pad),
        kv_segments=block_sparse.pad(controls.kv_segments, 4, pairs_pad),
        offset=jnp.asarray(controls.offset, jnp.int32),
        first_row=jnp.int32(0),
        first_column=jnp.int32(0),
        first_example=jnp.int32(0),
    )
    return _attend(inputs, controls, shares, settings, kv_len)[:, :q_len]


def _exact(x: Any) -> Any:
    """Floats in float32 at least: gradients of what all devices hold are summed over them (XLA's CPU can't in bf16)."""
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# Jitted for calls outside jit, where shard_map can't leave axes to the compiler.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _attend(inputs: Inputs, controls: Controls, shares: Shares, settings: Settings, kv_len: int) -> Array:
    """Arrays of whole shares; keys and values have `kv_len` tokens without padding."""
    along: Any = P(None, AXIS)
    pairs_along: Any = P(None, None, None, AXIS)
    whole: Any = P()
    by_query = lambda x: pairs_along if x is not None and x.shape[3] > 1 else whole
    run = jax.shard_map(
        functools.partial(_local, settings=settings, kv_len=kv_len),
        in_specs=(
            Inputs(along, along, along, by_query(inputs.bias), whole),
            Controls(
                None, by_query(controls.mask), by_query(controls.q_segments), whole, whole, whole, whole, whole, whole
            ),
            P(AXIS),
        ),
        out_specs=along,
        axis_names={AXIS},
        check_vma=False,
    )
    return run(inputs, controls, shares)


def _local(inputs: Inputs, controls: Controls, shares: Shares, *, settings: Settings, kv_len: int) -> Array:
    """One device's queries."""
    layout = jax.tree.map(lambda x: x[0], shares.layout)
    kv_total = round_up(kv_len, layout.kv_block)
    first_row = jax.lax.axis_index(AXIS) * shares.num_rows
    first_column: Array | int = 0
    if shares.halo is None:
        fetch = functools.partial(_gather, length=kv_total)
    else:
        fetch = functools.partial(_fetch, block=layout.kv_block, halo=shares.halo, shards=shares.num_shards)
        first_column = first_row - shares.halo[0]
    inputs = inputs._replace(key=fetch(inputs.key), value=fetch(inputs.value))
    controls = controls._replace(layout=layout, first_row=first_row, first_column=first_column)
    return block_sparse.attend_tiles((settings, kv_len if kv_total > kv_len else None), inputs, controls)


def _gather(x: Array, length: int) -> Array:
    """All keys or values `[b, length, k, depth]` from a device's own, cut or padded to whole blocks."""
    x = _all_gather(x)[:, :length]
    return block_sparse.pad(x, 1, length - x.shape[1])


@jax.custom_vjp
def _all_gather(x: Array) -> Array:
    """Gathered in its own dtype; the gradient is summed over devices as `_exact` has it."""
    return jax.lax.all_gather(x, AXIS, axis=1, tiled=True)


def _scatter(_: None, d_out: Array) -> tuple[Array]:
    return (jax.lax.psum_scatter(_exact(d_out), AXIS, scatter_dimension=1, tiled=True).astype(d_out.dtype),)


_all_gather.defvjp(lambda x: (_all_gather(x), None), _scatter)


def _fetch(x: Array, block: int, halo: tuple[int, int], shards: int) -> Array:
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
