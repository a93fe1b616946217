"""A needle in a haystack: which of eight symbols stands among many others? And which one stands after a cue?

Both are drawn in symbols of one vocabulary: fillers `a` to `h`, classes `A` to `H` and the cue `>`. Every example has
`max_len` symbols. How far a symbol is from where the answer is read is counted from a CLS vector in front of the text:
the first symbol is at distance 1. It is kept of every test example, as `distance`, and the report draws the accuracy
by it. Guessing a class is right in one example of eight, at any distance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import baseline, checks
from xformer.tasks.dataset import TaskData
from xformer.tasks.generated import Symbolic

Array = jax.Array
FILLERS, CLASSES, CUE = tuple("abcdefgh"), tuple("ABCDEFGH"), ">"
SHORTEST = 16  # symbols: so many that no text has to come twice and all candidates of `Order` find room
_FIRST_CLASS, _CUE = len(FILLERS) + 1, len(FILLERS) + len(CLASSES) + 1  # ids


@dataclasses.dataclass(frozen=True)
class Needle(Symbolic):
    """One symbol of `A` to `H`, each as likely, at a place drawn evenly, all others fillers; it is the class.

    Nothing but its distance makes an example hard: what sees it answers right, what does not can only guess.

    Raises ValueError for a `max_len` below 16.
    """

    name: ClassVar[str] = "needle"

    max_len: int = 255

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(self.name, "max_len", self.max_len, at_least=SHORTEST)

    @property
    def length(self) -> int:
        return self.max_len

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*FILLERS, *CLASSES, CUE)

    @property
    def class_names(self) -> list[str]:
        return list(CLASSES)

    @property
    def steps_key(self) -> Hashable:
        return Needle, self.max_len  # whatever the data, and of `Order` too

    @property
    def options(self) -> dict[str, int | float | str]:
        return {"max_len": self.max_len}

    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self._fillers(random, count)
        label, place = _uniform(random, count, len(CLASSES)), _uniform(random, count, self.max_len)
        ids[np.arange(count), place] = _FIRST_CLASS + label
        return ids, label

    def records(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Array]:
        """Those of a classification and `distance`, int32 [batch]: of the symbol that is the class, 0 without one."""
        inputs = batch["inputs"]
        is_class = (inputs >= _FIRST_CLASS) & (inputs < _CUE)
        after_cue = jnp.pad(inputs[:, :-1] == _CUE, ((0, 0), (1, 0)))
        found = jnp.where(after_cue.any(axis=1, keepdims=True), after_cue, is_class)
        distance = jnp.where(found.any(axis=1), jnp.argmax(found, axis=1) + 1, 0)
        return {**super().records(outputs, batch), "distance": distance.astype(jnp.int32)}

    def _fillers(self, random: np.random.Generator, count: int) -> np.ndarray:
        return 1 + (random.random((count, self.max_len)) * len(FILLERS)).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Order(Needle):
    """`num_candidates` of the symbols `A` to `H`, all different and anywhere; the class is the one right after the cue.

    What has to be known is which symbol comes after which: that is what relative positions are for. A bag of symbols
    tells no more than the candidates, and that is the baseline: to answer one of them.

    Raises ValueError as `Needle` does, or for a number of candidates that is not from 2 to 8.
    """

    name: ClassVar[str] = "order"

    num_candidates: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(self.name, "num_candidates", self.num_candidates, at_least=2)
        if self.num_candidates > len(CLASSES):
            raise ValueError(f"{self.name}: num_candidates must be at most {len(CLASSES)}, got {self.num_candidates}")

    @property
    def options(self) -> dict[str, int | float | str]:
        return {**super().options, "num_candidates": self.num_candidates}

    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self._fillers(random, count)
        rows = np.arange(count)
        # Places for the candidates, the first of them for two symbols: the cue and the class after it.
        places = np.argsort(random.random((count, self.max_len - 1)), axis=1)[:, : self.num_candidates]
        candidates = np.argsort(random.random((count, len(CLASSES))), axis=1)[:, : self.num_candidates]
        cue = places[:, :1]
        ids[rows[:, None], places + (places >= cue)] = _FIRST_CLASS + candidates
        ids[rows, cue[:, 0]] = _CUE
        return ids, candidates[:, 0]

    def baseline(self, data: TaskData) -> dict[str, Any]:
        def outputs(inputs: np.ndarray) -> np.ndarray:
            there = (inputs[:, :, None] == _FIRST_CLASS + np.arange(len(CLASSES))).any(axis=1)
            return np.where(there, 0.0, -30.0).astype(np.float32)  # each candidate as likely; the first is the answer

        name = "knows which symbols there are and not their order, and answers the first candidate of the alphabet"
        return baseline.scores(self, data, name, outputs)


def _uniform(random: np.random.Generator, count: int, most: int) -> np.ndarray:
    """Whole numbers from 0 below `most`, each as likely: int64 [count]."""
    return (random.random(count) * most).astype(np.int64)
