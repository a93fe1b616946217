"""Any number of labels an example."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import family
from xformer.tasks.family import Family, Metric, Sums

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class MultiLabel(Family):
    """One sigmoid a label: outputs float [batch, labels], targets bool [batch, labels].

    `loss` is the mean over labels of the binary cross-entropy, `accuracy` the share of examples with exactly the right
    set; a label is predicted where its probability is above one half. `macro_f1` is the mean of F1 over all labels, 0
    for one that neither occurs nor is predicted; `micro_f1` is F1 over all (example, label) pairs.
    """

    better: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"macro_f1": "max", "micro_f1": "max", "accuracy": "max", "loss": "min"}
    )
    guesser: ClassVar[str] = "answers the labels that most texts of the training split have"

    def targets(self, batch_size: int, length: int, num_outputs: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, num_outputs), jnp.bool_)

    def metrics(self, outputs: Array, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """`loss` and `accuracy` of each example, float32 [batch], and `f1`: [3, labels] sums of hits, false alarms and
        misses.

        A target that is neither 0 nor 1 makes them NaN where it can't be refused.

        Raises:
          ValueError: targets of another shape than outputs, and outside of jit a target that is neither 0 nor 1.
        """
        targets, weights = batch["targets"], batch["weights"].astype(jnp.float32)
        if targets.shape != outputs.shape:
            raise ValueError(f"targets must be [batch, labels] as outputs {outputs.shape}, got {targets.shape}")
        held = targets.astype(jnp.float32)
        outside = (held != 0) & (held != 1) & (weights[:, None] > 0)
        family.refuse(targets, outside, "0 or 1")
        logits, wrong = family.clear(outputs, weights), outside.any(axis=1)
        loss = jnp.mean(jax.nn.softplus(logits) - held * logits, axis=1)
        predicted, held = logits > 0, held > 0
        exact = jnp.all(predicted == held, axis=1).astype(jnp.float32)
        loss, exact = (jnp.where(wrong, jnp.nan, values) for values in (loss, exact))
        pairs = jnp.stack([predicted & held, predicted & ~held, ~predicted & held]).astype(jnp.float32)
        counts = jnp.einsum("kbc,b->kc", pairs, weights, precision="highest")
        counts = jnp.where(wrong.any(), jnp.nan, counts)
        return {"loss": (loss, weights), "accuracy": (exact, weights), "f1": counts}

    def finish(self, sums: Sums) -> dict[str, float]:
        counts = np.asarray(sums["f1"], np.float64)
        micro = family.f1_scores(counts.sum(axis=1, keepdims=True))[0]
        return super().finish(sums) | {"macro_f1": float(family.f1_scores(counts).mean()), "micro_f1": float(micro)}

    def records(self, outputs: Array, batch: Mapping[str, Any]) -> dict[str, Array]:
        return {"targets": batch["targets"], "predictions": outputs > 0}

    def details(self, records: Mapping[str, np.ndarray], class_names: Sequence[str]) -> dict[str, Any]:
        """`classes`: precision, recall, F1 and number of texts by label."""
        held, predicted = records["targets"].astype(bool), records["predictions"].astype(bool)
        counts = np.stack([(predicted & held).sum(0), (predicted & ~held).sum(0), (~predicted & held).sum(0)])
        return {"classes": family.by_class(counts, class_names)}

    def spell(self, label: Any, class_names: Sequence[str]) -> str:
        return ", ".join(name for name, held in zip(class_names, label, strict=True) if held) or "no label"

    def predict(self, outputs: Array) -> Array:
        return jax.nn.sigmoid(outputs)

    def guess(self, labels: np.ndarray, num_outputs: int, center: float = 0.0, scale: float = 1.0) -> np.ndarray:
        del num_outputs, center, scale
        shares = (labels.sum(axis=0, dtype=np.float64) + 1) / (len(labels) + 2)
        return np.log(shares / (1 - shares)).astype(np.float32)

    def facts(self, labels: np.ndarray, num_outputs: int) -> dict[str, Any]:
        shares = np.asarray(labels).mean(axis=0)
        return {"label_shares": [round(float(share), 6) for share in shares]}
