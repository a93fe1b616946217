"""A finished run back in Python: the trained model and its preprocessing, for predictions on one's own input."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from xformer import experiment, tasks
from xformer.checks import check_integer
from xformer.train import DataChanged, data_record, restoring
from xformer.train import workdir as folders

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says of some texts; `labels, probabilities = run.predict(texts)` works too.

    Attributes:
      labels: the name of the likeliest class of each text.
      probabilities: float32 `[texts, classes]`; each row sums to 1.
      truncated: bool `[texts]`, True where the model saw the beginning of a text only.
    """

    labels: list[str]
    probabilities: np.ndarray
    truncated: np.ndarray

    def __iter__(self) -> Iterator[Any]:
        return iter((self.labels, self.probabilities))


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A trained model with its preprocessing.

    Attributes:
      model: the trained NNX module; `model(inputs, mask)` gives logits.
      preprocess: texts -> `{"inputs": int32 [texts, max_len], "mask": bool [texts, max_len]}`, as in training.
      class_names: in the order of the logits.
      step: training steps that the parameters have seen.
      config: the complete config of the run.
    """

    model: nnx.Module
    preprocess: tasks.Preprocessing
    class_names: list[str]
    step: int
    config: ConfigDict

    def predict(self, texts: Sequence[str], batch_size: int = 32) -> Predictions:
        """Labels and probabilities of texts, `batch_size` at a time, each padded to `max_len` as in training.

        Texts longer than `max_len` tokens are cut; the result says which, and a warning how many.

        Raises:
          ValueError: not a list of strings, an empty text, one that the vocabulary can't read, or a batch size below 1.
        """
        check_integer("batch_size", batch_size)
        features, truncated = self.preprocess.encode(texts)
        if not len(texts):
            return Predictions([], np.zeros((0, len(self.class_names)), np.float32), truncated)
        if truncated.any():
            logger.warning(
                "%d of %d texts are longer than max_len %d tokens and were cut; the first is text %d",
                truncated.sum(), len(texts), self.preprocess.max_len, truncated.argmax(),
            )  # fmt: skip
        rows = []
        for start in range(0, len(texts), batch_size):
            chunk = {name: array[start : start + batch_size] for name, array in features.items()}
            missing = batch_size - len(chunk["inputs"]) if len(texts) > batch_size else 0  # one shape, one compilation
            padded = {name: np.pad(array, ((0, missing), (0, 0))) for name, array in chunk.items()}
            batch = _probabilities(self.model, padded["inputs"], padded["mask"])
            rows.append(np.asarray(batch)[: len(chunk["inputs"])])
        probabilities = np.concatenate(rows)
        return Predictions(
            [self.class_names[index] for index in probabilities.argmax(axis=1)], probabilities, truncated
        )


@nnx.jit
def _probabilities(model: Any, inputs: Any, mask: Any) -> jax.Array:
    return jax.nn.softmax(model(inputs, mask, deterministic=True), axis=-1)


def load(workdir: str | Path, which: str = "best") -> Loaded:
    """The model that a run trained, from its best checkpoint.

    Args:
      workdir: the run's folder.
      which: "best", by the metric that the run selects by, or "last": the newest intact one, whatever its step. Where
        that stands in for a damaged one, a warning says so.

    Raises:
      FileNotFoundError: the folder holds no run.
      CheckpointError: the checkpoint that is asked for is missing or damaged.
      WorkdirMismatch: `config.json` is damaged.
      DataChanged: the vocabulary or class names stored with the run are no longer those it was trained with.
    """
    workdir = Path(workdir)
    path = workdir / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{workdir} holds no run: there is no {path.name}")
    config = folders.read_object(path) or {}
    if "variants" in config:
        raise FileNotFoundError(f"{workdir} holds a comparison; load one of its runs, {workdir / 'runs'}/VARIANT-SEED")
    built = experiment.build(config)
    preprocess = _preprocessing(workdir)
    make = built.model_fn(
        vocab_size=preprocess.vocabulary.size,
        num_classes=len(preprocess.class_names),
        max_len=preprocess.max_len,
    )
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))  # no arrays yet: all come from the checkpoint
    step = restoring.restore_model(workdir, model, which)
    return Loaded(model, preprocess, list(preprocess.class_names), step, built.config)


def _preprocessing(workdir: Path) -> tasks.Preprocessing:
    """The preprocessing that the run stored. Raises DataChanged if it is not what the run was trained with."""
    preprocess = tasks.load_preprocessing(workdir)
    recorded = folders.read_object(workdir / data_record.FILE)
    if recorded is None:
        return preprocess  # a run of an older version
    now = preprocess.fingerprint
    if changes := data_record.differences({part: recorded.get(part) for part in now}, now):
        raise DataChanged(f"{workdir}: what was stored with the run has changed since: {', '.join(changes)}")
    return preprocess
