"""What a model scores that knows next to nothing, such as the shares of the classes in the training split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from xformer.tasks.dataset import TaskData

_BATCH = 1024
SPLITS = ("validation", "test")


def scores(
    task: Any, data: TaskData, name: str = "", outputs: Callable[[np.ndarray], np.ndarray] | None = None
) -> dict[str, Any]:
    """`name`, what the guesser does, and `scores`: split -> metric -> value, by the task's own metrics.

    Args:
      task: its `metrics` and `finish` judge; its `family` guesses where there are no `outputs`.
      name: completes "a guesser that"; needed with `outputs`.
      outputs: those of the guesser for inputs int32 [batch, length]. None: constant outputs, fitted to the labels of
        the training split; no text is read.
    """
    num_outputs = data.sizes["num_classes"]
    guess = task.family.guess(data.labels("train"), num_outputs, data.center, data.scale) if outputs is None else None
    found = {}
    for split in SPLITS:
        if split not in data.splits or not data.num_examples(split):
            continue
        if outputs is None:
            batches = data.targets(split, _BATCH)
        else:
            batches = data.batches(split, _BATCH, seed=0, shuffle=False, epochs=1)
        totals: dict[str, Any] = {}
        for batch in batches:
            if outputs is None:
                # A label for each token: the same outputs at each.
                shape = batch["targets"].shape if data.labels_are_sequences else batch["targets"].shape[:1]
                guessed = jnp.broadcast_to(jnp.asarray(guess), (*shape, num_outputs))
            else:
                guessed = jnp.asarray(outputs(batch["inputs"]))
            for metric, entry in task.metrics(guessed, {key: jnp.asarray(x) for key, x in batch.items()}).items():
                totals[metric] = add(totals.get(metric), entry)
        found[split] = {metric: round(float(value), 6) for metric, value in task.finish(totals).items()}
    return {"name": name or task.family.guesser, "scores": found}


def add(total: Any, entry: Any) -> Any:
    """The sums of a metric with those of one more batch; `total` is None before the first."""
    if not isinstance(entry, tuple):
        return np.asarray(entry, np.float64) + (0 if total is None else total)
    values, weights = (np.asarray(x, np.float64) for x in entry)
    before = total or (0.0, 0.0)
    return before[0] + float((values * weights).sum()), before[1] + float(weights.sum())
