"""Pathfinder: does a dashed contour join the two dots? Pixels of generated images, as in the Long Range Arena."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from xformer.tasks import checks, chunks, pathfinder_images, store, vocab
from xformer.tasks.dataset import TaskData
from xformer.tasks.interface import Task
from xformer.tasks.location import Progress
from xformer.tasks.pathfinder_scenes import Drawing
from xformer.tasks.ragged import Ragged
from xformer.tasks.sizes import Sizes

PresetName = Literal["pathfinder_16", "pathfinder_32", "pathx"]
CLASS_NAMES = ["apart", "joined"]


@dataclasses.dataclass(frozen=True)
class Preset:
    """A drawing and the numbers of examples."""

    drawing: Drawing
    num_train: int
    num_others: int


# The sizes of the arena's "hard" images: docstrings of lra_benchmarks/data/pathfinder.py (32 x 32 and 128 x 128) and,
# for what they leave alone, the defaults of the script they name. Its input pipeline cuts 200,000 images 80/10/10.
PRESETS: Mapping[PresetName, Preset] = MappingProxyType(
    {
        "pathfinder_16": Preset(
            Drawing(
                side=16,
                contour_length=5,
                dash_length=2,
                thickness=0.5,
                margins=(1,),
                seed_distance=4,
                dot_radius=1,
                continuity=1.0,
                distractor_length=2,
                num_distractors=1,
                contrast=1.0,
            ),
            num_train=20_000,
            num_others=1_000,
        ),
        "pathfinder_32": Preset(
            Drawing(
                side=32,
                contour_length=14,
                dash_length=2,
                thickness=0.5,
                margins=(1,),
                seed_distance=7,
                dot_radius=1.5,
                continuity=1.0,
                distractor_length=4,  # 14 // 3
                num_distractors=5,  # 20 // 4
                contrast=1.0,  # 0.75 of a snake's 2, which is more than white
            ),
            num_train=160_000,
            num_others=20_000,
        ),
        "pathx": Preset(
            Drawing(
                side=128,
                contour_length=14,
                dash_length=5,
                thickness=1.5,
                margins=(2, 3),
                seed_distance=20,
                dot_radius=3,
                continuity=1.8,
                distractor_length=4,
                num_distractors=8,  # 35 / 4
                contrast=0.9,
            ),
            num_train=160_000,
            num_others=20_000,
        ),
    }
)


@dataclasses.dataclass(frozen=True)
class Pathfinder(Task):
    """Images as sequences of pixels, row by row, class 1 ("joined") where both dots end the same contour.

    preset: "pathfinder_32" (1,024 tokens), "pathx" (16,384 tokens), or "pathfinder_16" (256 tokens), a smaller one of
    ours for CPUs. Sizes default to the preset's, `data_seed` draws other images. `xformer.tasks.pathfinder_scenes` says
    how they are drawn, and in what they differ from the arena's own, so that only the path tells the classes apart.

    Both classes are equally frequent, test and validation images don't depend on the number of training images, and no
    image occurs twice. Raises ValueError for a preset that doesn't exist or a size below 1.
    """

    preset: PresetName = "pathfinder_32"
    num_train: int | None = None
    num_validation: int | None = None
    num_test: int | None = None
    data_seed: int = 0

    def __post_init__(self) -> None:
        checks.choice("pathfinder", "preset", self.preset, PRESETS)
        for key in ("num_train", "num_validation", "num_test"):
            if (value := getattr(self, key)) is not None:
                checks.whole("pathfinder", key, value, at_least=1)
        checks.whole("pathfinder", "data_seed", self.data_seed, at_least=0)

    @property
    def drawing(self) -> Drawing:
        """How the images are drawn."""
        return PRESETS[self.preset].drawing

    @property
    def length(self) -> int:
        return self.drawing.side**2

    def expected_sizes(self) -> Sizes:
        vocab_size = vocab.Pixels(pathfinder_images.LEVELS).size
        return Sizes({"vocab_size": vocab_size, "num_classes": len(CLASS_NAMES), "max_len": self.length})

    @property
    def split_sizes(self) -> dict[str, int]:
        """Examples of each split."""
        preset = PRESETS[self.preset]
        given = {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}
        usual = {"train": preset.num_train, "validation": preset.num_others, "test": preset.num_others}
        return {split: usual[split] if size is None else size for split, size in given.items()}

    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        def make() -> store.Corpus:
            if progress:
                progress(f"pathfinder: drawing {sum(self.split_sizes.values()):,} images of {self.preset}")
            facts = {"source": f"generated, {self.preset}, data_seed={self.data_seed}"}
            vocabulary = vocab.Pixels(pathfinder_images.LEVELS)
            return store.Corpus(self.generate(progress=progress), vocabulary, CLASS_NAMES, facts)

        store.write(self._directory(data_dir), make)
        if progress:
            progress(f"pathfinder: {self.open(data_dir).summary}")

    def open(self, data_dir: str | Path | None = None) -> TaskData:
        return TaskData(store.read(self._directory(data_dir)), self.length)

    def generate(self, *, num_workers: int | None = None, progress: Progress = None) -> dict[str, Ragged]:
        """The three splits, whatever the number of threads: token ids uint8, labels 0 and 1.

        `progress` gets a line every few seconds.
        """
        return chunks.splits(
            lambda source: pathfinder_images.chunk(self.drawing, source),
            self.split_sizes,
            self.data_seed,
            "pathfinder: COUNT images",
            num_workers=num_workers,
            progress=progress,
        )

    def _directory(self, data_dir: str | Path | None) -> Path:
        sizes = "_".join(str(size) for size in self.split_sizes.values())
        return store.directory(data_dir, "pathfinder", f"{self.preset}_{sizes}_seed{self.data_seed}")
