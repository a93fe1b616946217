"""What every task offers: data made once, then opened; batches; loss and metrics. No model and no config here."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xformer.tasks.dataset import TaskData
from xformer.tasks.location import Progress


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """Classification of token sequences. A task is a value: its fields are checked when it is made, no file read."""

    @property
    def better(self) -> Mapping[str, str]:
        """Whether less ("min") or more ("max") is better, by metric: a run keeps the best checkpoint by it."""
        return {"accuracy": "max", "loss": "min"}

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Length in tokens of the model's inputs: the `max_len` of the opened data, known before there is any."""

    @abc.abstractmethod
    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        """Makes the data if it isn't there. Safe to repeat, to interrupt and to run in two processes at once.

        Raises DataMissing if it can't be made here, ValueError if the user's own files are at fault.
        """

    @abc.abstractmethod
    def open(self, data_dir: str | Path | None = None) -> TaskData:
        """The data that `prepare` made. Raises DataMissing if it isn't there."""

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments: `inputs` int32 [batch, length], `mask` bool [batch, length], True at real tokens."""
        return {"inputs": batch["inputs"], "mask": batch["inputs"] > 0}

    def metrics(self, outputs: jax.Array, batch: Mapping[str, Any]) -> dict[str, tuple[jax.Array, jax.Array]]:
        """(sum, weight) of the softmax cross-entropy `loss` in nats and of the `accuracy`, float32 scalars.

        outputs: logits [batch, num_classes]; batch: `targets` int32 [batch], `weights` float32 [batch], 0 for fillers.
        The metric of a whole data set is the sum of the sums over the sum of the weights; a filler adds nothing, even
        if its logits are not finite. A target that is no class makes both sums NaN where it can't be refused.

        Raises ValueError for targets that are no integers and, outside of jit, for a target that is no class.
        """
        targets, weights = batch["targets"], batch["weights"].astype(jnp.float32)
        num_classes = outputs.shape[-1]
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            raise ValueError(f"targets must be integers from 0 to {num_classes - 1}, got dtype {targets.dtype}")
        outside = (targets < 0) | (targets >= num_classes)
        wrong = outside & (weights > 0)
        if not isinstance(wrong, jax.core.Tracer) and bool(wrong.any()):
            raise ValueError(f"targets must be from 0 to {num_classes - 1}, got {int(targets[wrong][0])}")
        targets = jnp.where(outside, 0, targets)  # a negative index would count from the end
        # Not only the loss: the gradient of a logit that isn't finite would be no zero.
        logits = jnp.where(weights[:, None] > 0, outputs.astype(jnp.float32), 0)
        loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=-1)[:, 0]
        correct = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
        loss, correct = (jnp.where(wrong, jnp.nan, values) for values in (loss, correct))
        total = weights.sum()
        return {"loss": ((loss * weights).sum(), total), "accuracy": ((correct * weights).sum(), total)}
