"""What tasks share whose examples are drawn in symbols: sizes, seeds, splits without a common example, storage."""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path
from typing import ClassVar

import numpy as np

from xformer.tasks import checks, store, vocab
from xformer.tasks.dataset import TaskData
from xformer.tasks.interface import Task
from xformer.tasks.location import Progress
from xformer.tasks.ragged import Ragged
from xformer.tasks.sizes import Sizes

_CHUNK = 2**20  # numbers drawn at a time, whatever the size of a split


@dataclasses.dataclass(frozen=True)
class Generated(Task):
    """A task that draws its examples: equal options give equal data in every process, `data_seed` draws other data.

    All examples are `length` symbols long. Those of test and validation don't depend on the number of training
    examples, and no text occurs twice, in one split or in two. A new task says its `name`, `length`, `symbols`,
    `class_names`, the `options` that decide what is drawn, and `draw`.

    Raises ValueError for a size or seed out of range.
    """

    name: ClassVar[str]

    num_train: int | None = None
    num_validation: int = 1_000
    num_test: int = 2_000
    data_seed: int = 0

    def __post_init__(self) -> None:
        for key in ("num_train", "num_validation", "num_test"):
            if (value := getattr(self, key)) is not None or key != "num_train":
                checks.whole(self.name, key, value, at_least=1)
        checks.whole(self.name, "data_seed", self.data_seed, at_least=0)

    @property
    @abc.abstractmethod
    def symbols(self) -> tuple[str, ...]:
        """The vocabulary, in the order of ids 1, 2, ..."""

    @property
    @abc.abstractmethod
    def class_names(self) -> list[str]:
        """Names of labels 0, 1, ..."""

    @property
    @abc.abstractmethod
    def options(self) -> dict[str, int | float | str]:
        """What an example depends on, besides the seed."""

    @abc.abstractmethod
    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Examples: ids int [count, length], and labels int [count] or, a label for each token, [count, length].

        Only `random.random` is used: NumPy promises its values for ever, and those of other methods not.
        """

    @property
    def default_num_train(self) -> int:
        """Training examples where `num_train` is None."""
        return 8_000

    @property
    def split_sizes(self) -> dict[str, int]:
        """Examples of each split."""
        num_train = self.default_num_train if self.num_train is None else self.num_train
        return {"train": num_train, "validation": self.num_validation, "test": self.num_test}

    def expected_sizes(self) -> Sizes:
        sizes = {"vocab_size": len(self.symbols) + 1, "num_classes": len(self.class_names), "max_len": self.length}
        return Sizes(sizes)

    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        def make() -> store.Corpus:
            if progress:
                progress(f"{self.name}: generating {sum(self.split_sizes.values()):,} examples")
            facts = {"source": f"generated, {self._spelt}, data_seed={self.data_seed}"}
            return store.Corpus(self.generate(), vocab.Symbols(self.symbols), self.class_names, facts)

        store.write(self._directory(data_dir), make)
        if progress:
            progress(f"{self.name}: {self.open(data_dir).summary}")

    def open(self, data_dir: str | Path | None = None) -> TaskData:
        return TaskData(store.read(self._directory(data_dir)), self.length, self.family)

    def generate(self) -> dict[str, Ragged]:
        """The three splits."""
        seen: set[bytes] = set()
        # The small splits first, so that they stay the same whatever the size of the training split.
        splits = {
            split: self._unique(index, self.split_sizes[split], seen)
            for index, split in enumerate(("test", "validation", "train"))
        }
        return {split: splits[split] for split in self.split_sizes}

    def _unique(self, stream: int, count: int, seen: set[bytes]) -> Ragged:
        """The first `count` examples of a stream whose texts are not in `seen`; adds them to it."""
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.data_seed, stream])))
        dtype = np.min_scalar_type(len(self.symbols))
        chunk = max(_CHUNK // max(self.length, len(self.symbols)), 1)
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        found = 0
        while found < count:
            ids, labels = self.draw(random, chunk)
            rows = np.ascontiguousarray(ids.astype(dtype))
            keys = [row.tobytes() for row in rows]
            new: list[int] = []
            for index, key in enumerate(keys):
                if key not in seen and found + len(new) < count:
                    seen.add(key)
                    new.append(index)
            parts.append((rows[new], labels[new]))
            found += len(new)
        ids, labels = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
        offsets = np.arange(count + 1, dtype=np.int64) * self.length
        labels = labels.astype(np.int32)
        return Ragged(ids.reshape(-1), offsets, labels.reshape(-1), offsets if labels.ndim > 1 else None)

    @property
    def _spelt(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.options.items())

    def _directory(self, data_dir: str | Path | None) -> Path:
        sizes = [*self.options.values(), *self.split_sizes.values()]
        return store.directory(data_dir, self.name, f"{'_'.join(map(str, sizes))}_seed{self.data_seed}")
