"""A number an example."""

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
class Regression(Family):
    """Squared error: outputs float [batch, 1] or [batch], targets float32 [batch].

    Models learn numbers of a usual size, so a batch may hold `center` and `scale`, float32 [batch] (mean and standard
    deviation of the training split): targets and outputs are then (number - center) / scale. `loss` is the squared
    error of those; `mean_absolute_error` is in the user's own units; `r2` is the share of the variance that is
    explained, 0 for always answering the mean of the split.
    """

    better: ClassVar[Mapping[str, str]] = MappingProxyType({"r2": "max", "mean_absolute_error": "min", "loss": "min"})
    guesser: ClassVar[str] = "answers the mean of the training split"
    extras: ClassVar[tuple[str, ...]] = ("center", "scale")

    def num_outputs(self, class_names: Sequence[str]) -> int:
        return 1

    def targets(self, batch_size: int, length: int, num_outputs: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size,), jnp.float32)

    def metrics(self, outputs: Array, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """`loss` and `mean_absolute_error` of each example, float32 [batch], and the sums [3] that `r2` is made of.

        Raises:
          ValueError: outputs that are not one number an example, targets that are no real numbers, and outside of jit a
            target that is not finite.
        """
        targets, weights = batch["targets"], batch["weights"].astype(jnp.float32)
        if not jnp.issubdtype(targets.dtype, jnp.number) or jnp.issubdtype(targets.dtype, jnp.complexfloating):
            raise ValueError(f"targets must be numbers, got dtype {targets.dtype}")
        if outputs.size != targets.size:
            raise ValueError(f"outputs must be one number for each of {targets.shape}, got {outputs.shape}")
        targets = targets.astype(jnp.float32)
        family.refuse(targets, ~jnp.isfinite(targets) & (weights > 0), "finite")
        targets, outputs = (family.clear(x.reshape(weights.shape), weights) for x in (targets, outputs))
        error = outputs - targets
        sums = jnp.stack([(weights * x).sum() for x in (targets, targets**2, error**2)])
        absolute = jnp.abs(error) * batch.get("scale", jnp.ones_like(weights))
        return {"loss": (error**2, weights), "mean_absolute_error": (absolute, weights), "r2": sums}

    def finish(self, sums: Sums) -> dict[str, float]:
        total, squares, errors = np.asarray(sums["r2"], np.float64)
        loss = sums["loss"]
        assert isinstance(loss, tuple)
        # Targets are centred, so this difference loses nothing that matters.
        spread = squares - total**2 / loss[1] if loss[1] else 0.0
        r2 = 1 - errors / spread if spread > 1e-9 * squares else float(errors == 0)
        return super().finish(sums) | {"r2": float(r2)}

    def records(self, outputs: Array, batch: Mapping[str, Any]) -> dict[str, Array]:
        scale, center = batch.get("scale", 1.0), batch.get("center", 0.0)
        own = lambda x: x.astype(jnp.float32).reshape(batch["weights"].shape) * scale + center
        return {"targets": own(batch["targets"]), "predictions": own(outputs)}

    def spell(self, label: Any, class_names: Sequence[str]) -> str:
        return f"{float(label):g}"

    def predict(self, outputs: Array) -> Array:
        return outputs.reshape(outputs.shape[0])

    def guess(self, labels: np.ndarray, num_outputs: int, center: float = 0.0, scale: float = 1.0) -> np.ndarray:
        return np.full(num_outputs, (np.mean(labels, dtype=np.float64) - center) / scale, np.float32)

    def facts(self, labels: np.ndarray, num_outputs: int) -> dict[str, Any]:
        values = {"mean": np.mean(labels), "std": np.std(labels), "min": np.min(labels), "max": np.max(labels)}
        return {"targets": {name: float(value) for name, value in values.items()}}
