"""What is called while a run trains: early stopping, an average of the parameters, or a class of one's own.

`train.callbacks` in a config lists them: `("ema", {"name": "early_stopping", "patience": 3}, "my_package:Mine")`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xformer import lookup
from xformer.checks import check_integer
from xformer.train.errors import CallbackFailed


@dataclasses.dataclass(frozen=True)
class Run:
    """The run that a callback is called in.

    Attributes:
      name, workdir: of the run.
      step: optimizer steps done.
      num_steps: steps that the config asks for.
      select_metric: the validation metric that decides which checkpoint is the best.
      select_mode: "max" or "min": whether more or less of it is better.
      is_main: whether this is process 0, the one that should write files.
    """

    name: str
    workdir: Path
    step: int
    num_steps: int
    select_metric: str
    select_mode: str
    is_main: bool


class Callback:
    """Base of all callbacks: override what is needed. A new object is made each time that a run starts or goes on.

    The `on_` methods run in Python, in every process of the run, and must do the same in each. What they remember goes
    into `state`, which is saved with every checkpoint, so that a run that goes on is the run that never stopped.

    Arrays that change with every step go through `init_arrays`, `update_arrays` and `evaluation_params` instead: pure
    functions that become part of the compiled step, on every mesh and under pmap. They are saved with the optimizer.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step of this process; `run.step` is above 0 where the run goes on."""

    def on_step(self, run: Run, metrics: Mapping[str, float]) -> None:
        """After each step, with the step's own means of the task's metrics, its learning rate and its norms.

        Steps are reported a little late: the device is already busy with the next.
        """

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> str | None:
        """After each evaluation of the validation split. A reason, in words, ends the run as finished."""
        return None

    def on_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """After `result.json` was written, once for a run that finishes; not where it is interrupted or fails."""

    def state(self) -> dict[str, Any]:
        """What the object remembers, as JSON can hold it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave."""

    def init_arrays(self, params: Any) -> Any:
        """A pytree of arrays at step 0; `()` for none."""
        return ()

    def update_arrays(self, arrays: Any, params: Any, step: jax.Array) -> Any:
        """The arrays after a step: `params` are the new parameters, `step` (int32) counts it, from 1."""
        return arrays

    def evaluation_params(self, arrays: Any, params: Any) -> Any:
        """The parameters that are evaluated and that `xformer.load` gives; training goes on with its own.

        Called where `init_arrays` gives an array.
        """
        return params


class EarlyStopping(Callback):
    """Ends a run when the metric that it selects by has stopped getting better.

    Args:
      patience: evaluations in a row without a better value, after which the run ends.
      min_delta: a value is better if it beats the best so far by more than this.
    """

    def __init__(self, patience: int = 5, min_delta: float = 0.0) -> None:
        check_integer("EarlyStopping.patience", patience, at_most=2**31 - 1)
        if not 0 <= min_delta < math.inf:
            raise ValueError(f"EarlyStopping.min_delta must be at least 0, got {min_delta!r}")
        self.patience, self.min_delta = patience, min_delta
        self._best: float | None = None
        self._best_step = self._waited = 0

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> str | None:
        value, rising = metrics[run.select_metric], run.select_mode == "max"
        gain = math.inf if self._best is None else (value - self._best if rising else self._best - value)
        gain = -math.inf if math.isnan(value) else gain
        if gain > self.min_delta:
            self._best, self._best_step, self._waited = value, run.step, 0
            return None
        self._waited += 1
        if self._waited < self.patience:
            return None
        best = "" if self._best is None else f"; its best was {self._best:.4f} at step {self._best_step}"
        return (
            f"validation {run.select_metric} has not {'risen' if rising else 'fallen'} by more than {self.min_delta:g} "
            f"in {self.patience} evaluations{best}"
        )

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "waited": self._waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._best, self._best_step, self._waited = state["best"], state["best_step"], state["waited"]


class ExponentialMovingAverage(Callback):
    """An average of the parameters over the steps, which is what gets evaluated, selected, saved and loaded.

    After step t it is the mean of the parameters after steps 1 to t with weights `decay ** (t - s)`; the initial
    parameters have no part in it (the bias correction of Kingma and Ba 2015, section 3, applied to parameters). In
    float32 for float32 parameters. Constants (`xformer.nn.Constant`) are not averaged.

    Args:
      decay: above 0 and below 1; about the last 1 / (1 - decay) steps count.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"ExponentialMovingAverage.decay must be above 0 and below 1, got {decay!r}")
        self.decay = decay

    def init_arrays(self, params: Any) -> Any:
        return params

    def update_arrays(self, arrays: Any, params: Any, step: jax.Array) -> Any:
        # (1 - decay) / (1 - decay ** step), which is 1 at step 1, without cancellation for a decay close to 1.
        share = (1 - self.decay) / -jnp.expm1(step.astype(jnp.float32) * math.log(self.decay))
        return jax.tree.map(lambda mean, new: mean + share.astype(mean.dtype) * (new - mean), arrays, params)

    def evaluation_params(self, arrays: Any, params: Any) -> Any:
        return arrays


