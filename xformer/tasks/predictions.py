"""What a trained model says of texts, in the words of its task."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import numpy as np

from xformer.tasks.dataset import Preprocessing
from xformer.tasks.family import Family
from xformer.tasks.multi_label import MultiLabel
from xformer.tasks.regression import Regression
from xformer.tasks.token_classification import TokenClassification


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """The class of each text; `labels, probabilities = run.predict(texts)` works too.

    Attributes:
      labels: the name of the likeliest class of each text.
      probabilities: float32 `[texts, classes]`; each row sums to 1.
      truncated: bool `[texts]`, True where the model saw a part of a text only.
    """

    labels: list[str]
    probabilities: np.ndarray
    truncated: np.ndarray

    def __iter__(self) -> Iterator[Any]:
        return iter((self.labels, self.probabilities))


@dataclasses.dataclass(frozen=True, eq=False)
class LabelPredictions:
    """The labels of each text, any number of them.

    Attributes:
      labels: the names of those whose probability reaches their threshold, for each text, in the order of the classes.
      probabilities: float32 `[texts, labels]`, each by itself between 0 and 1.
      truncated: bool `[texts]`, True where the model saw a part of a text only.
    """

    labels: list[list[str]]
    probabilities: np.ndarray
    truncated: np.ndarray

    def __iter__(self) -> Iterator[Any]:
        return iter((self.labels, self.probabilities))


@dataclasses.dataclass(frozen=True, eq=False)
class NumberPredictions:
    """A number for each text.

    Attributes:
      numbers: float64 `[texts]`, in the units of the training data.
      truncated: bool `[texts]`, True where the model saw a part of a text only.
    """

    numbers: np.ndarray
    truncated: np.ndarray

    def __iter__(self) -> Iterator[float]:
        return iter(self.numbers.tolist())


@dataclasses.dataclass(frozen=True, eq=False)
class TokenPredictions:
    """The class of each token of each text.

    Attributes:
      labels: for each text the name of the likeliest class of each token that the model saw.
      probabilities: for each text float32 `[tokens, classes]`.
      truncated: bool `[texts]`, True where the model saw a part of a text only.
    """

    labels: list[list[str]]
    probabilities: list[np.ndarray]
    truncated: np.ndarray

    def __iter__(self) -> Iterator[Any]:
        return iter((self.labels, self.probabilities))


AnyPredictions = Predictions | LabelPredictions | NumberPredictions | TokenPredictions


def present(
    family: Family,
    values: np.ndarray,
    mask: np.ndarray,
    truncated: np.ndarray,
    preprocess: Preprocessing,
    threshold: float | Mapping[str, float] | None = None,
) -> AnyPredictions:
    """Predictions of a family.

    Args:
      values: what `family.predict` gave for each text.
      mask: bool `[texts, max_len]`, True at tokens.
      truncated: which texts were cut.
      threshold: see `thresholds`; only labels have one.

    Raises:
      ValueError: a threshold where there is none, or a wrong one.
    """
    names = preprocess.class_names
    if isinstance(family, MultiLabel):
        held = values >= thresholds(0.5 if threshold is None else threshold, names)
        labels = [[name for name, has in zip(names, row, strict=True) if has] for row in held]
        return LabelPredictions(labels, values, truncated)
    if threshold is not None:
        raise ValueError(f"threshold is for models with several labels a text, got {threshold!r}")
    if isinstance(family, Regression):
        scale = 1.0 if preprocess.scale is None else preprocess.scale
        return NumberPredictions(values.astype(np.float64) * scale + preprocess.center, truncated)
    if isinstance(family, TokenClassification):
        rows = [row[real] for row, real in zip(values, mask, strict=True)]
        return TokenPredictions([[names[i] for i in row.argmax(axis=1)] for row in rows], rows, truncated)
    return Predictions([names[index] for index in values.argmax(axis=1)], values, truncated)


def thresholds(threshold: float | Mapping[str, float], names: list[str]) -> np.ndarray:
    """The probability from which on each label is given, float64 `[labels]`.

    Args:
      threshold: one for all, or by label; 0.5 for labels that are not named.

    Raises:
      ValueError: a label that doesn't exist, or what is no number from 0 to 1.
    """
    given = threshold if isinstance(threshold, Mapping) else dict.fromkeys(names, threshold)
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"threshold must be for labels among {', '.join(names)}, got one for {name!r}")
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
            raise ValueError(f"threshold must be a number from 0 to 1, or one by label, got {value!r}")
    return np.array([given.get(name, 0.5) for name in names], np.float64)
