"""Classes of images, as images: for models that read pixels in two dimensions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import jax.numpy as jnp
import numpy as np

from xformer import extras
from xformer.checks import is_integer
from xformer.tasks import checks, image_augmentation, image_files, image_folder, pipeline, store, vocab
from xformer.tasks.dataset import TaskData
from xformer.tasks.family import Metric
from xformer.tasks.image_files import CIFAR_SIDE, FASHION_CLASSES, FASHION_FOLDER, FASHION_SIDE
from xformer.tasks.image_files import Images as Splits
from xformer.tasks.image_reading import resized, standard
from xformer.tasks.interface import ASSUMED_CLASSES, Task
from xformer.tasks.location import DataMissing, Progress, data_root, prepared_tfds
from xformer.tasks.origin import Origin
from xformer.tasks.ragged import Ragged
from xformer.tasks.released import how_to_tfds
from xformer.tasks.sizes import Sizes
from xformer.tasks.text import digest

SourceName = Literal["fashion-mnist", "cifar10", "folder"]
FETCH = "apt-get download dataset-fashion-mnist && dpkg-deb -x dataset-fashion-mnist_*.deb {folder}"
FOLDER_SIDE = 64
CHANNELS = {"fashion-mnist": 1, "cifar10": 3, "folder": 3}
_READING = "1"  # what the same files are read as; another number where that changes
_FOLDER_READING = "2"  # likewise of a folder's alone


@dataclasses.dataclass(frozen=True)
class ImageClasses(Task):
    """Square images and their classes.

    A model reads `images` float32 [batch, side, side, channels] with values from -1 to 1. In training other views of
    them may be drawn, in evaluation never.

    source: "fashion-mnist" (Xiao et al. 2017, arXiv:1708.07747), 28 x 28 grey pixels; "cifar10" (Krizhevsky 2009), 32 x
    32 in colour, as TFDS prepares it in array_record; the last tenth of their training images is for validation. Or
    "folder", any images in colour: see `image_folder`.

    path: the folder of images; of Fashion-MNIST that of its four `.gz` files, or into which the Debian package
    `dataset-fashion-mnist` is extracted; "": where the installed package puts them, or `fashion-mnist` in the data
    directory.

    size: side in pixels that images are scaled to, those of a folder cut to a square first; None: as they are, those of
    a folder 64.

    flip: a training image is mirrored, left to right, with probability 0.5. crop: training images are moved by up to so
    many pixels. mixup: alpha of the mixtures of two training images each (Zhang et al. 2018); 0: none, and `accuracy`
    in training counts the first of the two.
    """

    name: ClassVar[str] = "images"

    source: SourceName = "fashion-mnist"
    path: str = ""
    size: int | None = None
    flip: bool = False
    crop: int = 0
    mixup: float = 0.0

    def __post_init__(self) -> None:
        checks.choice(self.name, "source", self.source, get_args(SourceName))
        if not isinstance(self.path, str):
            raise ValueError(f"{self.name}: path must be a string, got {self.path!r}")
        if self.source == "folder" and not self.path:
            raise ValueError(f"{self.name}: path must be the folder of the images where source is 'folder', got ''")
        if self.source == "cifar10" and self.path:
            raise ValueError(f"{self.name}: path must be '' where source is 'cifar10', got {self.path!r}")
        if self.size is not None:
            checks.whole(self.name, "size", self.size, at_least=1)
        if not isinstance(self.flip, bool):
            raise ValueError(f"{self.name}: flip must be True or False, got {self.flip!r}")
        if not is_integer(self.crop) or not 0 <= self.crop < self.side:
            raise ValueError(f"{self.name}: crop must be an int from 0 to {self.side - 1}, got {self.crop!r}")
        if isinstance(self.mixup, bool) or not isinstance(self.mixup, Real) or not 0 <= float(self.mixup) <= 100:
            raise ValueError(f"{self.name}: mixup must be a number from 0 to 100, got {self.mixup!r}")

    @property
    def side(self) -> int:
        """Pixels of a side."""
        usual = {"fashion-mnist": FASHION_SIDE, "cifar10": CIFAR_SIDE, "folder": FOLDER_SIDE}
        return usual[self.source] if self.size is None else self.size

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return self.side, self.side, CHANNELS[self.source]

    @property
    def length(self) -> int:
        """The values of an image."""
        return int(np.prod(self.shape))

    def sizes(self, preprocessing: Any = None) -> Sizes:
        """Those of every task, and `image_height`, `image_width` and `num_channels`."""
        found = super().sizes(preprocessing)
        return Sizes({**found, **_image_sizes(self.shape)}, found.assumed)

    def expected_sizes(self) -> Sizes:
        found = {"vocab_size": self._vocabulary.size, "num_classes": ASSUMED_CLASSES, "max_len": self.length}
        return Sizes(found, ("num_classes",) if self.source == "folder" else ())

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """`images` float32 [batch, side, side, channels], in training as they are drawn for this epoch."""
        read = lambda values: standard((values - 1).astype(jnp.float32)).reshape(-1, *self.shape)
        view = functools.partial(image_augmentation.view, flip=self.flip, crop=self.crop)
        images = read(batch["inputs"])
        if image_augmentation.VIEW in batch:
            images = view(images, batch[image_augmentation.VIEW])
        if image_augmentation.PARTNER in batch:
            others = view(read(batch[image_augmentation.PARTNER]), batch[image_augmentation.PARTNER_VIEW])
            images = image_augmentation.mixed(images, others, batch[image_augmentation.SHARE])
        return {"images": images}

    def metrics(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """Those of one class an example; the loss of a mixture is that of both targets."""
        found = super().metrics(outputs, batch)
        if "targets2" in batch:
            other = super().metrics(outputs, {**batch, "targets": batch["targets2"]})
            found["loss"] = image_augmentation.mixed_loss(found["loss"], other["loss"], batch)  # type: ignore[arg-type]
        return found

    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        if self.flip or self.crop:
            extras.load("dm_pix")  # missed before a run begins
        key, source, read = self._source(data_dir)

        def make() -> store.Corpus:
            if progress:
                progress(f"{self.name}: reading {source}")
            images, class_names = read(progress)
            splits = {split: self._ragged(*pair) for split, pair in images.items()}
            return store.Corpus(splits, self._vocabulary, class_names, {"source": source})

        store.write(store.directory(data_dir, self.name, key), make, progress)
        if progress:
            progress(f"{self.name}: {self.open(data_dir).summary}")

    def open(self, data_dir: str | Path | None = None) -> TaskData:
        return ImageData(self, store.read(self.folder(data_dir)))

    def folder(self, data_dir: str | Path | None = None) -> Path:
        return store.directory(data_dir, self.name, self._source(data_dir)[0])

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        fetch = FETCH.format(folder="{data_dir}/fashion-mnist")
        own = Origin("a folder of one's own", given={"path": "FOLDER"}, options={"source": "folder"})
        return (image_files.fashion_origin(fetch), image_files.cifar10_origin(""), own)

    @property
    def _vocabulary(self) -> vocab.ImageValues:
        return vocab.ImageValues(*self.shape)

    def _ragged(self, images: np.ndarray, labels: np.ndarray) -> Ragged:
        scaled = resized(images.reshape(*images.shape[:3], -1), self.side)
        offsets = np.arange(len(scaled) + 1, dtype=np.int64) * self.length
        return Ragged(scaled.reshape(-1).astype(np.uint16) + np.uint16(1), offsets, labels)

    def _source(self, data_dir: str | Path | None) -> tuple[str, str, Callable[[Progress], tuple[Splits, list[str]]]]:
        """(the key of its folder, where the images come from in words, what reads them)."""
        root = data_root(data_dir)
        key = lambda *parts: f"{self.source.replace('-', '_')}_{self.side}_{digest(_READING, *parts)[:16]}"
        if self.source == "folder":
            folder = Path(self.path).expanduser()
            found = image_folder.files(folder)
            parts = [part for split, classes in found.items() for name, files in classes.items() for file in files
                     for part in (split, name, file.name, file.read_bytes())]  # fmt: skip
            return (
                key(_FOLDER_READING, *parts),
                f"images of {folder}",
                lambda progress: image_folder.read_splits(found, self.side, CHANNELS[self.source], progress),
            )
        if self.source == "cifar10":
            if (prepared := prepared_tfds(root, "cifar10")) is None:
                raise DataMissing(f"{self.name}: no CIFAR-10 in {root}; {how_to_tfds(root, 'cifar10')}")
            info = (prepared / "dataset_info.json").read_bytes()

            def read(_: Progress) -> tuple[Splits, list[str]]:
                images, class_names = image_files.cifar10(prepared)
                return image_files.with_validation(images), class_names

            return key(info), f"TFDS cifar10 {prepared.name}", read
        given = [Path(self.path).expanduser()] if self.path else [Path(FASHION_FOLDER), root / "fashion-mnist"]
        for folder in (place for one in given for place in (one, one / FASHION_FOLDER.lstrip("/"))):
            if files := image_files.fashion_files(folder):
                fashion = functools.partial(_fashion, folder)
                return key(*(file.read_bytes() for file in files)), "Fashion-MNIST", fashion
        raise DataMissing(
            f"{self.name}: no Fashion-MNIST in {' or '.join(map(str, given))}; on Debian or Ubuntu: "
            f"{FETCH.format(folder=given[-1])}" + "; a folder of other images takes source 'folder'" * bool(self.path)
        )


def _fashion(folder: Path, _: Progress) -> tuple[Splits, list[str]]:
    return image_files.with_validation(image_files.fashion(folder, FASHION_SIDE)), FASHION_CLASSES


class ImageData(TaskData):
    """Images as rows of values; those of training with what their views are drawn by."""

    by_length = False  # all batches have one length

    def __init__(self, task: ImageClasses, corpus: store.Corpus) -> None:
        self._task = task
        super().__init__(corpus, task.length)
        self.sizes = Sizes({**self.sizes, **_image_sizes(task.shape)})

    @property
    def summary(self) -> str:
        """One line for people: the size of the images and how many there are; how many tokens one is says the model."""
        height, width, channels = self._task.shape
        counts = ", ".join(f"{count:,} {split}" for split, count in self.info["num_examples"].items())
        return f"images of {height} x {width} pixels{' in colour' * (channels > 1)}: {counts}"

    def _change(self, split: str, seed: int) -> pipeline.Change | None:
        task = self._task
        if split != "train" or not (task.flip or task.crop or task.mixup):
            return None
        examples, mixup = self.examples(split), float(task.mixup)
        return lambda batch, rows, epochs: image_augmentation.draw(
            batch, examples, rows, epochs, seed=seed, mixup=mixup
        )


def _image_sizes(shape: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("image_height", "image_width", "num_channels"), shape, strict=True))
