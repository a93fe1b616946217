"""What tasks of one kind share: their loss and metrics, the guess of a model that reads nothing, and their words."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Metric = tuple[Array, Array] | Array
"""(values, weights), one of each an example; or sums over the batch, for what is no mean over examples."""

Sums = Mapping[str, tuple[float, float] | np.ndarray]
"""The metrics of many batches: (sum of values x weights, sum of weights), or the sums, in double precision."""


@dataclasses.dataclass(frozen=True)
class Family(abc.ABC):
    """A kind of target. A value without state: everything is a pure function of arrays.

    A batch has `targets` [batch, ...] and `weights` [batch], 0 for fillers, which add nothing to any metric, even where
    the model's outputs for them are not finite.

    Attributes:
      better: whether less ("min") or more ("max") of a metric is better; the first is what a run selects by.
      guesser: in words, what `guess` answers.
      extras: further keys of a batch, float32 [batch].
    """

    better: ClassVar[Mapping[str, str]]
    guesser: ClassVar[str]
    extras: ClassVar[tuple[str, ...]] = ()

    def num_outputs(self, class_names: Sequence[str]) -> int:
        """Numbers that the model gives, for an example or for a token."""
        return len(class_names)

    @abc.abstractmethod
    def targets(self, batch_size: int, length: int, num_outputs: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a batch's `targets`."""

    @abc.abstractmethod
    def metrics(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """The metrics of a batch; `loss` is a pair, and its weighted mean is what training minimises."""

    def finish(self, sums: Sums) -> dict[str, float]:
        """Scalars from the sums of many batches: here the weighted mean of each pair, NaN without any weight."""
        return {name: mean(*entry) for name, entry in sums.items() if isinstance(entry, tuple)}

    def records(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Array]:
        """What is kept of each test example besides its metrics, [batch, ...]: targets and predictions where small."""
        del outputs, batch
        return {}

    def spell(self, label: Any, class_names: Sequence[str]) -> str:
        """A stored label (`Ragged.label`) in words; here the name of a class."""
        return str(class_names[int(label)])

    def example_weights(self, labels: np.ndarray, num_outputs: int) -> np.ndarray | None:
        """What an example's loss counts by its class, float32 [num_outputs], from the labels of the training split.

        A batch has it as `loss_weights`, float32 [batch]. None: all count the same, and a batch has no such key.
        """
        del labels, num_outputs
        return None

    def details(self, records: Mapping[str, np.ndarray], class_names: Sequence[str]) -> dict[str, Any]:
        """What no single number says of the test split, JSON-able, from what `records` kept of all its examples."""
        del records, class_names
        return {}

    @abc.abstractmethod
    def predict(self, outputs: Any) -> Array:
        """The model's outputs as what a user reads: probabilities, or numbers."""

    @abc.abstractmethod
    def guess(self, labels: np.ndarray, num_outputs: int, center: float = 0.0, scale: float = 1.0) -> np.ndarray:
        """The constant outputs, for one example or one token, that fit the stored labels of the training split."""

    def facts(self, labels: np.ndarray, num_outputs: int) -> dict[str, Any]:
        """What the labels of a split are like, JSON-able: fact -> value."""
        del labels, num_outputs
        return {}


def mean(total: float, weight: float) -> float:
    """The weighted mean; NaN where nothing weighed anything."""
    return float(total) / float(weight) if weight else math.nan


def clear(outputs: Array, weights: Array) -> Array:
    """Outputs in float32, zeros for fillers: the gradient of what is not finite would be no zero otherwise."""
    return jnp.where(spread(weights, outputs) > 0, outputs.astype(jnp.float32), 0)


def spread(weights: Array, like: Array) -> Array:
    """Weights with as many dimensions as `like`, in float32."""
    return weights.astype(jnp.float32).reshape(weights.shape + (1,) * (like.ndim - weights.ndim))


def refuse(targets: Array, wrong: Array, takes: str) -> None:
    """Raises ValueError for the first wrong target; under jit, where values are not known, nothing."""
    if not isinstance(wrong, jax.core.Tracer) and bool(wrong.any()):
        raise ValueError(f"targets must be {takes}, got {targets[wrong].reshape(-1)[0].item()}")


def f1_scores(counts: np.ndarray) -> np.ndarray:
    """F1 by class, 0 where a class neither occurs nor is predicted; counts: [3, classes], as `f1_counts` makes them."""
    hits, false_alarms, misses = np.asarray(counts, np.float64)
    total = 2 * hits + false_alarms + misses
    return np.divide(2 * hits, total, out=np.zeros_like(total), where=total > 0)


def by_class(counts: np.ndarray, class_names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Precision, recall, F1 and the number of examples of each class, 0 where nothing was predicted or there was none.

    counts: [3, classes] of hits, false alarms and misses.
    """
    hits, false_alarms, misses = np.asarray(counts, np.float64)
    share = lambda total: np.divide(hits, total, out=np.zeros_like(hits), where=total > 0).round(6).tolist()
    columns = share(hits + false_alarms), share(hits + misses), f1_scores(counts).round(6).tolist(), hits + misses
    return {
        name: {"precision": precision, "recall": recall, "f1": f1, "examples": int(examples)}
        for name, precision, recall, f1, examples in zip(class_names, *columns, strict=True)
    }


def log_shares(counts: np.ndarray) -> np.ndarray:
    """Logits that say each class is as frequent as counted; one more of each, so that none is impossible."""
    counts = counts.astype(np.float64) + 1
    return np.log(counts / counts.sum()).astype(np.float32)
