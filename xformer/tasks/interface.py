"""What every task offers: data made once, then opened; batches; loss and metrics. No model and no config here."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import baseline
from xformer.tasks.classification import Classification
from xformer.tasks.dataset import Preprocessing, TaskData
from xformer.tasks.family import Array, Family, Metric, Sums
from xformer.tasks.location import Progress
from xformer.tasks.origin import Origin, required
from xformer.tasks.outputs import Outputs
from xformer.tasks.sizes import Sizes

ASSUMED_CLASSES = 10  # where only the data can tell, and there is none yet


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A data set and what is asked of it. A task is a value: its fields are checked when it is made, no file read.

    A new task says its `length`, `prepare`, `open` and `sizes`; loss, metrics and baseline are those of its `family`,
    one class an example unless it says otherwise. Overriding `metrics`, `finish` and `better` makes others.
    """

    @property
    def family(self) -> Family:
        """The kind of target: `Classification`, `MultiLabel`, `Regression` or `TokenClassification`."""
        return Classification()

    @property
    def num_texts(self) -> int:
        """Documents of an example: 2 for a model that compares two."""
        return 1

    @property
    def better(self) -> Mapping[str, str]:
        """Whether less ("min") or more ("max") is better, by metric; a run selects by the first if it isn't told."""
        return self.family.better

    @property
    def generates(self) -> bool:
        """Whether `outputs` gives something: texts that a trained model generates for a split."""
        return False

    @property
    def steps_key(self) -> Hashable:
        """What `inputs`, `metrics` and `records` depend on: tasks with equal keys share compiled steps."""
        return self

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Length in tokens of the model's inputs: the `max_len` of the opened data, known before there is any."""

    @abc.abstractmethod
    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        """Makes the data if it isn't there. Safe to repeat, to interrupt and to run in two processes at once.

        Raises DataMissing if it can't be made here, ValueError if the user's own files are at fault.
        """

    @abc.abstractmethod
    def open(self, data_dir: str | Path | None = None) -> TaskData:
        """The data that `prepare` made. Raises DataMissing if it isn't there."""

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        """The sources that its data may come from, for `xformer data --list`; here one of which nothing is known."""
        return (Origin(given=required(cls)),)

    def folder(self, data_dir: str | Path | None = None) -> Path | None:
        """Where `prepare` puts the data (`store.directory`), there or not; None for a task that stores nothing there.

        Raises DataMissing if what it is made of isn't there, ValueError if the user's own files are at fault.
        """
        del data_dir
        return None

    def sizes(self, preprocessing: Preprocessing | None = None) -> Sizes:
        """What the model needs to know: `vocab_size` (padding included), `num_classes` (its outputs) and `max_len`.

        Args:
          preprocessing: that of opened data, or of a run. None: there is no data yet; what only the data can tell is
            assumed, and the result's `assumed` names it.
        """
        if preprocessing is not None:
            return Sizes(
                {
                    "vocab_size": preprocessing.vocabulary.size,
                    "num_classes": self.family.num_outputs(preprocessing.class_names),
                    "max_len": preprocessing.max_len,
                }
            )
        return self.expected_sizes()

    def expected_sizes(self) -> Sizes:
        """The sizes as far as they are known without data: here 256 token ids and ten classes, both assumed."""
        num_classes = self.family.num_outputs([""] * ASSUMED_CLASSES)
        return Sizes(
            {"vocab_size": 256, "num_classes": num_classes, "max_len": self.length}, ("vocab_size", "num_classes")
        )

    def example_batch(self, batch_size: int, preprocessing: Preprocessing | None = None) -> dict[str, Any]:
        """A batch of the task's data, shapes and dtypes instead of arrays; `preprocessing`: see `sizes`.

        `inputs` int32 [batch, length] (and `inputs2`), `targets` as the family has them, `weights` float32 [batch].
        """
        sizes, shape = self.sizes(preprocessing), jax.ShapeDtypeStruct
        batch = {
            name: shape((batch_size, sizes["max_len"]), jnp.int32) for name in ("inputs", "inputs2")[: self.num_texts]
        }
        extra = {name: shape((batch_size,), jnp.float32) for name in self.family.extras}
        if self.family.example_weights(np.zeros(1, np.int32), sizes["num_classes"]) is not None:
            extra["loss_weights"] = shape((batch_size,), jnp.float32)
        targets = self.family.targets(batch_size, sizes["max_len"], sizes["num_classes"])
        return batch | {"targets": targets, "weights": shape((batch_size,), jnp.float32)} | extra

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments: `inputs` int32 [batch, length], `mask` bool [batch, length], True at real tokens.

        Of a second document in the batch likewise `inputs2` and `mask2`. A task may add `global_tokens`, bool [batch,
        length], True at tokens that attend to all and are attended by all (`Longformer`; other attention is not told).
        """
        found = {"inputs": batch["inputs"], "mask": batch["inputs"] > 0}
        if "inputs2" in batch:
            found |= {"inputs2": batch["inputs2"], "mask2": batch["inputs2"] > 0}
        return found

    def metrics(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """The metrics of a batch by name: (values, weights), float32 [batch] each, or an array of sums.

        The mean over a data set is the sum of values x weights over the sum of weights; sums are added up, and `finish`
        makes scalars of them. `loss` is a pair, and what is minimised. A filler, an example of weight 0, adds nothing.

        Raises:
          ValueError: targets that the family doesn't take; values are seen outside of jit only.
        """
        return self.family.metrics(outputs, batch)

    def finish(self, sums: Sums) -> dict[str, float]:
        """The metrics of a whole data set, from the (sum, weight) pairs and sums of all its batches, in double."""
        return self.family.finish(sums)

    def records(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Array]:
        """What is kept of each test example besides its metrics: small arrays [batch, ...] by name."""
        return self.family.records(outputs, batch)

    def details(self, records: Mapping[str, np.ndarray], data: TaskData) -> dict[str, Any]:
        """What no single number says of the test split, such as precision and recall of each class; JSON-able.

        records: what `records` kept of all its examples, and the metrics of each.
        """
        return self.family.details(records, data.class_names)

    def outputs(self, model: Any, data: TaskData, split: str, progress: Progress = None) -> Outputs | None:
        """What a trained model generates for a split, and what that scores; None for a task that generates nothing."""
        del model, data, split, progress
        return None

    def baseline(self, data: TaskData) -> dict[str, Any]:
        """What a guesser scores that reads no text: `name` says what it answers, `scores` its metrics by split.

        Other simple methods may stand among `others`, each with a `title` of a word or two, `name` and `scores`.
        """
        return baseline.scores(self, data)
