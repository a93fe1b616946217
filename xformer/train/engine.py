"""The compiled steps of one run: made once, called many times, counted and watched."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import optax
from flax import nnx

from xformer.train import health, memory, parallel
from xformer.train import step as steps
from xformer.train.callbacks import Callbacks
from xformer.train.example_values import Kept
from xformer.train.settings import TrainConfig
from xformer.train.step import INDEX, Task, TrainState
from xformer.train.sums import Totals

logger = logging.getLogger(__name__)


class Data(Protocol):
    """What training needs of opened data; see `xformer.tasks`.

    Attributes:
      info: facts for the result.
      fingerprint: what the data holds, part by part, JSON-able: equal for equal data and for no other.
    """

    info: Mapping[str, Any]
    fingerprint: Mapping[str, Any]

    def num_examples(self, split: str) -> int:
        """Examples of a split."""

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        shard_index: int = 0,
        shard_count: int = 1,
        length_buckets: int = 1,
    ) -> Any:
        """An iterator over dicts of numpy arrays; `batch_size` is that of one of `shard_count` shards.

        Shard s has rows s * batch_size to (s + 1) * batch_size of each global batch. Without shuffling, examples come
        in their order, and fillers (weight 0) after the last; with several buckets they may come in another, and
        batches then have `INDEX`, int32 [batch_size], the number of each example, -1 of fillers. Only data that is
        `by_length` is asked for several; all shards then pad a batch to one length.
        """

    def facts_by_example(self, split: str) -> Mapping[str, np.ndarray]:
        """What is known of each example of a split, in its order: arrays [examples, ...] by name, such as `length`."""

    def save(self, directory: Path) -> None:
        """Stores with the run what predictions on other inputs need, such as the vocabulary."""


class Compiled:
    """A jitted or pmapped step, compiled at the first call; more batch shapes than are expected are reported.

    What the compiler planned is held against the memory that there is before anything runs, see `memory.check`.

    Attributes:
      seconds: time spent compiling.
      peak_bytes: memory that one device needs to run it, as planned by the compiler, the most of all shapes; None if
        that is unknown.
    """

    def __init__(self, name: str, function: Any, shapes: int = 1) -> None:
        self._name, self._function, self._expected = name, function, shapes
        self._by_shape: dict[tuple, Any] = {}
        self.seconds = 0.0
        self.peak_bytes: int | None = None

    def __call__(self, state: Any, batch: Mapping[str, jax.Array], *rest: Any) -> Any:
        shape = tuple((name, array.shape, array.dtype) for name, array in sorted(batch.items()))
        if shape not in self._by_shape:
            if len(self._by_shape) >= self._expected:
                spelt = ", ".join(f"{name} {dtype}{list(dims)}" for name, dims, dtype in shape)
                logger.warning("the %s is compiled again: a batch has another shape (%s)", self._name, spelt)
            start = time.perf_counter()
            compiled = self._function.lower(state, batch, *rest).compile()
            self.seconds += time.perf_counter() - start
            plan = memory.Plan.of(compiled)
            if plan is not None:
                self.peak_bytes = max(self.peak_bytes or 0, plan.total)
                memory.check(self._name, plan)
            self._by_shape[shape] = compiled
            memory.release()
        return self._by_shape[shape](state, batch, *rest)


@dataclasses.dataclass(frozen=True)
class Steps:
    """What is compiled of a run, and shared by runs that differ in their seed at most.

    Attributes:
      graphdef: the model's static structure.
      whole: the training step on one device, not compiled, to count and to look into.
      flops: what was counted of it, by the shapes of the batch.
    """

    graphdef: nnx.GraphDef
    whole: Callable[..., Any]
    train: Compiled
    evaluate: Compiled
    flops: dict[Any, tuple[int, tuple[str, ...]]] = dataclasses.field(default_factory=dict)


class Engine:
    """Model, optimizer and task compiled for a mesh of devices.

    The seed is no part of what is compiled: initial parameters and keys of dropout are arguments of the steps.

    Args:
      like: an engine for which `model_fn`, `optimizer` and `schedule` were made of the same settings, and whose task
        computes the same of a batch: its steps serve this one too, if both have an equal `train`, whose `num_steps` may
        come of the data and decides the schedule, and states of one structure.

    Attributes:
      layout: where arrays lie.
      abstract: shapes, dtypes and shardings of the train state.
      finish: the task's, which makes metrics of sums.
      train_step, eval_step: compiled at their first call.
    """

    def __init__(
        self,
        model_fn: Callable[[nnx.Rngs], nnx.Module],
        task: Task,
        optimizer: optax.GradientTransformation,
        schedule: Callable[[Any], jax.Array],
        train: TrainConfig,
        seed: int,
        callbacks: Callbacks = steps.NO_CALLBACKS,
        like: Engine | None = None,
    ) -> None:
        self.layout = parallel.make_layout(train)
        self._train, self._task, self._root = train, task, seed
        self.finish = task.finish
        self._initialize = lambda: steps.initialize(model_fn, optimizer, seed, callbacks)
        graphdef, initial = self._initialize()
        self._initial: TrainState | None = initial
        shardings = self.layout.shardings(initial)
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        self.abstract: TrainState = jax.tree.map(place, initial, shardings)
        self._seed = jax.device_put(np.uint32(seed), self.layout.replicated)
        self._fresh = lambda params: (jax.jit(optimizer.init)(params), callbacks.init_arrays(params))
        self._evaluation_params = jax.jit(callbacks.evaluation_params, out_shardings=shardings.params)

        def make_steps() -> Steps:
            axis = self.layout.axis_name
            make = lambda axis: steps.train_step(
                graphdef,
                task,
                optimizer,
                schedule,
                accumulate=train.accumulate,
                axis_name=axis,
                callbacks=callbacks,
            )
            on_mesh = self.layout.wrap(make(axis), donate=True, out=(shardings, self.layout.replicated))
            evaluate = self.layout.wrap(steps.eval_step(graphdef, task, axis_name=axis))
            compiled = lambda name, function: Compiled(name, function, train.length_buckets)
            return Steps(
                graphdef, make(None), compiled("training step", on_mesh), compiled("evaluation step", evaluate)
            )

        state = lambda engine: jax.tree.flatten(engine.abstract)
        described = lambda engine, graphdef: (engine._train, engine.layout, graphdef, *state(engine))
        shared = like is not None and described(like, like.steps.graphdef) == described(self, graphdef)
        self.steps: Steps = like.steps if like is not None and shared else make_steps()
        self.train_step, self.eval_step = self.steps.train, self.steps.evaluate

    def init(self) -> TrainState:
        """The state at step 0, the same on every layout."""
        initial = self._initial if self._initial is not None else self._initialize()[1]
        self._initial = None
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), initial, self.abstract)

    def started_from(self, state: TrainState, params: Any, rest: Any) -> TrainState:
        """The state at step 0 with other parameters: optimizer and callbacks start afresh from them."""
        opt_state, arrays = self._fresh(params)
        place = lambda x, like: jax.device_put(x, like.sharding)
        opt_state = jax.tree.map(place, opt_state, self.abstract.opt_state)
        arrays = jax.tree.map(place, arrays, self.abstract.callbacks)
        return TrainState(state.step, params, rest, opt_state, arrays)

    def variables(self, state: TrainState) -> tuple[Any, Any]:
        """(parameters, rest) that are evaluated and loaded: those of the model, unless a callback averages them."""
        params = self._evaluation_params(state.callbacks, state.params) if state.callbacks else state.params
        return params, state.rest

    def checkpoint(self, state: TrainState) -> dict[str, Any]:
        """What a checkpoint of the state holds, arrays or shapes: `model`, which is loaded, and what going on needs."""
        optimizer = {"step": state.step, "opt_state": state.opt_state}
        if not state.callbacks:
            return {"model": {"params": state.params, "rest": state.rest}, "optimizer": optimizer}
        shapes = isinstance(state.step, jax.ShapeDtypeStruct)
        params, rest = (state.params, state.rest) if shapes else self.variables(state)
        own = {"params": state.params, "callbacks": state.callbacks}
        return {"model": {"params": params, "rest": rest}, "optimizer": optimizer | own}

    def step(self, state: TrainState, batch: Mapping[str, np.ndarray]) -> tuple[TrainState, dict[str, Any]]:
        """One optimizer step on this process's rows of a batch; `state` is used up. Returns without waiting."""
        return self.train_step(state, self.layout.put(batch), self._seed)

    def locate(self, state: TrainState, batch: Mapping[str, np.ndarray]) -> str:
        """Where the step from `state` on this process's rows of `batch` first becomes NaN or infinite, in words.

        Every process of the run calls this, and each looks at the whole batch.
        """
        devices = self.layout.mesh.size if self.layout.pmap else None
        options: dict[str, Any] = {"accumulate": self._train.accumulate, "num_devices": devices}
        whole = self.layout.fetch(batch)
        return health.locate(self.steps.graphdef, self._task, self.layout.gather(state), whole, self._root, **options)

    def train_batches(self, data: Data, seed: int) -> Any:
        """This process's share of the endless shuffled training batches."""
        index, count = self.layout.data_shard(self._train.batch_size)
        return data.batches(
            "train",
            self._train.batch_size // count,
            seed=seed,
            shuffle=True,
            epochs=None,
            shard_index=index,
            shard_count=count,
            **self._by_length(),
        )

    def _by_length(self) -> dict[str, int]:
        """What `data.batches` is told of lengths: nothing where all batches have that of the data."""
        buckets = self._train.length_buckets
        return {} if buckets == 1 else {"length_buckets": buckets}

    def evaluate(
        self,
        variables: tuple[Any, Any],
        data: Data,
        split: str,
        watch: Callable[[int, int], None] = lambda done, total: None,
        kept: Kept | None = None,
    ) -> dict[str, float]:
        """Metrics of a split: sums over all its examples, each once, then one division; `examples` and `tokens` exact.

        Args:
          variables: the params and rest of a train state.
          watch: called before each batch with the examples evaluated so far and all of the split's; may raise to end
            the evaluation.
          kept: collects the values of each example.

        Raises:
          ValueError: the split has no examples.
        """
        total = data.num_examples(split)
        # Not more than there are: fillers cost as much as examples. One size for both splits, for one compilation.
        largest = max(total, *(data.num_examples(other) for other in ("validation", "test")))
        size = min(self._train.eval_batch_size or self._train.batch_size, max(largest, self.layout.batch_shards))
        index, count = self.layout.data_shard(self.layout.batch_shards)
        size = max(size // count, 1)
        shard: dict[str, Any] = {"shard_index": index, "shard_count": count, **self._by_length()}
        batches = data.batches(split, size, seed=0, shuffle=False, epochs=1, **shard)
        totals = Totals()
        waiting: list[Any] = []

        def collect(leave: int) -> None:
            while len(waiting) > leave:
                report = jax.device_get(waiting.pop(0))
                totals.add(report)
                if kept is not None:
                    kept.add(report["examples"])

        for number, batch in enumerate(batches):
            watch(min(number * size * count, total), total)
            place = (number * count + index) * size + np.arange(size, dtype=np.int32)
            numbered = {INDEX: np.where(place < total, place, -1).astype(np.int32), **batch}
            waiting.append(self.eval_step(variables, self.layout.put(self.layout.pad(numbered))))
            collect(2)
        collect(0)
        if not totals.counts.get("examples"):
            raise ValueError(f"the split {split!r} has no examples")
        return totals.means(self.finish) | totals.counts

    def outputs(
        self, variables: tuple[Any, Any], data: Data, split: str, progress: Callable[[str], None] | None = None
    ) -> Any:
        """What the task makes the model generate for a split, on the default device of the first process; else None.

        Args:
          variables: the params and rest of a train state.
          progress: gets a line now and then.
        """
        if not getattr(self._task, "generates", False):
            return None
        whole = self.layout.gather(variables)
        if jax.process_index() != 0:
            return None
        return self._task.outputs(nnx.merge(self.steps.graphdef, *whole), data, split, progress)

    def flops(self, batch: Mapping[str, np.ndarray]) -> tuple[int, tuple[str, ...]]:
        """(FLOPs of one optimizer step over all devices, what they leave out), from the step's jaxpr on one device."""
        from xformer import cost  # the counter knows the attention room; the rest of this room does not need it

        _, count = self.layout.data_shard(self._train.batch_size)
        whole = {name: jax.ShapeDtypeStruct((len(x) * count, *x.shape[1:]), x.dtype) for name, x in batch.items()}
        shapes = tuple((name, *x.shape) for name, x in sorted(whole.items()))
        if shapes not in self.steps.flops:
            counted = cost.count(self.steps.whole, self.abstract, whole, jax.ShapeDtypeStruct((), np.uint32))
            self.steps.flops[shapes] = counted.flops, counted.uncounted
        return self.steps.flops[shapes]
