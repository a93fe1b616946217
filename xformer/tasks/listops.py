"""ListOps: evaluate nested operations on lists of digits, ten classes. As in Long Range Arena, and shorter ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from xformer.tasks import arena_files, baseline, checks, chunks, listops_trees, store, vocab
from xformer.tasks.dataset import TaskData
from xformer.tasks.interface import Task
from xformer.tasks.listops_trees import Grammar
from xformer.tasks.location import Progress
from xformer.tasks.ragged import Ragged
from xformer.tasks.sizes import Sizes
from xformer.tasks.text import digest

PresetName = Literal["listops_2k", "listops_512", "listops_128"]


@dataclasses.dataclass(frozen=True)
class Preset:
    """A grammar, the model length that holds its longest expression, and the number of training examples."""

    grammar: Grammar
    max_len: int
    num_train: int


PRESETS: Mapping[PresetName, Preset] = MappingProxyType(
    {
        "listops_2k": Preset(Grammar(500, 2000, max_depth=10, max_args=10), 2000, 96_000),  # Long Range Arena's own
        "listops_512": Preset(Grammar(100, 512, max_depth=8, max_args=10), 512, 96_000),
        "listops_128": Preset(Grammar(16, 128, max_depth=5, max_args=10), 128, 48_000),
    }
)


@dataclasses.dataclass(frozen=True)
class ListOps(Task):
    """ListOps by preset; sizes and `max_len` default to the preset's, `data_seed` draws other expressions.

    Test and validation expressions don't depend on the number of training examples, and no expression occurs twice, in
    one split or in two. Raises ValueError for a preset that doesn't exist, a size below 1, or a `max_len` that would
    truncate.

    path: a folder with `basic_train.tsv`, `basic_val.tsv` and `basic_test.tsv` of the Long Range Arena's release, read
    in place of generated expressions; sizes and `data_seed` then mean nothing.
    """

    preset: PresetName = "listops_2k"
    num_train: int | None = None
    num_validation: int = 2_000
    num_test: int = 2_000
    data_seed: int = 0
    max_len: int | None = None
    path: str = ""

    def __post_init__(self) -> None:
        checks.choice("listops", "preset", self.preset, PRESETS)
        for key in ("num_train", "num_validation", "num_test"):
            if (value := getattr(self, key)) is not None or key != "num_train":
                checks.whole("listops", key, value, at_least=1)
        checks.whole("listops", "data_seed", self.data_seed, at_least=0)
        if not isinstance(self.path, str):
            raise ValueError(f"listops: path must be a string, got {self.path!r}")
        if self.max_len is not None:
            longest = PRESETS[self.preset].grammar.max_length - 1
            checks.whole("listops", "max_len", self.max_len, at_least=longest, why=f" (the longest of {self.preset})")

    @property
    def length(self) -> int:
        return PRESETS[self.preset].max_len if self.max_len is None else self.max_len

    def expected_sizes(self) -> Sizes:
        return Sizes({"vocab_size": len(listops_trees.SYMBOLS) + 1, "num_classes": 10, "max_len": self.length})

    @property
    def split_sizes(self) -> dict[str, int]:
        """Examples of each split."""
        num_train = PRESETS[self.preset].num_train if self.num_train is None else self.num_train
        return {"train": num_train, "validation": self.num_validation, "test": self.num_test}

    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        def make() -> store.Corpus:
            facts = self.begin("listops", progress)
            vocabulary = vocab.Symbols(listops_trees.SYMBOLS)
            return store.Corpus(self.generate(progress=progress), vocabulary, list("0123456789"), facts)

        store.write(self._directory(data_dir), make)
        if progress:
            progress(f"listops: {self.open(data_dir).summary}")

    def begin(self, name: str, progress: Progress) -> dict[str, str]:
        """Says what is made, and gives the facts that stay with it."""
        if self.path:
            return {"source": f"the arena's release in {self.path}"}
        if progress:
            progress(f"{name}: generating {sum(self.split_sizes.values()):,} expressions of {self.preset}")
        return {"source": f"generated, {self.preset}, data_seed={self.data_seed}"}

    def open(self, data_dir: str | Path | None = None) -> TaskData:
        return TaskData(store.read(self._directory(data_dir)), self.length)

    def generate(self, *, num_workers: int | None = None, progress: Progress = None) -> dict[str, Ragged]:
        """The three splits, whatever the number of threads: token ids uint8, labels 0-9.

        `progress` gets a line every few seconds.
        """
        if self.path:
            return arena_files.listops(self._files)
        grammar = PRESETS[self.preset].grammar
        return chunks.splits(
            lambda source: listops_trees.sample(grammar, source),
            self.split_sizes,
            self.data_seed,
            "listops: COUNT expressions",
            num_workers=num_workers,
            progress=progress,
        )

    def baseline(self, data: TaskData) -> dict[str, Any]:
        """What answering the commonest value of the root's operator scores, counted on the training split."""
        train = data.examples("train")
        counts = np.ones((len(listops_trees.SYMBOLS) + 1, data.num_classes))
        np.add.at(counts, (train.tokens[train.offsets[:-1]], train.labels), 1)
        logits = np.log(counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
        name = "answers the commonest value of the outermost operator"
        return baseline.scores(self, data, name, lambda inputs: logits[inputs[:, 0]])

    @property
    def _files(self) -> dict[str, Path]:
        return arena_files.paths(Path(self.path).expanduser(), arena_files.LISTOPS)

    def _directory(self, data_dir: str | Path | None) -> Path:
        if self.path:
            key = digest("arena listops 1", *(path.read_bytes() for path in self._files.values()))
            return store.directory(data_dir, "listops", f"release_{key[:16]}")
        sizes = "_".join(str(size) for size in self.split_sizes.values())
        return store.directory(data_dir, "listops", f"{self.preset}_{sizes}_seed{self.data_seed}")
