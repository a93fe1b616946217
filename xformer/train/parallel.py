"""Where arrays lie: the mesh of devices, the rules that shard parameters and batches, and jit or pmap around a step."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xformer.train.settings import AXES, TrainConfig
from xformer.train.step import INDEX
from xformer.tree_paths import path_name

# (pattern of a parameter's path, axis of each of its last dimensions); the first match decides. Optimizer moments have
# the paths of their parameters and follow them. An axis that doesn't divide its dimension is left out.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(query|key|value)/kernel$", ("fsdp", "tensor", None)),
    (r"(query|key|value)/bias$", ("tensor", None)),
    (r"out/kernel$", ("tensor", None, "fsdp")),
    (r"(expand|gate)/kernel$", ("fsdp", "tensor")),
    (r"(expand|gate)/bias$", ("tensor",)),
    (r"contract/kernel$", ("tensor", "fsdp")),
    (r"(kernel|embedding|table)$", (None, "fsdp")),
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with the axes data, fsdp, tensor and sequence, used through jit or through pmap."""

    mesh: Mesh
    pmap: bool = False

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1)
        return f"{'pmap' if self.pmap else 'jit'} over {self.mesh.size} x {self.mesh.devices.flat[0].device_kind}" + (
            f" ({axes})" if axes else ""
        )

    @property
    def batch_shards(self) -> int:
        """Parts that the rows of a batch are cut into."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    @property
    def replicated(self) -> NamedSharding:
        """The same array on every device."""
        return NamedSharding(self.mesh, P())

    @property
    def axis_name(self) -> str | None:
        """The axis that a step has to sum over itself."""
        return "data" if self.pmap else None

    def batch_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """For a batch array [rows, ...]; the second dimension is cut along `sequence` where that divides it."""
        if self.pmap:
            return NamedSharding(self.mesh, P("data"))
        sequence = self.mesh.shape["sequence"]
        second = ("sequence",) if len(shape) > 1 and sequence > 1 and shape[1] % sequence == 0 else ()
        return NamedSharding(self.mesh, P(("data", "fsdp"), *second))

    def shardings(self, state: Any) -> Any:
        """The sharding of every array in a train state (arrays or shapes)."""

        def sharding(path: tuple, leaf: Any) -> NamedSharding:
            spec = P() if self.pmap else partition(path_name(path), leaf.shape, self.mesh.shape)
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(sharding, state)

    def data_shard(self, batch_size: int) -> tuple[int, int]:
        """(index, count): which of `count` equal consecutive parts of a batch's rows this process has to read."""
        rows = self.batch_sharding((batch_size,)).addressable_devices_indices_map((batch_size,)).values()
        parts = [(index[0].start or 0, index[0].stop or batch_size) for index in rows if index is not None]
        first, last = min(start for start, _ in parts), max(stop for _, stop in parts)
        return first // (last - first), batch_size // (last - first)

    def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows of a batch, as global arrays over the mesh."""

        def place(rows: np.ndarray) -> jax.Array:
            if self.pmap:
                rows = rows.reshape(len(self.mesh.local_devices), -1, *rows.shape[1:])
                return jax.make_array_from_process_local_data(self.batch_sharding(rows.shape), rows)
            # The rows of this process, but each over its whole length: `sequence` may cut between processes.
            shape = (len(rows) * processes, *rows.shape[1:])
            return jax.make_array_from_process_local_data(self.batch_sharding(shape), rows, shape)

        _, processes = self.data_shard(self.batch_shards)
        return {name: place(np.asarray(rows)) for name, rows in batch.items()}

    def gather(self, tree: Any) -> Any:
        """Global arrays as whole numpy arrays in every process."""
        return jax.device_get(tree) if jax.process_count() == 1 else multihost_utils.process_allgather(tree, tiled=True)

    def fetch(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The rows of all processes, from each one's own."""
        whole = self.gather(self.put(batch))
        return {name: x.reshape(-1, *x.shape[2:]) if self.pmap else x for name, x in whole.items()}

    def pad(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Rows repeated with weight 0 until the mesh divides them; the last row serves, so that no row is odd."""
        rows = len(batch["weights"])
        per_process = self.batch_shards // self.data_shard(self.batch_shards)[1]
        extra = -rows % per_process
        padded = {name: np.concatenate([x, np.repeat(x[-1:], extra, axis=0)]) for name, x in batch.items()}
        padded["weights"][rows:] = 0
        if INDEX in padded:
            padded[INDEX][rows:] = -1
        return padded

    def any(self, flag: bool) -> jax.Array:
        """Whether `flag` is set in any process of the run, as a scalar of every device; returns without waiting."""
        flags = np.full(len(self.mesh.local_devices), flag)
        spread = NamedSharding(self.mesh, P(AXES))
        return self._any(jax.make_array_from_process_local_data(spread, flags))

    @functools.cached_property
    def _any(self) -> Any:
        return jax.jit(jnp.any, out_shardings=self.replicated)

    def wrap(self, step: Callable, *, donate: bool = False, out: Any = None) -> Any:
        """`step(state, batch, ...)` on global arrays; `out`: shardings of its results, None: replicated."""
        donated = (0,) if donate else ()
        if self.pmap:
            axes = (None, 0, None)[: step.__code__.co_argcount]
            devices = list(self.mesh.devices.flat)
            return jax.pmap(step, "data", in_axes=axes, out_axes=None, donate_argnums=donated, devices=devices)

        def on_mesh(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):  # attention looks for the axis `sequence`
                return step(*args)

        return jax.jit(on_mesh, donate_argnums=donated, out_shardings=self.replicated if out is None else out)


def partition(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
    """How the parameter at `path` is cut, by RULES."""
    for pattern, axes in RULES:
        if re.search(pattern, path) and len(axes) <= len(shape):
            spec = [None] * (len(shape) - len(axes)) + list(axes)
            cut = [axis if axis and size % sizes[axis] == 0 else None for axis, size in zip(spec, shape, strict=True)]
            return P(*cut)
    return P()


def make_layout(train: TrainConfig) -> Layout:
    """The layout that the settings ask for; a mesh smaller than the machine uses its first devices.

    Raises:
      ValueError: the mesh doesn't fit the devices, or the batch doesn't fit the mesh; the message names the key.
    """
    devices = jax.devices()
    sizes = {axis: train.mesh.get(axis, 1) for axis in AXES}
    known = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: max(len(devices) // known, 1) if size == -1 else size for axis, size in sizes.items()}
    needed = math.prod(sizes.values())
    spelt = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if needed > len(devices) or (jax.process_count() > 1 and needed != len(devices)):
        raise ValueError(f"mesh: {spelt} needs {needed} devices, there are {len(devices)}")
    shape = tuple(sizes.values())
    mesh = Mesh(np.array(devices[:needed]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    layout = Layout(mesh, train.parallel == "pmap")
    rows = layout.batch_shards * train.accumulate
    if train.batch_size % rows:
        raise ValueError(
            f"batch_size must be a multiple of {rows} ({layout.batch_shards} devices that share it out x "
            f"{train.accumulate} micro-batches), got {train.batch_size}"
        )
    return layout
