"""Where a NaN comes from: the failing step again, layer by layer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.train.step import Batch, Task, TrainState, dropout_key, micro_batches, split
from xformer.train.sums import reduce
from xformer.tree_paths import path_name


def locate(
    graphdef: nnx.GraphDef,
    task: Task,
    state: TrainState,
    batch: Batch,
    seed: int,
    *,
    accumulate: int = 1,
    num_devices: int | None = None,
) -> str:
    """Says in a few words where the step from `state` on `batch` first becomes NaN or infinite.

    The step runs uncompiled on one device, with the same dropout: forward, each module's output checked as it returns;
    then the loss; then the gradient of each parameter.

    Args:
      state: the state before the failing step. A model that scans over its layers has a method `unrolled`, which
        gives the same model with its layers one by one.
      batch: the whole batch.
      num_devices: devices of pmap, whose dropout keys differ; None for jit.
    """
    key = dropout_key(seed, state.step)
    for device in range(num_devices or 1):
        rows = {name: jnp.split(jnp.asarray(x), num_devices or 1)[device] for name, x in batch.items()}
        device_key = key if num_devices is None else jax.random.fold_in(key, device)
        parts, keys = micro_batches(rows, device_key, accumulate)
        for index in range(accumulate):
            part = {name: x[index] for name, x in parts.items()}
            if (found := _in_part(graphdef, task, state, part, keys[index])) is not None:
                return found
    return "outputs, loss and gradients are finite when the step runs uncompiled: it is a norm or the update"


def _in_part(graphdef: nnx.GraphDef, task: Task, state: TrainState, batch: Batch, key: jax.Array) -> str | None:
    model = nnx.merge(graphdef, state.params, state.rest)
    if hasattr(model, "unrolled"):  # what is traced, in a scan or to be computed again, can't be looked at
        model = model.unrolled()
    graphdef, params, rest = split(model)

    def loss(params: Any, watch: Callable[[nnx.Module], Any]) -> jax.Array:
        model = nnx.merge(graphdef, params, rest, copy=True)
        with watch(model):
            outputs = model(**task.inputs(batch), deterministic=False, rngs=nnx.Rngs(dropout=key))
        return reduce(task.metrics(outputs, batch))["loss"][0]

    places: list[str] = []
    value = loss(params, lambda model: watched(model, places))
    if places:
        return f"first seen in the output of {places[0]}"
    if not jnp.isfinite(value):
        return "first seen in the loss: the model's outputs are finite"
    grads = jax.grad(loss)(params, lambda model: contextlib.nullcontext())
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        if not jnp.all(jnp.isfinite(grad)):
            return f"first seen in the gradient of {path_name(path)}: the loss is finite"
    return None


@contextlib.contextmanager
def watched(model: nnx.Module, places: list[str]) -> Iterator[None]:
    """While open, modules of `model` that return something not finite add their path to `places`, innermost first."""
    paths = {id(module): "/".join(map(str, path)) or "the model" for path, module in nnx.iter_modules(model)}
    classes = {type(module) for _, module in nnx.iter_modules(model) if callable(module)}
    before = {cls: cls.__call__ for cls in classes}  # type: ignore[operator]

    def watch(cls: type) -> Callable[..., Any]:
        call = before[cls]

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(self, *args, **kwargs)
            if id(self) in paths and not _finite(result):
                places.append(f"{paths[id(self)]} ({cls.__name__})")
            return result

        return __call__

    try:
        for cls in classes:
            cls.__call__ = watch(cls)  # type: ignore[method-assign]
        yield
    finally:
        for cls, call in before.items():
            cls.__call__ = call  # type: ignore[method-assign]


def _finite(tree: Any) -> bool:
    """False if an array is not finite; what is being traced (in a scan, say) can't be looked at."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    return all(bool(jnp.all(jnp.isfinite(x))) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))


def finite_report(report: Mapping[str, Any]) -> str | None:
    """What in a fetched report of a training step is not finite: "loss is nan"; None if all is well."""
    values = {"loss": report["sums"]["loss"][0], **report["health"]}
    bad = (f"{name} is {float(value)}" for name, value in values.items() if not math.isfinite(float(value)))
    return next(bad, None)