CALLBACKS: lookup.Table[type[Callback]] = lookup.Table(
    {"early_stopping": EarlyStopping, "ema": ExponentialMovingAverage}, kind=Callback
)
"""The callbacks by the name a config gives them."""


def build(config: Mapping[str, Any]) -> Callback:
    """The callback of `{"name": ..., **arguments}`; the name is one of `CALLBACKS` or `"package.module:Class"`.

    Raises ValueError for a name or an argument that is not taken.
    """
    arguments = dict(config)
    return CALLBACKS.find("name", arguments.pop("name", None))(**arguments)


class Callbacks:
    """The callbacks of one run, called in order; what one of them raises is one line that names it.

    Args:
      callbacks: each with the name that messages give it.
    """

    def __init__(self, callbacks: Sequence[tuple[str, Callback]] = ()) -> None:
        self._named = tuple(callbacks)

    def __bool__(self) -> bool:
        return bool(self._named)

    def start(self, run: Run) -> None:
        """Calls `on_start`, and raises CallbackFailed for a state that can't be saved, before anything is computed."""
        for name, own in self._named:
            _call(name, own, "on_start", run)
        self.state()

    def step(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Calls `on_step`."""
        for name, own in self._named:
            _call(name, own, "on_step", run, dict(metrics))

    def evaluation(self, run: Run, metrics: Mapping[str, float]) -> str | None:
        """Calls `on_evaluation` of all; the reason to end the run, if one of them gave any, with its name."""
        reasons = [(name, _call(name, own, "on_evaluation", run, dict(metrics))) for name, own in self._named]
        return next((f"{name}: {' '.join(str(reason).split())}" for name, reason in reasons if reason), None)

    def end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Calls `on_end`."""
        for name, own in self._named:
            _call(name, own, "on_end", run, dict(result))

    def state(self) -> list[dict[str, Any]]:
        """What each remembers. Raises CallbackFailed where JSON can't hold it."""
        states = []
        for name, own in self._named:
            states.append(_call(name, own, "state"))
            try:
                json.dumps(states[-1], allow_nan=False)
            except (TypeError, ValueError) as error:
                message = f"callback {name!r}: state gives what JSON can't hold: {' '.join(str(error).split())}"
                raise CallbackFailed(message) from error
        return states

    def load_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Gives each what it remembered."""
        for (name, own), state in zip(self._named, states, strict=True):
            _call(name, own, "load_state", state)

    def init_arrays(self, params: Any) -> tuple[Any, ...]:
        """The arrays of each at step 0; `()` where none has any, so that states and checkpoints are as without."""
        arrays = tuple(_call(name, own, "init_arrays", params) for name, own in self._named)
        arrays = jax.tree.map(jnp.copy, arrays)  # one that is also a parameter would be given away twice
        return arrays if jax.tree.leaves(arrays) else ()

    def update_arrays(self, arrays: tuple[Any, ...], params: Any, step: jax.Array) -> tuple[Any, ...]:
        """The arrays of each after a step; traced."""
        named = zip(self._named, arrays, strict=False)  # the arrays of all, or `()`
        return tuple(_call(name, own, "update_arrays", one, params, step) for (name, own), one in named)

    def evaluation_params(self, arrays: tuple[Any, ...], params: Any) -> Any:
        """The parameters that are evaluated: those that the last callback gives; traced."""
        for (name, own), one in zip(self._named, arrays, strict=False):
            params = _call(name, own, "evaluation_params", one, params)
        return params


def _call(name: str, callback: Callback, method: str, *args: Any) -> Any:
    return lookup.guarded(f"callback {name!r}: {method}", lambda: getattr(callback, method)(*args), CallbackFailed)
