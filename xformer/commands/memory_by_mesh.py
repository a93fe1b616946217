"""The memory that a training state takes of each device of a mesh, from shapes alone."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xformer.schema import ConfigError
from xformer.train.parallel import partition
from xformer.train.settings import AXES
from xformer.train.step import TrainState
from xformer.tree_paths import path_name

GIB = 2**30


def mesh_sizes(text: str) -> dict[str, int]:
    """The size of every axis, from `{"fsdp": 8, "tensor": 4}`; what is not named has 1. ConfigError for any other."""
    try:
        given = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        given = None
    whole = isinstance(given, dict) and all(type(size) is int and size >= 1 for size in given.values())
    if not whole or not given.keys() <= set(AXES):
        raise ConfigError(f"--mesh: got {text!r}, takes sizes from 1 of {', '.join(AXES)}, such as '{{\"fsdp\": 8}}'")
    return {axis: given.get(axis, 1) for axis in AXES}


def device_bytes(tree: Any, mesh: Mapping[str, int]) -> int:
    """Bytes of arrays (or shapes) on each device of the mesh, laid out as training lays them out."""

    def of(path: tuple, leaf: Any) -> int:
        cut = partition(path_name(path), leaf.shape, mesh)
        shards = math.prod(mesh[axis] for axis in cut if axis is not None)
        return math.prod(leaf.shape) * leaf.dtype.itemsize // shards

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(of, tree)))


def table(state: TrainState, meshes: Sequence[Mapping[str, int]]) -> str:
    """A line for each mesh: what the state takes of a device, and gradients, which are as large as the parameters."""
    lines = ["memory of each device in GiB, activations and buffers of the compiler left out"]
    for mesh in meshes:
        params, optimizer = device_bytes(state.params, mesh), device_bytes(state.opt_state, mesh)
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "one device"
        parts = f"parameters {params / GIB:,.2f}, optimizer state {optimizer / GIB:,.2f}, gradients {params / GIB:,.2f}"
        lines.append(f"{axes}: {(2 * params + optimizer) / GIB:,.2f} ({parts})")
    return "\n".join(lines)
