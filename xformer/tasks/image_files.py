"""Published images where they may lie: the files of Fashion-MNIST, and CIFAR-10 as TFDS prepares it."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xformer import extras
from xformer.tasks.location import tfds_command
from xformer.tasks.origin import Origin

Images = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Images uint8 [examples, height, width] or [..., channels] and labels int32 [examples], by split."""

FASHION_FOLDER = "/usr/share/datasets/fashion-mnist"
FASHION_SIDE, CIFAR_SIDE = 28, 32
FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip
FASHION_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
_READ = 1024
_TRAIN_SHARE = 0.9


def fashion_files(folder: Path) -> list[Path] | None:
    """The four files of a folder; None where one is missing."""
    files = [folder / name for pair in FASHION_FILES.values() for name in pair]
    return files if all(file.is_file() for file in files) else None


def fashion(folder: Path, largest: int) -> Images:
    """The images of Fashion-MNIST's files, uint8 [examples, side, side], `train` and `test`.

    Raises ValueError for a file that is damaged, or images above `largest` pixels a side.
    """
    return {
        split: _pair(folder / images, folder / labels, largest) for split, (images, labels) in FASHION_FILES.items()
    }


def cifar10(prepared: Path) -> tuple[Images, list[str]]:
    """The images that TFDS prepared, uint8 [examples, 32, 32, 3], `train` and `test`, and the names of the classes."""
    builder = extras.load("tensorflow_datasets").builder_from_directory(prepared)

    def read(split: str) -> tuple[np.ndarray, np.ndarray]:
        source = builder.as_data_source(split=split)
        blocks = (range(start, min(start + _READ, len(source))) for start in range(0, len(source), _READ))
        records: list[Any] = [record for block in blocks for record in source.__getitems__(list(block))]
        images = np.stack([np.asarray(record["image"]) for record in records])
        return images, np.array([record["label"] for record in records], np.int32)

    return {split: read(split) for split in ("train", "test")}, list(builder.info.features["label"].names)


def with_validation(images: Images) -> Images:
    """`train`, `validation`, which is the last tenth of it, and `test`."""
    cut = int(len(images["train"][0]) * _TRAIN_SHARE)
    pixels, labels = images["train"]
    return {"train": (pixels[:cut], labels[:cut]), "validation": (pixels[cut:], labels[cut:]), "test": images["test"]}


def cifar10_origin(what: str) -> Origin:
    """TFDS's data set as a source."""
    options = {"source": "cifar10"}
    return Origin(f"TFDS cifar10 (Krizhevsky 2009){what}", size="60,000 images", options=options,
                  fetch=tfds_command("cifar10"))  # fmt: skip


def fashion_origin(fetch: str) -> Origin:
    """Debian's package as a source."""
    source = "Fashion-MNIST (Xiao et al. 2017), Debian's dataset-fashion-mnist"
    options = {"source": "fashion-mnist"}
    return Origin(source, "MIT (Expat), as the package says", "70,000 images", options, fetch=fetch)


def _pair(images_file: Path, labels_file: Path, largest: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = _idx(images_file, 3), _idx(labels_file, 1)
    if len(images) != len(labels) or max(images.shape[1:]) > largest:
        raise ValueError(
            f"image: {images_file} holds {len(images)} images of {images.shape[1]} x {images.shape[2]} for "
            f"{len(labels)} labels; takes as many labels and at most {largest} x {largest}"
        )
    return images, labels.astype(np.int32)


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
