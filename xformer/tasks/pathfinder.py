"""Pathfinder: does a dashed contour join the two dots? Pixels of generated images, as in the Long Range Arena."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from xformer.tasks import checks, chunks, pathfinder_images, vocab
from xformer.tasks.generated import Generated
from xformer.tasks.pathfinder_scenes import Drawing
from xformer.tasks.ragged import Ragged

PresetName = Literal["pathfinder_16", "pathfinder_32", "pathx"]


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
class Pathfinder(Generated):
    """Images as sequences of pixels, row by row, class 1 ("joined") where both dots end the same contour.

    preset: "pathfinder_32" (1,024 tokens), "pathx" (16,384 tokens), or "pathfinder_16" (256 tokens), a smaller one of
    ours for CPUs. Sizes default to the preset's, `data_seed` draws other images. `xformer.tasks.pathfinder_scenes` says
    how they are drawn, and in what they differ from the arena's own, so that only the path tells the classes apart.

    Both classes are equally frequent, test and validation images don't depend on the number of training images, and no
    image occurs twice. Raises ValueError for a preset that doesn't exist or a size below 1.
    """

    name: ClassVar[str] = "pathfinder"
    examples_are: ClassVar[str] = "images"

    preset: PresetName = "pathfinder_32"
    num_validation: int | None = dataclasses.field(default=None, kw_only=True)
    num_test: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice(self.name, "preset", self.preset, PRESETS)

    @property
    def drawing(self) -> Drawing:
        """How the images are drawn."""
        return PRESETS[self.preset].drawing

    @classmethod
    def presets(cls) -> tuple[Mapping[str, Any], ...]:
        return tuple({"preset": name} for name in PRESETS)

    @property
    def length(self) -> int:
        return self.drawing.side**2

    @property
    def vocabulary(self) -> vocab.Vocabulary:
        return vocab.Pixels(pathfinder_images.LEVELS)

    @property
    def class_names(self) -> list[str]:
        return ["apart", "joined"]

    @property
    def options(self) -> dict[str, int | float | str]:
        return {"preset": self.preset}

    @property
    def usual_sizes(self) -> dict[str, int]:
        preset = PRESETS[self.preset]
        return {"train": preset.num_train, "validation": preset.num_others, "test": preset.num_others}

    def stream(self, index: int, num_workers: int | None) -> Generator[Ragged]:
        make = lambda source: pathfinder_images.chunk(self.drawing, source)
        return chunks.stream(make, self.data_seed, index, num_workers=num_workers)
