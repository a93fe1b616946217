"""ListOps: evaluate nested operations on lists of digits, ten classes. As in Long Range Arena, and shorter ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np

from xformer.tasks import arena_files, baseline, checks, chunks, listops_trees, vocab
from xformer.tasks.dataset import TaskData
from xformer.tasks.generated import Generated
from xformer.tasks.listops_trees import Grammar
from xformer.tasks.location import Progress
from xformer.tasks.origin import Origin
from xformer.tasks.ragged import Ragged
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
class ListOps(Generated):
    """ListOps by preset; sizes and `max_len` default to the preset's, `data_seed` draws other expressions.

    Test and validation expressions don't depend on the number of training examples, and no expression occurs twice, in
    one split or in two.

    path: a folder with `basic_train.tsv`, `basic_val.tsv` and `basic_test.tsv` of the Long Range Arena's release, read
    in place of generated expressions; sizes and `data_seed`, which are for those, can't be given with it.

    Raises ValueError for a preset that doesn't exist, a size below 1, a `max_len` that would truncate, or a key that
    `path` leaves without use.
    """

    name: ClassVar[str] = "listops"
    examples_are: ClassVar[str] = "expressions"

    preset: PresetName = "listops_2k"
    max_len: int | None = None
    path: str = ""
    num_validation: int | None = dataclasses.field(default=2_000, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice(self.name, "preset", self.preset, PRESETS)
        if not isinstance(self.path, str):
            raise ValueError(f"{self.name}: path must be a string, got {self.path!r}")
        if self.path:
            checks.unset(self, ("num_train", "num_validation", "num_test", "data_seed"), "generated expressions")
        if self.max_len is not None:
            longest = PRESETS[self.preset].grammar.max_length - 1
            checks.whole(self.name, "max_len", self.max_len, at_least=longest, why=f" (the longest of {self.preset})")

    @classmethod
    def presets(cls) -> tuple[Mapping[str, Any], ...]:
        return tuple({"preset": name} for name in PRESETS)

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        release = "the Long Range Arena's release, basic_train.tsv, basic_val.tsv and basic_test.tsv"
        return (*super().origins(), Origin(release, given={"path": "FOLDER"}))

    @property
    def length(self) -> int:
        return PRESETS[self.preset].max_len if self.max_len is None else self.max_len

    @property
    def vocabulary(self) -> vocab.Vocabulary:
        return vocab.Symbols(listops_trees.SYMBOLS)

    @property
    def class_names(self) -> list[str]:
        return list("0123456789")

    @property
    def options(self) -> dict[str, int | float | str]:
        return {"preset": self.preset}

    @property
    def usual_sizes(self) -> dict[str, int]:
        return {"train": PRESETS[self.preset].num_train}

    @property
    def source(self) -> str:
        if self.path:
            return f"the arena's release in {self.path}"
        return f"generated, {self.preset}, data_seed={self.data_seed}"

    @property
    def key(self) -> str:
        if self.path:
            return f"release_{digest('arena listops 1', *(path.read_bytes() for path in self._files.values()))[:16]}"
        return super().key

    def stream(self, index: int, num_workers: int | None) -> Generator[Ragged]:
        make = lambda source: listops_trees.sample(PRESETS[self.preset].grammar, source)
        return chunks.stream(make, self.data_seed, index, num_workers=num_workers)

    def generate(self, *, num_workers: int | None = None, progress: Progress = None) -> dict[str, Ragged]:
        if self.path:
            return arena_files.listops(self._files)
        return super().generate(num_workers=num_workers, progress=progress)

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
