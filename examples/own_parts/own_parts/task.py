"""A task: generated sequences of letters, whose class is the first letter."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from xformer.tasks import Task, TaskData
from xformer.tasks.ragged import Ragged
from xformer.tasks.store import Corpus
from xformer.tasks.vocab import Symbols

LETTERS = ("a", "b", "c")


@dataclasses.dataclass(frozen=True)
class FirstToken(Task):
    """`num_train` training sequences and 32 of each other split, of 2 to `max_len` letters."""

    num_train: int = 256
    max_len: int = 32

    def __post_init__(self) -> None:
        if self.num_train < 1 or self.max_len < 2:
            raise ValueError(f"max_len must be at least 2 and num_train 1, got {self.max_len} and {self.num_train}")

    @property
    def length(self) -> int:
        return self.max_len

    def prepare(self, data_dir: str | Path | None = None, *, progress: Any = None) -> None:
        """Nothing is stored: `open` makes the data."""

    def open(self, data_dir: str | Path | None = None) -> TaskData:
        sizes = {"train": self.num_train, "validation": 32, "test": 32}
        splits = {name: self._split(seed, size) for seed, (name, size) in enumerate(sizes.items())}
        return TaskData(Corpus(splits, Symbols(LETTERS), list(LETTERS), {"source": "generated"}), self.max_len)

    def _split(self, seed: int, size: int) -> Ragged:
        random = np.random.default_rng(seed)
        lengths = random.integers(2, self.max_len, size, endpoint=True)
        tokens = [random.integers(1, len(LETTERS), length, dtype=np.uint8, endpoint=True) for length in lengths]
        return Ragged.from_lists(tokens, [int(sequence[0]) - 1 for sequence in tokens], np.uint8)
