"""The training loop: step, watch, evaluate, save."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax

from xformer.train.callbacks import Callbacks, Run
from xformer.train.checkpoint import Checkpoints
from xformer.train.engine import Data, Engine
from xformer.train.errors import Diverged, Interrupted
from xformer.train.feed import Feed
from xformer.train.health import finite_report
from xformer.train.interruption import Interruption
from xformer.train.metrics import MetricsWriter, without_nan
from xformer.train.progress import Progress
from xformer.train.run_state import TIMES, Position
from xformer.train.settings import TrainConfig
from xformer.train.step import COUNTS, TrainState
from xformer.train.sums import Totals

logger = logging.getLogger(__name__)

# Steps that may be under way while the next is prepared: enough to keep a device busy, few enough that a NaN, a signal
# or a full queue is seen at once.
UNDER_WAY = 2


class Loop:
    """One process's pass through a run; `position` is kept up to date.

    `run` is what callbacks are told of the run: also the metric to select by, and whether less ("min") or more ("max")
    of it is better.
    """

    def __init__(
        self,
        engine: Engine,
        data: Data,
        train: TrainConfig,
        checkpoints: Checkpoints,
        writer: MetricsWriter | None,
        progress: Progress,
        interruption: Interruption,
        feed: Feed,
        position: Position,
        callbacks: Callbacks,
        run: Run,
    ) -> None:
        self._engine, self._data, self._train, self._checkpoints = engine, data, train, checkpoints
        self._writer, self._progress, self._interruption, self._feed = writer, progress, interruption, feed
        self.position, self._callbacks, self._run = position, callbacks, run
        feed.check = self.check
        self._started = self._saved = position.step
        self._dispatched = position.step
        self._under_way: collections.deque[tuple[int, Any, int]] = collections.deque()
        self._waited_before = position.waited
        self._clock = time.perf_counter()
        self._many = jax.process_count() > 1
        self._agreed: str | None = None

    def run(self, state: TrainState) -> None:
        """Trains to the last step; evaluates and saves on the way.

        Raises:
          Interrupted, Diverged, CheckpointError: see `Trainer.fit`.
        """
        self._callbacks.start(self._now())
        self._after_step(state)
        while self._dispatched < self._train.num_steps and self.position.stopped is None:
            state = self._step(state)
            self._after_step(state)

    def _now(self) -> Run:
        return dataclasses.replace(self._run, step=self.position.step)

    def check(self) -> None:
        """Raises Interrupted if a signal came; not in a run of many processes, which have to agree on where to stop."""
        if self._interruption.requested and not self._many:
            raise self._interrupted(f"{self._interruption.requested} came")

    def _step(self, state: TrainState) -> TrainState:
        try:
            batch = next(self._feed)
        except Interrupted as interrupted:  # from `check`: the batch takes long
            self._collect(0)
            if self.position.step > self._saved:
                self._save(state)
            raise self._interrupted(f"{self._interruption.requested} came") from interrupted
        if self._dispatched == self._started:
            self._measure(batch)
        compiling = self._engine.train_step.seconds
        state, report = self._engine.step(state, batch)
        self._clock += self._engine.train_step.seconds - compiling
        self._dispatched += 1
        flops = self._engine.flops(batch)[0] if self._train.length_buckets > 1 else self.position.flops_per_step
        if self._many:
            report = report | {"signal": self._engine.layout.any(self._interruption.requested is not None)}
        self._under_way.append((self._dispatched, report, flops))
        self._collect(UNDER_WAY)
        return state

    def _measure(self, batch: Mapping[str, Any]) -> None:
        """What is counted before the first step of a process; none of it is training time."""
        position = self.position
        if not position.step:
            position.flops_per_step, uncounted = self._engine.flops(batch)
            position.uncounted = list(uncounted)
            if uncounted:
                logger.warning("FLOPs leave out: %s", ", ".join(uncounted))
        self._feed.waited = 0.0
        self._clock = time.perf_counter()

    def _collect(self, leave: int) -> None:
        """Waits for the steps under way but the last `leave`, and books them."""
        while len(self._under_way) > leave:
            step, report, flops = self._under_way.popleft()
            report = jax.device_get(report)
            now = time.perf_counter()
            self._book(step, report, flops, now - self._clock)
            self._clock = now

    def _book(self, step: int, report: Mapping[str, Any], flops: int, seconds: float) -> None:
        position, train = self.position, self._train
        if (what := finite_report(report)) is not None:
            raise self._diverged(step, what)
        if step == self._started + 1:
            self._check_metric(report)
        else:
            position.step_seconds = [*position.step_seconds, round(seconds, 6)][-TIMES:]
        if report.get("signal"):
            self._agreed = "a signal"  # seen by every process when it books this step: they stop at the same one
        window = Totals(position.sums, position.counts)
        window.add(report)
        position.sums, position.counts = window.sums, window.counts
        position.peak_memory_bytes = self._engine.train_step.peak_bytes
        position.step = step
        position.train_flops += flops
        position.examples += int(report["counts"]["examples"])
        position.tokens += int(report["counts"]["tokens"])
        position.seconds += seconds
        position.waited = self._waited_before + self._feed.waited
        log = step % train.log_every == 0 or step == train.num_steps
        this = Totals()
        this.add(report)
        loss = this.loss
        if log:
            means = window.means(self._engine.finish)
            health = {name: float(value) for name, value in report["health"].items()}
            self._row("train", means | health | {"examples": position.examples, "tokens": position.tokens})
            position.sums, position.counts, loss = {}, {}, means["loss"]
        average = statistics.median if train.length_buckets == 1 else statistics.fmean
        typical = average(position.step_seconds[-20:]) if position.step_seconds else None
        tokens = position.tokens / step
        self._progress.step(step, loss, typical, tokens, position.train_flops // step, log)
        if self._callbacks:
            learning = {name: float(value) for name, value in report["health"].items()}
            self._callbacks.step(self._now(), this.means(self._engine.finish) | learning)

    def _after_step(self, state: TrainState) -> None:
        """What is due after the last dispatched step: evaluation, checkpoint, the end."""
        step, train, position = self._dispatched, self._train, self.position
        signal = self._agreed if self._many else self._interruption.requested
        reason = f"{signal} came" if signal else None
        if train.stop_at_step is not None and step >= train.stop_at_step:
            reason = f"stop_at_step is {train.stop_at_step}"
        last = step == train.num_steps
        fresh = step > self._started
        evaluate = (fresh and (step % train.eval_every == 0 or last)) or not position.evaluated
        save = fresh and (step % train.checkpoint_every == 0 or last or reason is not None)
        if not (evaluate or save or reason):
            return
        self._collect(0)
        if evaluate:
            try:
                save |= self._evaluate(state)
            except Interrupted as interrupted:
                self._save(state, evaluated=False)
                raise self._interrupted(f"{self._interruption.requested} came") from interrupted
        if save or (evaluate and position.stopped):
            self._save(state)
        self._clock = time.perf_counter()
        if reason and not last and position.stopped is None:
            raise self._interrupted(reason)

    def _evaluate(self, state: TrainState) -> bool:
        """Evaluates the validation split; whether it is the best so far."""
        position = self.position
        watch = self._progress.watch("validation", self.check)
        metrics = self._engine.evaluate(self._engine.variables(state), self._data, "validation", watch)
        # Another metric may be undefined on this split, as the mean of nothing is.
        decisive = ("loss", self._run.select_metric)
        bad = [f"{name} is {metrics[name]}" for name in decisive if not math.isfinite(metrics[name])]
        if bad:
            raise self._diverged(position.step, f"validation {bad[0]}", in_training=False)
        kept = without_nan(metrics, f"validation at step {position.step}")
        self._row("validation", kept)
        position.evaluated = True
        value, best = metrics[self._run.select_metric], position.best
        sign = 1 if self._run.select_mode == "max" else -1
        better = best is None or sign * value > sign * best["value"]
        if better:
            position.best = {"step": position.step, "value": value, "metrics": kept}
        numbers = ", ".join(f"{name} {metrics[name]:.4f}" for name in metrics if name not in COUNTS)
        self._progress.say(f"step {position.step}: validation {numbers}{' (best so far)' if better else ''}")
        position.stopped = self._callbacks.evaluation(self._now(), metrics)
        if position.stopped is not None:
            self._progress.say(f"ends after step {position.step} of {self._train.num_steps}: {position.stopped}")
        return better

    def _row(self, split: str, values: Mapping[str, Any]) -> None:
        position = self.position
        if self._writer is not None:
            times = {"train_flops": position.train_flops, "seconds": round(position.seconds, 6)}
            known = without_nan(values, f"{split} at step {position.step}")
            self._writer.write({"step": position.step, "split": split, **known, **times})

    def _save(self, state: TrainState, evaluated: bool = True) -> None:
        position = self.position
        position.evaluated = evaluated
        if self._writer is not None:
            self._writer.sync()
        position.callbacks = self._callbacks.state()
        trees = self._engine.checkpoint(state)
        self._checkpoints.save(position.step, trees, dataclasses.asdict(position), self._feed.state)
        self._saved = position.step

    def _check_metric(self, report: Mapping[str, Any]) -> None:
        totals = Totals()
        totals.add(report)
        known = totals.means(self._engine.finish)
        if (metric := self._run.select_metric) not in known:
            raise ValueError(f"select_metric must be one of {', '.join(known)}, got {metric!r}")

    def _diverged(self, step: int, what: str, in_training: bool = True) -> Diverged:
        steps = self._checkpoints.steps()
        good = f"step {steps[-1]} ({self._checkpoints.folder / str(steps[-1])})" if steps else "none"
        return Diverged(f"{what} at step {step}; last good checkpoint: {good}", step, in_training)

    def _interrupted(self, reason: str) -> Interrupted:
        saved = (
            f"after step {self._saved} of {self._train.num_steps}, saved" if self._saved else "before the first step"
        )
        stop = self._train.stop_at_step
        at_stop = not self._interruption.requested and stop is not None and self._saved >= stop
        way = "the same command with a later stop_at_step, or None," if at_stop else "the same command"
        return Interrupted(f"{reason}: stopped {saved}; {way} goes on from there", self._saved)
