"""The training and the evaluation step as pure functions of arrays, and the state they act on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from xformer import layer_terms
from xformer.train.callbacks import Callbacks
from xformer.train.sums import Metrics, by_example, reduce

Batch = Mapping[str, Any]

NO_CALLBACKS = Callbacks()
# What a step counts besides the task's metrics.
COUNTS = ("examples", "tokens")
# Key of a batch that an evaluation adds: the example's place in its split, -1 for fillers.
INDEX = "example_index"


class Task(Protocol):
    """What a run needs of a task.

    Attributes:
      better: whether less ("min") or more ("max") is better, by metric.
    """

    @property
    def better(self) -> Mapping[str, str]: ...

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The model's keyword arguments; masks (bool, True at tokens) are what tokens are counted by."""

    def metrics(self, outputs: Any, batch: Batch) -> Metrics:
        """(values, weights) by metric, one of each an example, or an array of sums over the batch.

        The weighted mean of `loss` is what is minimised.
        """

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """The metrics of many batches, from (sum of values x weights, sum of weights) and sums in double precision."""

    def records(self, outputs: Any, batch: Batch) -> Mapping[str, jax.Array]:
        """What is kept of each test example besides its metrics, [batch, ...]."""

    def details(self, records: Mapping[str, Any], data: Any) -> Mapping[str, Any]:
        """What no single number says of the test split, from what was kept of all its examples; JSON-able."""

    def outputs(self, model: Any, data: Any, split: str, progress: Any = None) -> Any:
        """What a trained model generates for a split, if the task has a true `generates`: `file` and `content`, to be
        kept with the run, and `metrics` and `details` for its result.
        """

    def baseline(self, data: Any) -> Mapping[str, Any]:
        """What a trivial guesser scores on the opened data: `name` and `scores`, JSON-able."""


class TrainState(NamedTuple):
    """Everything a step changes: step (int32), parameters, other variables, optimizer state, callbacks' arrays."""

    step: jax.Array
    params: Any
    rest: Any
    opt_state: Any
    callbacks: tuple[Any, ...] = ()


def initialize(
    model_fn: Callable[[nnx.Rngs], nnx.Module],
    optimizer: optax.GradientTransformation,
    seed: int,
    callbacks: Callbacks = NO_CALLBACKS,
) -> tuple[nnx.GraphDef, TrainState]:
    """The model's static structure and the state at step 0, on the default device.

    Built eagerly: traced, Flax would take an array that is a plain attribute for a part of the static structure.
    """
    graphdef, params, rest = split(model_fn(nnx.Rngs(_keys(np.uint32(seed))[0])))
    opt_state, arrays = optimizer.init(params), callbacks.init_arrays(params)
    return graphdef, TrainState(jnp.int32(0), params, rest, opt_state, arrays)


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Any, Any]:
    """A model's static structure, its parameters, and the rest of its variables and arrays."""
    graphdef, *variables = nnx.split(model, nnx.Param, ...)
    return graphdef, variables[0], variables[1]


def _keys(seed: Any) -> tuple[jax.Array, jax.Array]:
    """The root keys of (initialisation, dropout)."""
    init, dropout = jax.random.split(jax.random.key(seed))
    return init, dropout


