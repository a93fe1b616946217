"""What a user's file may hold as a label, and how it becomes a target: one class, any number of labels, a number."""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from xformer.tasks.classification import Classification
from xformer.tasks.family import Family
from xformer.tasks.multi_label import MultiLabel
from xformer.tasks.reading import Document, clean_label
from xformer.tasks.regression import Regression

Kind = Literal["classes", "labels", "number"]


class Labels(abc.ABC):
    """Reads the labels of a file and, after `fit`, encodes them.

    Attributes:
      family: the kind of target.
      class_names: of targets 0, 1, ..., in order.
      center, scale: of numbers, see `store.Corpus`.
    """

    family: ClassVar[Family]

    def __init__(self) -> None:
        self.class_names: list[str] = []
        self.center = 0.0
        self.scale: float | None = None
        self._kinds: dict[tuple[str, str], type] = {}  # of each label of a file, int or str

    @abc.abstractmethod
    def parse(self, place: str, what: str, value: Any) -> Any:
        """A field's value as a label. Raises ValueError with the place."""

    @abc.abstractmethod
    def fit(self, path: str, documents: Sequence[Document]) -> None:
        """Learns what labels there are, from the documents that splits may still be cut from.

        Raises ValueError if there is nothing to learn.
        """

    def check(self, document: Document) -> None:
        """Raises ValueError if a document of another file has a label that training doesn't know."""
        del document

    def stratum(self, label: Any) -> str:
        """Documents of one stratum are shared out evenly between the splits."""
        del label
        return ""

    def measure(self, labels: Sequence[Any]) -> None:
        """Sets `center` and `scale` by the training split, where labels are numbers."""
        del labels

    @abc.abstractmethod
    def encode(self, labels: Sequence[Any]) -> Any:
        """The targets, as `Ragged.labels`."""

    def _clean(self, place: str, what: str, value: Any) -> str:
        """A label as `clean_label` spells it. Raises ValueError as that, and for 1 and "1" in one file, which would be
        one class.
        """
        label = clean_label(place, what, value)
        file = place.rpartition(" line ")[0]
        if self._kinds.setdefault((file, label), type(value)) is not type(value):
            kind, other = ("string", "number") if isinstance(value, str) else ("number", "string")
            raise ValueError(
                f"{place}: {what} has the {kind} {label:.40}, which stands before as the {other}; a class "
                "is one or the other in all of a file"
            )
        return label

    def _known(self, document: Document, labels: Collection[str]) -> None:
        for label in labels:
            if label not in self.class_names:
                known = ", ".join(self.class_names[:20])
                raise ValueError(f"{document.place}: label {label!r} is not in the training documents ({known})")


class OneClass(Labels):
    """A string or an int; class 0 is the first in order (of number if all are whole numbers, else of characters)."""

    family: ClassVar[Family] = Classification()

    def parse(self, place: str, what: str, value: Any) -> str:
        return self._clean(place, what, value)

    def fit(self, path: str, documents: Sequence[Document]) -> None:
        self.class_names = ordered({document.label for document in documents})
        if len(self.class_names) < 2:
            raise ValueError(f"{path} has one class only, {self.class_names[0]!r}; two or more are needed")

    def check(self, document: Document) -> None:
        self._known(document, [document.label])

    def stratum(self, label: str) -> str:
        return label

    def encode(self, labels: Sequence[str]) -> list[int]:
        number = {label: index for index, label in enumerate(self.class_names)}
        return [number[label] for label in labels]


class LabelSets(Labels):
    """A list of strings and ints in JSON, or one string in which a separator stands between labels; may be empty."""

    family: ClassVar[Family] = MultiLabel()

    def __init__(self, separator: str) -> None:
        super().__init__()
        self._separator = separator

    def parse(self, place: str, what: str, value: Any) -> frozenset[str]:
        if isinstance(value, str):
            value = value.split(self._separator) if value.strip() else []
        if isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        if not isinstance(value, list):
            raise ValueError(
                f"{place}: {what} must be a list of labels, or labels with {self._separator!r} between, "
                f"got {value!r:.40}"
            )
        return frozenset(self._clean(place, what, label) for label in value)

    def fit(self, path: str, documents: Sequence[Document]) -> None:
        self.class_names = ordered({label for document in documents for label in document.label})
        if not self.class_names:
            raise ValueError(f"no document in {path} has a label")

    def check(self, document: Document) -> None:
        self._known(document, sorted(document.label))

    def encode(self, labels: Sequence[frozenset[str]]) -> np.ndarray:
        rows = [[name in held for name in self.class_names] for held in labels]
        return np.array(rows, bool).reshape(len(labels), len(self.class_names))


class Numbers(Labels):
    """A finite number; a model learns it less the mean of the training split, over its standard deviation."""

    family: ClassVar[Family] = Regression()

    def parse(self, place: str, what: str, value: Any) -> float:
        try:
            number = float(value) if not isinstance(value, bool) and "_" not in str(value) else math.nan
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= float(np.finfo(np.float32).max):
            raise ValueError(f"{place}: {what} must be a number from -3.4e38 to 3.4e38, got {value!r:.40}")
        return number

    def fit(self, path: str, documents: Sequence[Document]) -> None:
        numbers = {document.label for document in documents}
        if len(numbers) < 2:
            raise ValueError(f"{path} has one number only, {numbers.pop()}; two or more are needed")

    def measure(self, labels: Sequence[float]) -> None:
        self.center, scale = float(np.mean(labels)), float(np.std(labels))
        self.scale = scale or 1.0  # all the same in the training split

    def encode(self, labels: Sequence[float]) -> np.ndarray:
        return np.array(labels, np.float64)


def make(kind: Kind, separator: str) -> Labels:
    """The reader of a kind of label."""
    return {"classes": OneClass, "labels": lambda: LabelSets(separator), "number": Numbers}[kind]()


def ordered(labels: Collection[str]) -> list[str]:
    """Whole numbers by value, anything else by character."""
    try:
        return sorted(labels, key=lambda label: (int(label), label))
    except ValueError:
        return sorted(labels)
