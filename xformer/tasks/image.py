"""Classes of small images as sequences of grey pixels, the Long Range Arena's way (Tay et al. 2021, section 2.2.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from xformer.tasks import checks, image_files, store, vocab
from xformer.tasks.dataset import TaskData
from xformer.tasks.image_files import FASHION_CLASSES, FASHION_FOLDER, Images
from xformer.tasks.interface import Task
from xformer.tasks.location import DataMissing, Progress, data_root, prepared_tfds, tfds_command
from xformer.tasks.origin import Origin
from xformer.tasks.ragged import Ragged
from xformer.tasks.sizes import Sizes
from xformer.tasks.text import digest

SourceName = Literal["auto", "cifar10", "fashion-mnist"]
SIDE, LEVELS, NUM_CLASSES = 32, 256, 10


@dataclasses.dataclass(frozen=True)
class Image(Task):
    """Images of 32 x 32 grey pixels, row by row, 256 values, ten classes; what was read is in the data's info.

    source: "cifar10", a TFDS `cifar10` prepared as array_record in the data directory, made grey as the arena does.
    "fashion-mnist", the files of Fashion-MNIST (Xiao et al. 2017, arXiv:1708.07747), whose 28 x 28 pixels stand in the
    middle of black: other images, not to be compared with published numbers of CIFAR-10. "auto": the first that is
    there. The last tenth of the training images is for validation, as in the arena.

    path: the folder of Fashion-MNIST's four `.gz` files; by default where Debian's package `dataset-fashion-mnist` puts
    them.
    """

    source: SourceName = "auto"
    path: str = FASHION_FOLDER

    def __post_init__(self) -> None:
        checks.choice("image", "source", self.source, get_args(SourceName))
        if not (isinstance(self.path, str) and self.path):
            raise ValueError(f"image: path must be a folder, got {self.path!r}")

    @property
    def length(self) -> int:
        return SIDE**2

    def expected_sizes(self) -> Sizes:
        return Sizes({"vocab_size": LEVELS + 1, "num_classes": NUM_CLASSES, "max_len": self.length})

    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        source = self._source(data_dir)

        def make() -> store.Corpus:
            if progress:
                progress(f"image: reading {source.name}")
            images, class_names = source.read()
            return store.Corpus(_splits(images), vocab.Pixels(LEVELS), class_names, {"source": source.name})

        store.write(self._directory(data_dir, source), make, progress)
        if progress:
            progress(f"image: {self.open(data_dir).summary}")

    def open(self, data_dir: str | Path | None = None) -> TaskData:
        return TaskData(store.read(self._directory(data_dir, self._source(data_dir))), self.length)

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        fetch = "apt install dataset-fashion-mnist"
        return (image_files.cifar10_origin(", made grey"), image_files.fashion_origin(fetch))

    def folder(self, data_dir: str | Path | None = None) -> Path:
        return self._directory(data_dir, self._source(data_dir))

    def _directory(self, data_dir: str | Path | None, source: _Source) -> Path:
        return store.directory(data_dir, "image", f"{source.key}_{source.digest[:16]}")

    def _source(self, data_dir: str | Path | None) -> _Source:
        root = data_root(data_dir)
        if self.source in ("auto", "cifar10") and (prepared := prepared_tfds(root, "cifar10")):
            info = (prepared / "dataset_info.json").read_bytes()
            return _Source("cifar10", f"TFDS cifar10 {prepared.name}", digest(info), lambda: _read_cifar(prepared))
        folder = Path(self.path).expanduser()
        files = image_files.fashion_files(folder)
        if self.source in ("auto", "fashion-mnist") and files is not None:
            key = digest(*(file.read_bytes() for file in files))
            return _Source("fashion_mnist", "Fashion-MNIST (not CIFAR-10)", key, lambda: _read_fashion(folder))
        ways = {
            "cifar10": f"prepare TFDS cifar10 in {root} ({tfds_command('cifar10').format(data_dir=root)}, which needs "
            "TensorFlow and a network once)",
            "fashion-mnist": f"put Fashion-MNIST's four .gz files into {folder} (on Debian: apt install "
            "dataset-fashion-mnist), or say where they are with path",
        }
        wanted = list(ways) if self.source == "auto" else [self.source]
        raise DataMissing(f"image: no images found; {' or '.join(ways[way] for way in wanted)}")


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where images come from: a name for folders and one in words, a digest of the files, and what reads them."""

    key: str
    name: str
    digest: str
    read: Callable[[], tuple[Images, list[str]]]


def grey(rgb: np.ndarray) -> np.ndarray:
    """Grey values uint8 [...] of colours uint8 [..., 3], by the formula of `tf.image.rgb_to_grayscale`."""
    luma = rgb.astype(np.float32) / 255 @ np.array([0.2989, 0.5870, 0.1140], np.float32)
    return np.clip(luma * 255.5, 0, 255).astype(np.uint8)


def _read_cifar(prepared: Path) -> tuple[Images, list[str]]:
    images, class_names = image_files.cifar10(prepared)
    return {split: (grey(colours), labels) for split, (colours, labels) in images.items()}, class_names


def _read_fashion(folder: Path) -> tuple[Images, list[str]]:
    """The images in the middle of black."""

    def framed(images: np.ndarray) -> np.ndarray:
        sides = images.shape[1:]
        return np.pad(images, [(0, 0), *(((SIDE - side) // 2, SIDE - side - (SIDE - side) // 2) for side in sides)])

    images = image_files.fashion(folder, SIDE)
    return {split: (framed(grey), labels) for split, (grey, labels) in images.items()}, FASHION_CLASSES


def _splits(images: Images) -> dict[str, Ragged]:
    offsets = lambda count: np.arange(count + 1, dtype=np.int64) * SIDE**2
    return {
        split: Ragged(pixels.reshape(-1).astype(np.uint16) + np.uint16(1), offsets(len(pixels)), labels)
        for split, (pixels, labels) in image_files.with_validation(images).items()
    }
