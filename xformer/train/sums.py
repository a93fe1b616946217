"""Metrics as sums: added up over micro-batches, devices, processes and steps, and divided once, at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Metrics = Mapping[str, tuple[Array, Array] | Array]
"""What a task gives for a batch: (values, weights), one of each an example, or an array of sums over the batch."""


def reduce(metrics: Metrics) -> dict[str, Any]:
    """(sum of values x weights, sum of weights) of each pair, float32 scalars; arrays of sums as they are.

    A value of weight 0 adds nothing, even if it is not finite.

    Raises:
      ValueError: there is no pair `loss`, or the pair of a metric is not one value and weight an example.
    """
    if not isinstance(metrics.get("loss"), tuple):
        raise ValueError(f"metrics must hold the pair 'loss' of values and weights, got {', '.join(metrics) or 'none'}")
    return {name: _total(name, *entry) if isinstance(entry, tuple) else entry for name, entry in metrics.items()}


def _total(name: str, values: Array, weights: Array) -> tuple[Array, Array]:
    if values.ndim < 1 or values.shape != weights.shape:
        raise ValueError(
            f"metric {name!r} must be values and weights [batch, ...] of one shape, got {values.shape} and "
            f"{weights.shape}; a sum over the batch is an array by itself"
        )
    weights = weights.astype(jnp.float32)
    return _weighted(values, weights).sum(), weights.sum()


def _weighted(values: Array, weights: Array) -> Array:
    return jnp.where(weights > 0, values.astype(jnp.float32) * weights, 0)


def by_example(metrics: Metrics) -> dict[str, Array]:
    """The pairs among the metrics as float32 [batch, 2]: the value and the weight of each example.

    Where a metric has more values of each example, theirs is the weighted mean.
    """
    found = {}
    for name, entry in metrics.items():
        if isinstance(entry, tuple):
            weights = entry[1].astype(jnp.float32)
            flat = lambda x: x.reshape(len(x), -1).sum(axis=1)
            total, weight = flat(_weighted(entry[0], weights)), flat(weights)
            found[name] = jnp.stack([total / jnp.where(weight > 0, weight, 1), weight], axis=1)
    return found


class Totals:
    """Sums and counts over steps, in double precision, for one division at the end.

    Attributes:
      sums: [sum, weight] by metric, or {"sums": nested list} where a metric is an array of sums; JSON can hold it.
      counts: by name.
    """

    def __init__(self, sums: Mapping[str, Any] | None = None, counts: Mapping[str, int] | None = None) -> None:
        self.sums: dict[str, Any] = dict(sums or {})
        self.counts: dict[str, int] = dict(counts or {})

    def add(self, report: Mapping[str, Any]) -> None:
        """Adds a fetched report of a step."""
        for name, entry in report["sums"].items():
            before = self.sums.get(name)
            if isinstance(entry, tuple | list):
                total, weight = before or (0.0, 0.0)
                self.sums[name] = [total + float(entry[0]), weight + float(entry[1])]
            else:
                array = np.asarray(entry, np.float64)
                self.sums[name] = {"sums": (array if before is None else np.asarray(before["sums"]) + array).tolist()}
        for name, number in report["counts"].items():
            self.counts[name] = self.counts.get(name, 0) + int(number)

    def means(self, finish: Callable[[Any], Mapping[str, float]]) -> dict[str, float]:
        """The metrics, by the task's `finish`."""
        sums = {
            name: np.asarray(entry["sums"], np.float64) if isinstance(entry, Mapping) else (entry[0], entry[1])
            for name, entry in self.sums.items()
        }
        return {name: float(value) for name, value in finish(sums).items()}

    @property
    def loss(self) -> float:
        """The mean loss; NaN where nothing weighed anything."""
        total, weight = self.sums["loss"]
        return total / weight if weight else math.nan