def train_step(
    graphdef: nnx.GraphDef,
    task: Task,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Any], jax.Array],
    *,
    accumulate: int = 1,
    axis_name: str | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, dict[str, Any]]]:
    """The pure function (state, batch, seed) -> (next state, report).

    The gradient is that of (sum of losses) / (sum of weights) over the whole batch, however many micro-batches and
    devices it is cut into. Dropout keys are folded from seed, step, device (pmap) and micro-batch. The report holds
    `sums` by metric, `counts` of examples and tokens (int32) and `health`: scalars of this step.

    Args:
      accumulate: micro-batches a batch is cut into, by stride, so that each device cuts its own rows.
      axis_name: the axis of pmap to sum over; None under jit, where the batch is whole.
    """

    def micro_batch(params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Any, Any]:
        def objective(params: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(graphdef, params, rest, copy=True)  # for constants to change in this trace
            outputs = model(**task.inputs(batch), deterministic=False, rngs=nnx.Rngs(dropout=key))
            metrics, terms = with_layers(task.metrics(outputs, batch), layer_terms.taken(model))
            sums, counts = reduce(metrics), count(task, batch, model)
            return sums["loss"][0] + sum(sums[name][0] for name in terms), (sums, counts, split(model)[2])

        grads, (sums, counts, rest) = jax.grad(objective, has_aux=True)(params)
        return rest, (grads, sums, counts)

    def whole_batch(params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Any, Any]:
        parts = micro_batches(batch, key, accumulate)
        first = jax.tree.map(lambda x: x[0], parts)
        if accumulate == 1:
            return micro_batch(params, rest, *first)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(micro_batch, params, rest, *first)[1])

        def add(carry: tuple[Any, Any], part: tuple[Batch, jax.Array]) -> tuple[tuple[Any, Any], None]:
            rest, total = carry
            rest, one = micro_batch(params, rest, *part)
            return (rest, jax.tree.map(jnp.add, total, one)), None

        return jax.lax.scan(add, (rest, zeros), parts)[0]

    def step(state: TrainState, batch: Batch, seed: jax.Array) -> tuple[TrainState, dict[str, Any]]:
        key = dropout_key(seed, state.step)
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        rest, totals = whole_batch(state.params, state.rest, batch, key)
        if axis_name is not None:
            totals = jax.lax.psum(totals, axis_name)
            rest = jax.tree.map(lambda x: jax.lax.pmean(x, axis_name) if _is_float(x) else x, rest)
        grads, sums, counts = totals
        weight = sums["loss"][1].astype(jnp.float32)
        grads = jax.tree.map(lambda g: g / jnp.where(weight > 0, weight, 1).astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        health = {
            "learning_rate": schedule(state.step),
            "grad_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
            "param_norm": optax.tree.norm(params),
        }
        report = {"sums": sums, "counts": counts, "health": health}
        arrays = callbacks.update_arrays(state.callbacks, params, state.step + 1)
        return TrainState(state.step + 1, params, rest, opt_state, arrays), report

    return step


def with_layers(metrics: Metrics, terms: layer_terms.Terms) -> tuple[Metrics, tuple[str, ...]]:
    """The task's metrics and what layers sowed, and the names of the terms of the loss among these.

    A term is weighted as the example's loss is, so that the loss of an example is the sum of both, however a batch is
    cut up.

    Raises:
      ValueError: a layer sowed under the name of a metric of the task.
    """
    if not terms.losses and not terms.metrics:
        return metrics, ()
    weights = metrics["loss"][1]
    weights = weights.reshape(len(weights), -1).sum(axis=1).astype(jnp.float32)
    pairs = {
        name: layer_terms.by_example(pair, len(weights)) for name, pair in {**terms.metrics, **terms.losses}.items()
    }
    if both := pairs.keys() & metrics.keys():
        raise ValueError(f"a layer's term must not be named as a metric of the task, got {min(both)!r}")
    losses = {name: (pairs[name][0], weights) for name in terms.losses}
    return {**metrics, **pairs, **losses}, tuple(losses)


def dropout_key(seed: Any, step: Any) -> jax.Array:
    """The dropout key of a step (from 0)."""
    return jax.random.fold_in(_keys(seed)[1], step)


def micro_batches(batch: Batch, key: jax.Array, number: int) -> tuple[dict[str, jax.Array], jax.Array]:
    """A batch as arrays [number, rows / number, ...], and a key for each: micro-batch n has rows n, n + number, ..."""
    cut = lambda x: jnp.moveaxis(x.reshape(-1, number, *x.shape[1:]), 1, 0)
    return jax.tree.map(cut, dict(batch)), jax.random.split(key, number)


def eval_step(
    graphdef: nnx.GraphDef, task: Task, *, axis_name: str | None = None
) -> Callable[[tuple[Any, Any], Batch], dict[str, Any]]:
    """The pure function ((params, rest), batch) -> report, dropout off.

    The report holds `sums` by metric, `counts` of examples and tokens, and where the batch says which examples it has
    (`INDEX`) `examples`: their `index`, the values and weights of their `metrics` and the task's `records`, of the
    whole batch on every device.
    """

    def step(variables: tuple[Any, Any], batch: Batch) -> dict[str, Any]:
        index = batch.get(INDEX)
        batch = {name: array for name, array in batch.items() if name != INDEX}
        model = nnx.merge(graphdef, *variables)
        outputs = model(**task.inputs(batch), deterministic=True)
        metrics = task.metrics(outputs, batch)
        report = {"sums": reduce(metrics), "counts": count(task, batch, model)}
        if axis_name is not None:
            report = jax.lax.psum(report, axis_name)
        if index is None:
            return report
        examples = {"index": index, "metrics": by_example(metrics), "records": dict(task.records(outputs, batch))}
        if axis_name is not None:
            examples = jax.lax.all_gather(examples, axis_name, tiled=True)
        return report | {"examples": examples}

    return step


def count(task: Task, batch: Batch, model: Any = None) -> dict[str, jax.Array]:
    """Examples and tokens (int32) of a batch; those of weight 0 are fillers and not counted. Tokens: `token_masks`."""
    weights = batch["weights"]
    real = jnp.any(weights.reshape(weights.shape[0], -1) > 0, axis=1)
    masks = token_masks(task.inputs(batch), model)
    tokens = sum(jnp.sum(mask.reshape(mask.shape[0], -1) > 0, axis=1, dtype=jnp.int32) for mask in masks)
    return {"examples": jnp.sum(real, dtype=jnp.int32), "tokens": jnp.sum(jnp.where(real, tokens, 0))}


def token_masks(inputs: Mapping[str, Any], model: Any = None) -> list[jax.Array]:
    """The places that a model reads tokens at, `[batch, ...]` for each input that has some, above 0 at real tokens.

    They are the model's masks: `mask`, `mask2` of a second text, `decoder_mask` of a target, which all count. Of inputs
    without one it is every place of the first: the pixels of an image, or where the model has `tokens_per_example`
    those, the patches that it reads as tokens.
    """
    masks = [array for name, array in inputs.items() if _is_mask(name) and array is not None]
    if masks:
        return masks
    shape = jnp.shape(next(iter(inputs.values())))
    if (own := getattr(model, "tokens_per_example", None)) is not None:
        return [jnp.ones((shape[0], own), bool)]
    return [jnp.ones(shape[:-1] if len(shape) > 2 else shape, bool)]


def _is_mask(name: str) -> bool:
    return name.rstrip("0123456789") in ("mask", "decoder_mask")


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def num_params(params: Any) -> int:
    """How many trainable numbers a model has."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
