"""What tasks share whose examples are generated: sizes, seeds, splits without a common example, storage."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from xformer.tasks import checks, chunks, store, vocab
from xformer.tasks.dataset import TaskData
from xformer.tasks.interface import Task
from xformer.tasks.location import Progress
from xformer.tasks.origin import MADE_HERE, Origin, required
from xformer.tasks.ragged import Ragged
from xformer.tasks.sizes import Sizes

_CHUNK = 2**20  # numbers drawn at a time, whatever the size of a split
_SIZES = {"train": "num_train", "validation": "num_validation", "test": "num_test"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated(Task):
    """A task that makes its examples: equal options give equal data in every process, `data_seed` gives other data.

    Those of test and validation don't depend on the number of training examples, and no example occurs twice, in one
    split or in two. A new task says its `name`, `length`, `vocabulary`, `class_names`, the `options` that decide what
    is made, and `stream`.

    Raises ValueError for a size or seed out of range.
    """

    name: ClassVar[str]
    examples_are: ClassVar[str] = "examples"  # for lines of progress

    num_train: int | None = None
    num_validation: int | None = 1_000
    num_test: int | None = 2_000
    data_seed: int = 0

    def __post_init__(self) -> None:
        for key in _SIZES.values():
            if (value := getattr(self, key)) is not None or getattr(type(self), key) is not None:
                checks.whole(self.name, key, value, at_least=1)
        checks.whole(self.name, "data_seed", self.data_seed, at_least=0)

    @property
    @abc.abstractmethod
    def vocabulary(self) -> vocab.Vocabulary:
        """What the ids stand for."""

    @property
    @abc.abstractmethod
    def class_names(self) -> list[str]:
        """Names of labels 0, 1, ..."""

    @property
    @abc.abstractmethod
    def options(self) -> dict[str, int | float | str]:
        """What an example depends on, besides the seed."""

    @abc.abstractmethod
    def stream(self, index: int, num_workers: int | None) -> Generator[Ragged]:
        """Chunks of examples without end: stream 0 is for the test split, 1 for validation, 2 for training.

        They depend on the options, `data_seed` and `index` alone, never on `num_workers`, the number of threads.
        """

    @property
    def usual_sizes(self) -> dict[str, int]:
        """Examples of the splits whose size may be None."""
        return {"train": 8_000}

    @property
    def split_sizes(self) -> dict[str, int]:
        """Examples of each split."""
        given = {split: getattr(self, key) for split, key in _SIZES.items()}
        return {split: self.usual_sizes[split] if size is None else size for split, size in given.items()}

    @property
    def source(self) -> str:
        """Where the examples come from, in words: a fact that stays with the data."""
        return f"generated, {self._spelt}, data_seed={self.data_seed}"

    @property
    def key(self) -> str:
        """Names the folder of the data."""
        sizes = [*self.options.values(), *self.split_sizes.values()]
        return f"{'_'.join(map(str, sizes))}_seed{self.data_seed}"

    def expected_sizes(self) -> Sizes:
        classes = len(self.class_names)
        return Sizes({"vocab_size": self.vocabulary.size, "num_classes": classes, "max_len": self.length})

    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        def make() -> store.Corpus:
            splits = self.generate(progress=progress)
            return store.Corpus(splits, self.vocabulary, self.class_names, {"source": self.source})

        store.write(self.folder(data_dir), make, progress)
        if progress:
            progress(f"{self.name}: {self.open(data_dir).summary}")

    def open(self, data_dir: str | Path | None = None) -> TaskData:
        return TaskData(store.read(self.folder(data_dir)), self.length, self.family)

    def folder(self, data_dir: str | Path | None = None) -> Path:
        return store.directory(data_dir, self.name, self.key)

    @classmethod
    def presets(cls) -> tuple[Mapping[str, Any], ...]:
        """Options of the data sets that `origins` lists, one with the defaults unless a task says otherwise."""
        return ({},)

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        if given := required(cls):
            return (Origin("generated", MADE_HERE, given=given),)
        found = []
        for options in cls.presets():
            sizes = " + ".join(f"{size:,}" for size in cls(**options).split_sizes.values())
            found.append(Origin("generated", MADE_HERE, f"{sizes} {cls.examples_are}", options))
        return tuple(found)

    def generate(self, *, num_workers: int | None = None, progress: Progress = None) -> dict[str, Ragged]:
        """The three splits, whatever the number of threads. `progress` gets a line every few seconds."""
        if progress:
            progress(f"{self.name}: generating {sum(self.split_sizes.values()):,} {self.examples_are}, {self._spelt}")
        what = f"{self.name}: COUNT {self.examples_are}"
        return chunks.splits(lambda index: self.stream(index, num_workers), self.split_sizes, what, progress)

    @property
    def _spelt(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.options.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Symbolic(Generated):
    """Examples in symbols, all of them `length` long. A new task says its `symbols` and how to `draw`."""

    @property
    @abc.abstractmethod
    def symbols(self) -> tuple[str, ...]:
        """The vocabulary, in the order of ids 1, 2, ..."""

    @abc.abstractmethod
    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Examples: ids int [count, length], and labels int [count] or, a label for each token, [count, length].

        Only `random.random` is used: NumPy promises its values for ever, and those of other methods not.
        """

    @property
    def vocabulary(self) -> vocab.Vocabulary:
        return vocab.Symbols(self.symbols)

    def stream(self, index: int, num_workers: int | None) -> Generator[Ragged]:
        del num_workers  # one thread is enough
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.data_seed, index])))
        dtype = np.min_scalar_type(len(self.symbols))
        count = max(_CHUNK // max(self.length, len(self.symbols)), 1)
        offsets = np.arange(count + 1, dtype=np.int64) * self.length
        while True:
            ids, labels = self.draw(random, count)
            label_offsets = offsets if labels.ndim > 1 else None
            yield Ragged(ids.astype(dtype).reshape(-1), offsets, labels.astype(np.int32).reshape(-1), label_offsets)
