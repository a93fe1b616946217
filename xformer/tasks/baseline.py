"""What a model scores that reads nothing: constant outputs, fitted to the labels of the training split."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from xformer.tasks.dataset import TaskData

_BATCH = 1024
SPLITS = ("validation", "test")


def scores(task: Any, data: TaskData) -> dict[str, Any]:
    """`name`, what the guesser does, and `scores`: split -> metric -> value, by the task's own metrics.

    Args:
      task: its `family` guesses; its `metrics` and `finish` judge.
    """
    num_outputs = data.sizes["num_classes"]
    guess = task.family.guess(data.labels("train"), num_outputs, data.center, data.scale)
    found = {}
    for split in SPLITS:
        if split not in data.splits or not data.num_examples(split):
            continue
        totals: dict[str, Any] = {}
        for batch in data.targets(split, _BATCH):
            # A label for each token: the same outputs at each.
            shape = batch["targets"].shape if data.labels_are_sequences else batch["targets"].shape[:1]
            outputs = jnp.broadcast_to(jnp.asarray(guess), (*shape, num_outputs))
            for name, entry in task.metrics(outputs, {key: jnp.asarray(x) for key, x in batch.items()}).items():
                totals[name] = add(totals.get(name), entry)
        found[split] = {name: round(float(value), 6) for name, value in task.finish(totals).items()}
    return {"name": task.family.guesser, "scores": found}


def add(total: Any, entry: Any) -> Any:
    """The sums of a metric with those of one more batch; `total` is None before the first."""
    if not isinstance(entry, tuple):
        return np.asarray(entry, np.float64) + (0 if total is None else total)
    values, weights = (np.asarray(x, np.float64) for x in entry)
    before = total or (0.0, 0.0)
    return before[0] + float((values * weights).sum()), before[1] + float(weights.sum())
