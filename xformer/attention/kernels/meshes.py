"""Kernels under a mesh: `jax.shard_map` over the axes that cut batch, heads and, for windows, the length.

A compiler can cut up its own products, but not a kernel: it would gather the arrays and run all of it on each device.
So on a mesh in scope (`jax.set_mesh`, as a training step has it) each device runs the kernel on its own examples and
heads. The lists of tiles that heads have of their own are cut with the heads. Along `sequence` a device fetches the
keys around its own that a window reaches.

Axes whose number does not divide the examples or heads repeat the kernel. The numbers are those of one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xformer.attention.dtypes import exact
from xformer.attention.engine.attend import pad
from xformer.attention.engine.mesh_axes import axes_of
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.sequence_parallel import AXIS as SEQUENCE
from xformer.attention.engine.sequence_parallel import fetch
from xformer.attention.engine.tile_plan import round_up
from xformer.attention.pattern import Pattern, Window, split_causal

Array = jax.Array
BATCH, HEADS = ("data", "fsdp"), "tensor"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a call is cut along the mesh in scope.

    Attributes:
      axes: all axes that the body handles.
      batch: those that cut the examples, and those of one device.
      heads: those that cut the heads, none or one.
      repeats: how often key heads are repeated, so that there are enough to cut.
      halo: keys that a device needs before and after its own, where the length is cut; None where it is not.
      shards: parts that the length is cut into.
    """

    axes: frozenset[str]
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    repeats: int = 1
    halo: tuple[int, int] | None = None
    shards: int = 1


def refusals(inputs: Inputs, controls: Controls, pattern: Pattern, kernel: Any, num_devices: int) -> list[str]:
    """Why a kernel should not be taken unasked where the call is made; empty where it may be.

    Args:
      inputs, controls, pattern: the call.
      kernel: its module.
      num_devices: that JAX computes on.
    """
    sizes = _sizes()
    if not isinstance(inputs.query.shape[0], int):
        return ["the size of the batch is left open"]
    if axes_of(inputs, controls.mask):
        return ["it is in a jax.shard_map that checks what varies; check_vma=False lets kernels in"]
    if not sizes:
        inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
        alone = num_devices == 1 or inside or kernel.CUTS_ITSELF
        return [] if alone else [f"there are {num_devices} devices and no mesh in scope (jax.set_mesh)"]
    if foreign := [axis for axis in sizes if axis not in (*BATCH, HEADS, SEQUENCE)]:
        return [f"nobody knows what the mesh axis {foreign[0]!r} cuts"]
    if SEQUENCE in sizes and _halo(inputs, controls, pattern, kernel, sizes[SEQUENCE]) is None:
        return ["the length is cut along the mesh, and this is no window that it could follow"]
    return []


def layout(inputs: Inputs, controls: Controls, pattern: Pattern, kernel: Any) -> Layout | None:
    """How a call is cut; None where there is nothing to cut along: one device, or a caller's own `shard_map`."""
    sizes = _sizes()
    batch, _, kv_heads, groups = inputs.query.shape[:4]
    if not {*sizes} & {*BATCH, HEADS, SEQUENCE} or not isinstance(batch, int):
        return None
    mesh = jax.sharding.get_abstract_mesh()
    # All axes that are not the caller's: what is inside is then left alone by the compiler.
    axes = frozenset(mesh.axis_names) - {*mesh.manual_axes}
    own = tuple(axis for axis in BATCH if axis in sizes)
    cuts = [own, *((axis,) for axis in own), ()]
    along = next(cut for cut in cuts if batch % math.prod(sizes[axis] for axis in cut) == 0)
    parts, repeats = sizes.get(HEADS, 1), 1
    if kv_heads % parts:
        repeats = parts // math.gcd(kv_heads, parts)
        if groups % repeats:
            parts = repeats = 1
    halo, shards = None, sizes.get(SEQUENCE, 1)
    if shards > 1:
        halo = _halo(inputs, controls, pattern, kernel, shards)
    # Axes of one device are named too: gradients are summed over each that is not, if only over the device itself.
    alone = tuple(axis for axis in mesh.axis_names if axis in axes and mesh.shape[axis] == 1)
    heads = (HEADS,) if parts > 1 else ()
    return Layout(axes, (*along, *alone), heads, repeats, halo, 1 if halo is None else shards)


