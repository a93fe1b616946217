"""A metric beside those of the task."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from xformer.tasks import Metric


class Near(Metric):
    """The share of examples whose class is among the `k` likeliest."""

    better = "max"

    def __init__(self, k: int = 2) -> None:
        if k < 1:
            raise ValueError(f"Near.k must be at least 1, got {k}")
        self.k, self.name = k, f"top{k}"

    def of_batch(self, logits: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_class = jnp.take_along_axis(logits, batch["targets"][:, None], axis=-1)
        return jnp.sum(logits > of_class, axis=-1) < self.k, batch["weights"]
