"""Classes of small images as sequences of grey pixels, the Long Range Arena's way (Tay et al. 2021, section 2.2.4)."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from xformer import extras
from xformer.tasks import checks, store, vocab
from xformer.tasks.dataset import TaskData
from xformer.tasks.interface import Task
from xformer.tasks.location import DataMissing, Progress, data_root, prepared_tfds, tfds_command
from xformer.tasks.origin import Origin
from xformer.tasks.ragged import Ragged
from xformer.tasks.sizes import Sizes
from xformer.tasks.text import digest

SourceName = Literal["auto", "cifar10", "fashion-mnist"]
SIDE, LEVELS, NUM_CLASSES = 32, 256, 10
FASHION_FOLDER = "/usr/share/datasets/fashion-mnist"
FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip
_TRAIN_SHARE = 0.9
_READ = 1024

Images = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Grey images uint8 [examples, 32, 32] and labels of `train` and `test`."""


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
        return (
            Origin(
                "TFDS cifar10 (Krizhevsky 2009), made grey",
                size="60,000 images",
                options={"source": "cifar10"},
                fetch=tfds_command("cifar10"),
            ),
            Origin(
                "Fashion-MNIST (Xiao et al. 2017), Debian's dataset-fashion-mnist",
                "MIT (Expat), as the package says",
                "70,000 images",
                {"source": "fashion-mnist"},
                fetch="apt install dataset-fashion-mnist",
            ),
        )

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
        files = [folder / name for pair in _FASHION_FILES.values() for name in pair]
        if self.source in ("auto", "fashion-mnist") and all(file.is_file() for file in files):
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


_FASHION_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


def grey(rgb: np.ndarray) -> np.ndarray:
    """Grey values uint8 [...] of colours uint8 [..., 3], by the formula of `tf.image.rgb_to_grayscale`."""
    luma = rgb.astype(np.float32) / 255 @ np.array([0.2989, 0.5870, 0.1140], np.float32)
    return np.clip(luma * 255.5, 0, 255).astype(np.uint8)


def _read_cifar(prepared: Path) -> tuple[Images, list[str]]:
    builder = extras.load("tensorflow_datasets").builder_from_directory(prepared)

    def read(split: str) -> tuple[np.ndarray, np.ndarray]:
        source = builder.as_data_source(split=split)
        blocks = (range(start, min(start + _READ, len(source))) for start in range(0, len(source), _READ))
        records: list[Any] = [record for block in blocks for record in source.__getitems__(list(block))]
        images = np.stack([grey(np.asarray(record["image"])) for record in records])
        return images, np.array([record["label"] for record in records], np.int32)

    return {split: read(split) for split in ("train", "test")}, list(builder.info.features["label"].names)


def _read_fashion(folder: Path) -> tuple[Images, list[str]]:
    images = {split: _pair(*(folder / name for name in names)) for split, names in _FASHION_FILES.items()}
    return images, FASHION_CLASSES


def _pair(images_file: Path, labels_file: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = _idx(images_file, 3), _idx(labels_file, 1)
    if len(images) != len(labels) or max(images.shape[1:]) > SIDE:
        raise ValueError(
            f"image: {images_file} holds {len(images)} images of {images.shape[1]} x {images.shape[2]} for "
            f"{len(labels)} labels; takes as many labels and at most {SIDE} x {SIDE}"
        )
    around = [(0, 0), *(((SIDE - side) // 2, SIDE - side - (SIDE - side) // 2) for side in images.shape[1:])]
    return np.pad(images, around), labels.astype(np.int32)


def _idx(file: Path, num_dims: int) -> np.ndarray:
    """The uint8 array of a gzipped IDX file. Raises ValueError where it is none."""
    try:
        content = gzip.decompress(file.read_bytes())
    except (OSError, EOFError) as error:
        raise ValueError(f"image: {file} is no gzip file: {error}") from None
    start = 4 + 4 * num_dims
    if content[:4] == bytes([0, 0, 8, num_dims]) and len(content) >= start:
        shape = np.frombuffer(content[4:start], ">u4").astype(np.int64)
        if len(content) - start == shape.prod():
            return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    raise ValueError(f"image: {file} is no IDX file of unsigned bytes with {num_dims} dimensions, or not whole")


def _splits(images: Images) -> dict[str, Ragged]:
    cut = int(len(images["train"][0]) * _TRAIN_SHARE)
    parts = {
        "train": tuple(array[:cut] for array in images["train"]),
        "validation": tuple(array[cut:] for array in images["train"]),
        "test": images["test"],
    }
    offsets = lambda count: np.arange(count + 1, dtype=np.int64) * SIDE**2
    return {
        split: Ragged(pixels.reshape(-1).astype(np.uint16) + np.uint16(1), offsets(len(pixels)), labels)
        for split, (pixels, labels) in parts.items()
    }
