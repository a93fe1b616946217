"""One class a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import family
from xformer.tasks.classification import class_targets, cross_entropy
from xformer.tasks.family import Family, Metric, Sums

Array = jax.Array
NO_LABEL = -1
"""The target of a place without a label: padding, and tokens that nothing is asked of."""
MOST_SHARES = 256  # classes; every result holds the share of each


@dataclasses.dataclass(frozen=True)
class TokenClassification(Family):
    """Softmax over classes at each token: outputs float [batch, length, classes], targets int32 [batch, length].

    Places with the target `NO_LABEL` don't count. Every other token weighs the same, so `loss` and `accuracy` are means
    over tokens; `macro_f1` is the mean of F1 over the classes that occur or are predicted.
    """

    better: ClassVar[Mapping[str, str]] = MappingProxyType({"accuracy": "max", "macro_f1": "max", "loss": "min"})
    guesser: ClassVar[str] = "answers the commonest class of the training split at each token"

    def targets(self, batch_size: int, length: int, num_outputs: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, length), jnp.int32)

    def metrics(self, outputs: Array, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """`loss` and `accuracy` of each example: float32 [batch], means over its labelled tokens, weighted by their
        number; and `f1`: [3, classes] sums of hits, false alarms and misses.

        `weights` may also be [batch, length], a weight for each token. A target that is no class makes the example's
        values NaN where it can't be refused.

        Raises:
          ValueError: targets that are no integers or don't match outputs, and outside of jit one that is no class.
        """
        targets, num_classes = batch["targets"], outputs.shape[-1]
        if targets.shape != outputs.shape[:-1]:
            raise ValueError(f"targets must be [batch, length] as outputs {outputs.shape}, got {targets.shape}")
        weights = jnp.where(targets == NO_LABEL, 0, family.spread(batch["weights"], targets))
        targets, wrong = class_targets(targets, num_classes, weights > 0)
        logits = family.clear(outputs, weights)
        loss, correct = cross_entropy(logits, targets)
        loss, correct = (jnp.where(wrong, jnp.nan, values) for values in (loss, correct))
        by_class = lambda classes, values: jnp.zeros(num_classes).at[classes].add(values)
        hits, others = weights * correct, weights * (1 - correct)
        counts = [by_class(targets, hits), by_class(jnp.argmax(logits, axis=-1), others), by_class(targets, others)]
        total = weights.sum(axis=1)
        mean = lambda values: ((weights * values).sum(axis=1) / jnp.where(total > 0, total, 1), total)
        return {"loss": mean(loss), "accuracy": mean(correct), "f1": jnp.stack(counts)}

    def finish(self, sums: Sums) -> dict[str, float]:
        counts = np.asarray(sums["f1"], np.float64)
        seen = counts.sum(axis=0) > 0
        scores = family.f1_scores(counts)[seen]
        return super().finish(sums) | {"macro_f1": float(scores.mean()) if seen.any() else 0.0}

    def spell(self, label: Any, class_names: Sequence[str]) -> str:
        """The classes of the tokens that have one, in order."""
        return " ".join(class_names[index] for index in label if index != NO_LABEL)

    def predict(self, outputs: Array) -> Array:
        return jax.nn.softmax(outputs, axis=-1)

    def guess(self, labels: np.ndarray, num_outputs: int, center: float = 0.0, scale: float = 1.0) -> np.ndarray:
        del center, scale
        return family.log_shares(np.bincount(labels[labels >= 0], minlength=num_outputs))

    def facts(self, labels: np.ndarray, num_outputs: int) -> dict[str, Any]:
        if num_outputs > MOST_SHARES:
            return {}
        counts = np.bincount(labels[labels >= 0], minlength=num_outputs)
        return {"label_shares": [round(float(share), 6) for share in counts / max(counts.sum(), 1)]}
