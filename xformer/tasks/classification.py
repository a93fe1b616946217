"""One class an example."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import family
from xformer.tasks.family import Family, Metric

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Classification(Family):
    """Softmax over classes: outputs float [batch, classes], targets int32 [batch]."""

    better: ClassVar[Mapping[str, str]] = MappingProxyType({"accuracy": "max", "loss": "min"})
    guesser: ClassVar[str] = "answers the commonest class of the training split"

    def targets(self, batch_size: int, length: int, num_outputs: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size,), jnp.int32)

    def metrics(self, outputs: Array, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """The cross-entropy `loss` in nats and the `accuracy` of each example, float32 [batch].

        A target that is no class makes both NaN where it can't be refused.

        Raises:
          ValueError: targets that are no integers, and outside of jit a target that is no class.
        """
        targets, weights = batch["targets"], batch["weights"].astype(jnp.float32)
        targets, wrong = class_targets(targets, outputs.shape[-1], weights > 0)
        logits = family.clear(outputs, weights)
        loss, correct = cross_entropy(logits, targets)
        loss, correct = (jnp.where(wrong, jnp.nan, values) for values in (loss, correct))
        return {"loss": (loss, weights), "accuracy": (correct, weights)}

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