def _sizes() -> dict[str, int]:
    """The axes of the mesh in scope that the compiler handles, those of more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    sized = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in sized if kind == AxisType.Auto and mesh.shape[name] > 1}


def _halo(inputs: Inputs, controls: Controls, pattern: Pattern, kernel: Any, shards: int) -> tuple[int, int] | None:
    """Keys that a device needs on each side of its own, where that is less than all of them."""
    base, causal = split_causal(pattern)
    length = inputs.query.shape[1]
    alike = length == inputs.key.shape[1] and isinstance(controls.offset, int) and controls.offset == 0
    if not isinstance(base, Window) or base.unit != 1 or not alike or not kernel.TAKES_OFFSETS:
        return None
    halo = base.left, 0 if causal else base.right
    each = round_up(length, shards) // shards
    return halo if sum(halo) < (shards - 1) * each else None


def attend(
    kernel: Any, layout: Layout, inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern
) -> Array:
    """The kernel's attention on the shards of a layout; `[batch, q_len, heads, head_dim]`."""
    length = inputs.query.shape[1]
    if layout.repeats > 1:
        repeat = lambda x: jnp.repeat(x, layout.repeats, axis=2)
        batch, _, kv_heads, groups, depth = inputs.query.shape
        query = inputs.query.reshape(batch, length, kv_heads * layout.repeats, groups // layout.repeats, depth)
        inputs = inputs._replace(query=query, key=repeat(inputs.key), value=repeat(inputs.value))
    if layout.halo is not None:
        inputs, controls = _whole_shares(inputs, controls, layout.shards)
    slopes = None if inputs.relative is None else inputs.relative.slopes
    if slopes is not None and layout.heads and slopes.shape[0] == 1:
        heads = inputs.query.shape[2] * inputs.query.shape[3]
        inputs = inputs._replace(
            relative=dataclasses.replace(inputs.relative, slopes=jnp.broadcast_to(slopes, (heads,)))  # type: ignore
        )
    kv_len, q_len = inputs.key.shape[1], inputs.query.shape[1]
    offset = controls.offset
    if layout.halo is not None:
        q_len, offset = q_len // layout.shards, layout.halo[0]
        kv_len = q_len + sum(layout.halo)
    num_heads = inputs.query.shape[2] * inputs.query.shape[3]
    head_dim, dtype = inputs.query.shape[-1], str(inputs.key.dtype)
    tiles = kernel.plan(pattern, q_len, kv_len, offset, num_heads, head_dim, dtype)
    controls = controls._replace(offset=0)
    return _attend(inputs, controls, tiles, kernel, layout, settings, pattern, offset)[:, :length]


def _whole_shares(inputs: Inputs, controls: Controls, shards: int) -> tuple[Inputs, Controls]:
    """The call with a length that the devices divide; keys that were added are padding."""
    length = inputs.query.shape[1]
    extra = round_up(length, shards) - length
    mask = jnp.ones((1, 1, 1, 1, length), bool) if controls.mask is None else controls.mask
    mask = jnp.broadcast_to(mask, (*mask.shape[:4], length))
    query, key, value = (pad(x, 1, extra) for x in inputs[:3])
    q_segments, kv_segments = pad(controls.q_segments, 3, extra), pad(controls.kv_segments, 4, extra)
    return (
        inputs._replace(query=query, key=key, value=value),
        controls._replace(mask=pad(mask, 4, extra), q_segments=q_segments, kv_segments=kv_segments),
    )


# Jitted for calls outside jit, and so that layers of one shape share one trace.
@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))
def _attend(
    inputs: Inputs, controls: Controls, tiles: Any, kernel: Any, layout: Layout, settings: Settings, pattern: Pattern,
    offset: int,
) -> Array:  # fmt: skip
    batch, heads = layout.batch or None, layout.heads or None
    along = SEQUENCE if layout.halo is not None else None
    by_example: Any = lambda x, *rest: None if x is None else P(batch if x.shape[0] > 1 else None, *rest)
    num_heads = inputs.query.shape[2] * inputs.query.shape[3]
    of_heads = lambda x: P(heads if x.ndim and x.shape[0] == num_heads > 1 else None)
    arrays = P(batch, along, heads)
    of_tiles = jax.tree.map(lambda x, by_head: P(heads) if by_head else P(), tiles, kernel.by_head(tiles, num_heads))
    of_controls: Any = Controls(*[P()] * len(Controls._fields))._replace(  # type: ignore[arg-type]
        plan=None,
        mask=by_example(controls.mask, None, None, None, along),
        q_segments=by_example(controls.q_segments, None, None, along),
        kv_segments=by_example(controls.kv_segments, None, None, None, along),
    )
    of_inputs: Any = Inputs(arrays, arrays, arrays, None, jax.tree.map(of_heads, inputs.relative))  # type: ignore
    specs = of_inputs, of_controls, of_tiles
    inputs = inputs._replace(relative=jax.tree.map(exact, inputs.relative))

    def local(inputs: Inputs, controls: Controls, tiles: Any) -> Array:
        if layout.halo is not None:
            inputs, controls = _with_halo(inputs, controls, layout.halo, layout.shards)
        return kernel.attend(inputs, controls._replace(offset=offset), settings, pattern, tiles)

    run = jax.shard_map(local, in_specs=specs, out_specs=arrays, axis_names=set(layout.axes), check_vma=False)
    return run(inputs, controls, tiles)


def _with_halo(inputs: Inputs, controls: Controls, halo: tuple[int, int], shards: int) -> tuple[Inputs, Controls]:
    """A device's call with the keys around its own; beyond the ends they are padding."""
    get = functools.partial(fetch, block=1, halo=halo, shards=shards)
    mask, segments = controls.mask, controls.kv_segments
    assert mask is not None
    along = lambda x: jnp.moveaxis(get(jnp.moveaxis(x, 4, 1)), 1, 4)
    return (
        inputs._replace(key=get(inputs.key), value=get(inputs.value)),
        controls._replace(mask=along(mask), kv_segments=None if segments is None else along(segments)),
    )
