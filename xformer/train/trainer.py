"""A run from its first step, or from where it was left, to its result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from xformer.train import data_record, example_values, parallel, warm_start
from xformer.train import workdir as folders
from xformer.train.callbacks import Callback, Callbacks, Run
from xformer.train.checkpoint import Checkpoints, barrier
from xformer.train.engine import Data, Engine
from xformer.train.errors import Diverged, OutOfMemory, ProcessLost
from xformer.train.feed import Feed
from xformer.train.interruption import Interruption
from xformer.train.loop import Loop
from xformer.train.metrics import MetricsWriter, without_nan
from xformer.train.progress import Progress
from xformer.train.restoring import choose, restore_variables, resume
from xformer.train.run_state import Position
from xformer.train.settings import TrainConfig, check_data, selection
from xformer.train.step import Task, TrainState, num_params
from xformer.train.trackers import Tracker, Trackers

MEMORY = "peak memory is one device's arguments, results and temporaries of the compiled training step"
PACKAGES = ("xformer-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Trainer:
    """One training run: what it is made of, and the folder it lives in.

    Attributes:
      model_fn: makes the freshly initialised model. It is called with keyword arguments from `task.inputs`,
        `deterministic` and, in training, `rngs` with the stream `dropout`.
      data: opened data; `data.batches` gives the splits train, validation and test.
      task: what the model gets of a batch and how its outputs are judged; see `xformer.train.step.Task`.
      optimizer, schedule: from `xformer.train.optimizers.build`; the schedule is what rows report.
      workdir: folder of the run, made if missing.
      seed: decides initialisation, dropout and data order.
      name, attention: what the result calls the run and its attention.
      model: what the result says of the model, such as its name.
      callbacks, trackers: freshly made, each with the name that messages give it.
      config: the resolved config, written to `config.json`; a workdir takes no other.
      complete: fills in what is newer than a run in its `config.json`; None leaves that as it is.
      like: the engine of a run that differs in its seed at most, whose compiled steps serve this one too; see `Engine`.
      test: whether the test split is scored at the end; else `test` in the result is empty.
      sources: who reads what `init_from` names with a prefix, such as `hf:FOLDER`: prefix -> a function of the rest.
    """

    model_fn: Callable[[nnx.Rngs], nnx.Module]
    data: Data
    task: Task
    optimizer: optax.GradientTransformation
    schedule: Callable[[Any], jax.Array]
    train: TrainConfig
    workdir: Path
    seed: int
    name: str
    attention: str
    config: Mapping[str, Any]
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: Sequence[tuple[str, Callback]] = ()
    trackers: Sequence[tuple[str, Tracker]] = ()
    complete: folders.Complete | None = None
    like: Engine | None = None
    test: bool = True
    sources: Mapping[str, Callable[[str], warm_start.Source]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def engine(self) -> Engine:
        """What computes: made when it is first needed, and the same from then on."""
        return Engine(
            self.model_fn,
            self.task,
            self.optimizer,
            self.schedule,
            self.train,
            self.seed,
            Callbacks(self.callbacks),
            self.like,
        )

    def fit(self) -> dict[str, Any]:
        """Trains, from the newest intact checkpoint if there is one, and returns the content of `result.json`.

        A finished run returns its result at once.

        Raises:
          Interrupted: a signal or `stop_at_step` ended it; saved, and the same call goes on exactly.
          Diverged: a loss, gradient or parameter is not finite.
          CallbackFailed: a callback or a tracker raised an error; the checkpoints are those of before.
          CheckpointError: a checkpoint could not be written.
          WorkdirBusy: another process is using the workdir.
          WorkdirMismatch: the workdir holds a run of another config, or one begun with other data or elsewhere.
          WarmStartError: what `init_from` names can't be started from.
          OutOfMemory: a step does not fit the memory of a device.
          ProcessLost: another process of a run over many is gone.
          ValueError: the mesh or the batch doesn't fit the devices, the batch is far larger than the training split, or
            the task has no such metric to select by.
        """
        try:
            return self._fit()
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise out_of_memory(error, self.train) from error
            saved = Checkpoints(Path(self.workdir) / "checkpoints").steps()
            raise ProcessLost(
                f"process {jax.process_index()} of {jax.process_count()} can't go on, most likely because another is "
                f"gone ({' '.join(str(error).split())[:200]}); start them all again: the run goes on from "
                + (f"step {saved[-1]}" if saved else "the start")
            ) from error

    def _fit(self) -> dict[str, Any]:
        main, workdir = jax.process_index() == 0, Path(self.workdir)
        parallel.make_layout(self.train)
        select = selection(self.train, self.task.better)
        check_data(self.train, self.data)
        with contextlib.ExitStack() as stack:
            if main:
                stack.enter_context(folders.lock(workdir))
                folders.check(workdir, self.config, self.complete)
                data_record.check(workdir, self.data.fingerprint)
                started = folders.started(workdir)
                folders.claim(workdir, self.config, self.complete)
                if not started:
                    data_record.record(workdir, self.data)
            barrier("claimed")
            interruption = stack.enter_context(Interruption())
            if (result := folders.read_result(workdir)) is not None:
                return result
            callbacks = Callbacks(self.callbacks)
            engine = self.engine
            checkpoints = Checkpoints(workdir / "checkpoints")
            state, position, data_state = resume(engine, checkpoints)
            warm = ""
            if self.train.init_from is not None and not position.step:
                state, warm = self._start_from(self.train.init_from, engine, state)
            closing = lambda opened: stack.enter_context(contextlib.closing(opened))
            progress = closing(Progress(self.name, self.train.num_steps, quiet=not main))
            run = Run(self.name, workdir, position.step, self.train.num_steps, *select, main)
            trackers = closing(Trackers(self.trackers))
            if main:
                trackers.start(run, self.config, list(self.task.better))
            writer = closing(MetricsWriter(workdir, position.step, trackers)) if main else None
            feed = stack.enter_context(Feed(engine.train_batches(self.data, self.seed), data_state))
            progress.say(self._start_line(engine, position))
            if warm:
                progress.say(warm)
            if position.step:
                callbacks.load_state(position.callbacks)
            loop = Loop(
                engine,
                self.data,
                self.train,
                checkpoints,
                writer,
                progress,
                interruption,
                feed,
                position,
                callbacks,
                run,
            )
            try:
                loop.run(state)
            except Diverged as error:
                progress.say(f"{error}; looking for where it starts")
                raise self._explained(error, engine, checkpoints, interruption) from None
            kept = example_values.Kept()
            watch = progress.watch("test", loop.check)
            result = self._result(engine, checkpoints, position, select[0], watch, kept, progress.say)
            if main:
                if self.test:
                    example_values.write(workdir, {**self.data.facts_by_example("test"), **kept.arrays()})
                folders.write_json(workdir / "result.json", result)
                trackers.end(result)
            callbacks.end(dataclasses.replace(run, step=position.step), result)
            return result

    def evaluate(self, split: str, which: str = "best") -> dict[str, float]:
        """Metrics of a split, with its exact numbers of examples and tokens, from the "best" or "last" checkpoint.

        Raises:
          CheckpointError: the workdir has no intact checkpoint, or the best one is damaged.
          DataChanged: the run was trained on other data.
          ValueError: `which` is neither, or the split is empty.
        """
        data_record.check(Path(self.workdir), self.data.fingerprint)
        checkpoints = Checkpoints(Path(self.workdir) / "checkpoints")
        step = choose(checkpoints, which)
        engine = self.engine
        with contextlib.closing(Progress(self.name, self.train.num_steps, quiet=jax.process_index() != 0)) as progress:
            variables = restore_variables(engine, checkpoints, step)
            try:
                found = engine.evaluate(variables, self.data, split, progress.watch(split))
                outputs = engine.outputs(variables, self.data, split, progress.say) if split == "test" else None
                return found if outputs is None else {**found, **outputs.metrics}
            except jax.errors.JaxRuntimeError as error:
                raise out_of_memory(error, self.train) from error

    def _start_from(self, path: str, engine: Engine, state: TrainState) -> tuple[TrainState, str]:
        """The state at step 0 with the parameters of another run, and what to say of it; recorded in the workdir."""
        own, (prefix, _, name) = Path(self.workdir) / path, path.partition(":")
        elsewhere = self.sources.get(prefix)
        source = warm_start.find(own if own.exists() else path) if elsewhere is None else elsewhere(name)
        # Constants and statistics are taken too; random state and plain arrays are the model's own.
        saved = lambda path, x: isinstance(x, nnx.Variable) and not isinstance(x, nnx.RngState)
        constants, others = nnx.filter_state(state.rest, saved, ...)
        params, constants, report = warm_start.apply(
            source, state.params, constants, strict=self.train.init_strict, positions=self.train.init_positions
        )
        if jax.process_index() == 0:
            warm_start.record(Path(self.workdir), source, report)
        barrier("warm")
        rest = nnx.merge_state(constants, others)
        return engine.started_from(state, params, rest), f"starts from {source.folder}: {report}"

    def _explained(
        self, error: Diverged, engine: Engine, checkpoints: Checkpoints, interruption: Interruption
    ) -> Diverged:
        """The error with the place where it started: goes back to the last checkpoint and repeats the steps since."""
        if not error.in_training:
            return error
        state, position, data_state = resume(engine, checkpoints)
        with Feed(engine.train_batches(self.data, self.seed), data_state) as feed:
            for _ in range(position.step + 1, error.step):
                if interruption.requested and jax.process_count() == 1:  # many would have to agree on it
                    return error
                state, _ = engine.step(state, next(feed))
            return Diverged(f"{error}; {engine.locate(state, next(feed))}", error.step)

    def _start_line(self, engine: Engine, position: Position) -> str:
        train, layout = self.train, engine.layout
        return (
            f"{num_params(engine.abstract.params):,} parameters, {layout}, batch {train.batch_size} "
            f"({train.batch_size // layout.batch_shards} a device), "
            + (f"going on from step {position.step}" if position.step else "from the start")
            + f" to {train.num_steps}"
        )

    def _result(
        self,
        engine: Engine,
        checkpoints: Checkpoints,
        position: Position,
        metric: str,
        watch: Callable[[int, int], None],
        kept: example_values.Kept,
        say: Callable[[str], None],
    ) -> dict[str, Any]:
        assert position.best is not None  # the last step is always evaluated
        best = position.best["step"]
        test: dict[str, float] = {}
        details: dict[str, Any] = {}
        if self.test:
            variables = restore_variables(engine, checkpoints, best)
            test = engine.evaluate(variables, self.data, "test", watch, kept)
            details = dict(self.task.details(kept.arrays(), self.data))
            outputs = engine.outputs(variables, self.data, "test", say)
            if outputs is not None:
                folders.write_bytes(Path(self.workdir) / outputs.file, outputs.content.encode())
                test, details = {**test, **outputs.metrics}, {**details, **outputs.details}
        mean = position.seconds / position.step
        times = position.step_seconds or [mean]
        spread = {
            "step_time_ms": statistics.median(times) * 1e3,
            "step_time_p10_ms": float(np.quantile(times, 0.1)) * 1e3,
            "step_time_p90_ms": float(np.quantile(times, 0.9)) * 1e3,
        }
        if self.train.length_buckets > 1:  # steps of several lengths: neither a typical one nor a spread says anything
            spread = {"step_time_ms": mean * 1e3}
        return {
            "name": self.name,
            "attention": self.attention,
            "model": dict(self.model),
            "seed": self.seed,
            "num_params": num_params(engine.abstract.params),
            "flops_per_step": round(position.train_flops / position.step),
            "train_flops": position.train_flops,
            "flops_uncounted": list(position.uncounted),
            **spread,
            "peak_memory_bytes": position.peak_memory_bytes,
            "eval": position.best["metrics"],
            "test": without_nan(test, "test"),
            "best_step": best,
            "select_metric": metric,
            "better": dict(self.task.better),
            "baseline": dict(self.task.baseline(self.data)),
            "test_details": details,
            "last_step": position.step,
            "stopped_early": position.stopped,
            "init_from": folders.read_object(Path(self.workdir) / warm_start.FILE),
            "batch_size": self.train.batch_size,
            "batch_size_per_device": self.train.batch_size // engine.layout.batch_shards,
            "tokens_per_step": position.tokens / position.step,
            "train_seconds": position.seconds,
            "input_wait_share": position.waited / position.seconds if position.seconds else 0.0,
            "info": dict(self.data.info),
            "versions": versions(),
            "device": f"{engine.layout}; {MEMORY}",
        }


def out_of_memory(error: jax.errors.JaxRuntimeError, train: TrainConfig) -> Exception:
    """The error, or where it says that memory ran out, one that says what to do about it."""
    message = " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" not in message and "out of memory" not in message.lower():
        return error
    return OutOfMemory(
        f"out of memory: {message[:200]}; train.batch_size is {train.batch_size}, eval_batch_size "
        f"{train.eval_batch_size or train.batch_size}: smaller ones, or accumulate above {train.accumulate}, need less"
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
