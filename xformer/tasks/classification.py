"""One class an example."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import family
from xformer.tasks.family import Family, Metric, Sums

Array = jax.Array
ClassWeights = Literal["none", "balanced"]
NUM_BINS = 15  # of the calibration error, as in its paper


@dataclasses.dataclass(frozen=True)
class Classification(Family):
    """Softmax over classes: outputs float [batch, classes], targets int32 [batch].

    `macro_f1` is the mean of F1 over the classes that occur or are predicted. `calibration_error` is the expected
    calibration error (Guo et al. 2017, equation 3): the mean distance between the probability of the predicted class
    and the share of those predictions that are right, over 15 bins of equal width.

    class_weights: "balanced": the loss of an example counts examples / (classes x examples of its class), of the
    training split, so that every class has the same say in the mean, whatever its size. No other metric is weighted.
    """

    class_weights: ClassWeights = "none"

    better: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"accuracy": "max", "macro_f1": "max", "calibration_error": "min", "loss": "min"}
    )
    guesser: ClassVar[str] = "answers the commonest class of the training split"

    def targets(self, batch_size: int, length: int, num_outputs: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size,), jnp.int32)

    def metrics(self, outputs: Array, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """The cross-entropy `loss` in nats and the `accuracy` of each example, float32 [batch]; `f1`, [3, classes] sums
        of hits, false alarms and misses; `calibration`, [3, bins] sums of examples, probabilities and hits.

        A target that is no class makes them NaN where it can't be refused.

        Raises:
          ValueError: targets that are no integers, and outside of jit a target that is no class.
        """
        targets, weights = batch["targets"], batch["weights"].astype(jnp.float32)
        targets, wrong = class_targets(targets, outputs.shape[-1], weights > 0)
        logits = family.clear(outputs, weights)
        loss, correct = cross_entropy(logits, targets)
        loss, correct = (jnp.where(wrong, jnp.nan, values) for values in (loss, correct))
        by_class = lambda classes, values: jnp.zeros(outputs.shape[-1]).at[classes].add(values)
        hits, others, predicted = weights * correct, weights * (1 - correct), jnp.argmax(logits, axis=-1)
        counts = [by_class(targets, hits), by_class(predicted, others), by_class(targets, others)]
        confidence = jnp.max(jax.nn.softmax(logits), axis=-1)
        bins = jnp.clip((confidence * NUM_BINS).astype(jnp.int32), 0, NUM_BINS - 1)
        by_bin = [jnp.zeros(NUM_BINS).at[bins].add(values) for values in (weights, weights * confidence, hits)]
        counted = weights * batch["loss_weights"] if "loss_weights" in batch else weights
        return {
            "loss": (loss, counted),
            "accuracy": (correct, weights),
            "f1": jnp.stack(counts),
            "calibration": jnp.stack(by_bin),
        }

    def finish(self, sums: Sums) -> dict[str, float]:
        counts = np.asarray(sums["f1"], np.float64)
        seen = counts.sum(axis=0) > 0
        examples, confidences, hits = np.asarray(sums["calibration"], np.float64)
        error = family.mean(float(np.abs(hits - confidences).sum()), float(examples.sum()))
        macro_f1 = family.mean(float(family.f1_scores(counts)[seen].sum()), float(seen.sum()))
        return super().finish(sums) | {"macro_f1": macro_f1, "calibration_error": error}

    def example_weights(self, labels: np.ndarray, num_outputs: int) -> np.ndarray | None:
        if self.class_weights == "none":
            return None
        counts = np.bincount(labels, minlength=num_outputs)
        return np.where(counts, len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1)), 1).astype(np.float32)

    def details(self, records: Mapping[str, np.ndarray], class_names: Sequence[str]) -> dict[str, Any]:
        """`classes`: precision, recall, F1 and number of examples by name; `confusion`: counts, a row for each target
        and a column for each prediction.
        """
        targets, predictions = records["targets"], records["predictions"]
        confusion = np.zeros((len(class_names), len(class_names)), np.int64)
        np.add.at(confusion, (targets, predictions), 1)
        hits = confusion.diagonal()
        counts = np.stack([hits, confusion.sum(axis=0) - hits, confusion.sum(axis=1) - hits])
        return {"classes": family.by_class(counts, class_names), "confusion": confusion.tolist()}

    def records(self, outputs: Array, batch: Mapping[str, Any]) -> dict[str, Array]:
        return {"targets": batch["targets"], "predictions": jnp.argmax(outputs, axis=-1).astype(jnp.int32)}

    def predict(self, outputs: Array) -> Array:
        return jax.nn.softmax(outputs, axis=-1)

    def guess(self, labels: np.ndarray, num_outputs: int, center: float = 0.0, scale: float = 1.0) -> np.ndarray:
        del center, scale
        return family.log_shares(np.bincount(labels, minlength=num_outputs))

    def facts(self, labels: np.ndarray, num_outputs: int) -> dict[str, Any]:
        shares = np.bincount(labels, minlength=num_outputs) / max(len(labels), 1)
        return {
            "label_shares": [round(float(share), 6) for share in shares],
            "majority_accuracy": round(float(shares.max()), 6),
        }


def class_targets(targets: Array, num_classes: int, counted: Array) -> tuple[Array, Array]:
    """(targets that can be used as indices, which of the counted ones are no class).

    Raises ValueError for targets that are no integers and, outside of jit, for one that is no class.
    """
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integers from 0 to {num_classes - 1}, got dtype {targets.dtype}")
    outside = (targets < 0) | (targets >= num_classes)
    family.refuse(targets, outside & counted, f"from 0 to {num_classes - 1}")
    return jnp.where(outside, 0, targets), outside & counted  # a negative index would count from the end


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """(cross-entropy in nats, 1 where the likeliest class is the target), float32 in the shape of the targets."""
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return loss, (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
