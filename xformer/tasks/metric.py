"""A metric of one's own, which judges outputs beside those of the task."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xformer import lookup
from xformer.checks import ArgumentError
from xformer.tasks import family
from xformer.tasks.dataset import TaskData
from xformer.tasks.interface import Task
from xformer.tasks.location import Progress
from xformer.tasks.outputs import Outputs

# What else stands in a row of `metrics.jsonl`.
TAKEN = ("step", "split", "examples", "tokens", "seconds", "train_flops", "learning_rate", "grad_norm", "update_norm",
         "param_norm")  # fmt: skip


class Metric(abc.ABC):
    """A metric besides those of a task; `train.metrics` in a config names it as `"package.module:Class"`.

    It becomes part of the compiled training and evaluation steps, stands in every row and result, and a run can select
    by it. A value without state, as the task is.

    Attributes:
      name: what rows, results and `train.select_metric` call it.
      better: whether less ("min") or more ("max") of it is better.
    """

    name: str
    better: str

    @abc.abstractmethod
    def of_batch(self, outputs: Any, batch: Mapping[str, Any]) -> family.Metric:
        """(values, weights), float32 [batch] each, or an array of sums over the batch; pure and traced.

        Args:
          outputs: the model's.
          batch: arrays [batch, ...] of the task, among them `targets` and `weights`, 0 for fillers, which add nothing.
        """

    def finish(self, sums: tuple[float, float] | np.ndarray) -> float:
        """The metric of a whole data set, in double precision: here the weighted mean.

        Args:
          sums: (sum of values x weights, sum of weights) over all batches; or the added-up sums, for which this has to
            be overridden.
        """
        return family.mean(*sums)


METRICS: lookup.Table[type[Metric]] = lookup.Table({}, kind=Metric)
"""Further metrics by the name a config gives them: none of ours, as a task has its own."""


def build(config: Mapping[str, Any]) -> Metric:
    """The metric of `{"name": "package.module:Class", **arguments}`. ValueError for what it does not take."""
    arguments = dict(config)
    return METRICS.find("name", arguments.pop("name", None))(**arguments)


class Judged:
    """A task as a run sees it, with further metrics beside its own; its baseline is that of its own.

    Args:
      task: the task.
      further: the further metrics.

    Raises:
      ArgumentError: a metric without a name or a direction, or with a name that is taken; its key is "metrics".
    """

    def __init__(self, task: Task, further: Sequence[Metric]) -> None:
        better = dict(task.better)
        for metric in further:
            what, name, way = type(metric).__name__, getattr(metric, "name", None), getattr(metric, "better", None)
            if not isinstance(name, str) or way not in ("min", "max"):
                wrong = f"{what} must have a name and better, which is 'min' or 'max', got {name!r} and {way!r}"
                raise ArgumentError("metrics", f"metrics: {wrong}")
            if name in (*better, *TAKEN):
                raise _taken(metric)
            better[name] = way
        self.task, self.further, self.better = task, tuple(further), better
        self.generates = task.generates

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments."""
        return self.task.inputs(batch)

    def metrics(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, family.Metric]:
        """The metrics of a batch, those of the task first.

        Raises ArgumentError for a further one that is called as sums of the task are, such as the `f1` of `macro_f1`.
        """
        found = self.task.metrics(outputs, batch)
        for own in self.further:
            if own.name in found:
                raise _taken(own)
            found = found | {own.name: own.of_batch(outputs, batch)}
        return found

    def finish(self, sums: family.Sums) -> dict[str, float]:
        """The metrics of a whole data set."""
        further = {own.name: own for own in self.further}
        found = self.task.finish({name: entry for name, entry in sums.items() if name not in further})
        return found | {name: float(own.finish(sums[name])) for name, own in further.items()}

    def records(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, family.Array]:
        """What is kept of each test example besides its metrics."""
        return self.task.records(outputs, batch)

    def details(self, records: Mapping[str, np.ndarray], data: TaskData) -> dict[str, Any]:
        """What no single number says of the test split, as the task has it."""
        return self.task.details(records, data)

    def outputs(self, model: Any, data: TaskData, split: str, progress: Progress = None) -> Outputs | None:
        """What a trained model generates for a split, as the task has it."""
        return self.task.outputs(model, data, split, progress)

    def baseline(self, data: TaskData) -> dict[str, Any]:
        """What a guesser scores in the task's own metrics; further ones may read what a guesser is not given."""
        return self.task.baseline(data)


def _taken(metric: Metric) -> ArgumentError:
    what = type(metric).__name__
    return ArgumentError("metrics", f"metrics: {what} must have a name of its own, got {metric.name!r}")
