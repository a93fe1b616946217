"""A folder of images with a folder for each class, or with folders `train`, `validation` and `test` of such folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from xformer.tasks.chunks import every_few_seconds
from xformer.tasks.image_files import Images
from xformer.tasks.image_reading import read_with_digest
from xformer.tasks.location import Progress
from xformer.tasks.splits import hash_split

SPLITS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}
ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
LIKE_SPLITS = (*SPLITS, "training", "valid", "dev", "eval", "testing")  # lower case
SHARES = {"validation": 0.1, "test": 0.2}
BESIDE = ("thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx")  # what systems put beside images, lower case


def files(folder: Path) -> dict[str, dict[str, list[Path]]]:
    """The files by split and class, in order; "" is the split of those that are still to be shared out.

    Hidden files and folders are left aside, and what systems put beside images (`Thumbs.db`).

    Raises:
      ValueError: no such folder, no or only one class, a class without images, a file that is no image, splits that do
        not have the same classes, or folders that could be splits as well as classes.
    """
    if not folder.is_dir():
        raise ValueError(f"images: path must be a folder with a folder of images for each class, got {str(folder)!r}")
    inner = _folders(folder)
    given = {name: path for name, path in inner.items() if name in SPLITS}
    named = [SPLITS[name] for name in given]
    if "train" in given and len(given) == len(inner) == len(set(named)):
        found = {SPLITS[name]: _classes(path) for name, path in given.items()}
        for split, classes in found.items():
            if set(classes) != set(found["train"]):
                odd = sorted(set(classes) ^ set(found["train"]))[0]
                raise ValueError(f"images: {folder}: class {odd!r} is in one of train and {split} and not in the other")
        if missing := [split for split in ("validation", "test") if split not in found]:
            raise ValueError(f"images: {folder} has a folder train, but none for {' and '.join(missing)}")
        return found
    like = [name for name, path in inner.items() if name.lower() in LIKE_SPLITS and _folders(path)]
    if len(like) > 1:  # as classes they would be told apart by nothing
        raise ValueError(
            f"images: {folder} has the folders {', '.join(inner)}, of which {', '.join(like)} look like splits; takes "
            "train, validation (or val) and test with nothing beside them, or a folder for each class"
        )
    return {"": _classes(folder)}


def read_splits(
    found: dict[str, dict[str, list[Path]]], side: int, channels: int, progress: Progress = None
) -> tuple[Images, list[str]]:
    """The images in their splits, uint8 `[examples, side, side, channels]`, and the names of the classes.

    Where the folder does not say which, a tenth of each class is for validation and a fifth for test, by a hash of the
    pixels as they are stored: copies of an image are in one split, and at another `side` each is in the same.

    Raises ValueError for a file that can't be read.
    """
    class_names = sorted(next(iter(found.values())))
    say = every_few_seconds(progress, "images: COUNT files read")
    splits: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    digests: dict[str, list[str]] = {split: [] for split in found}
    for split, classes in found.items():
        rows = [(file, label) for label, name in enumerate(class_names) for file in classes[name]]
        images = np.zeros((len(rows), side, side, channels), np.uint8)
        for index, (file, _) in enumerate(rows):
            say(index)
            images[index], whole = _read(file, side, channels)
            digests[split].append(whole)
        splits[split] = images, np.array([label for _, label in rows], np.int32)
    if "" not in splits:
        return splits, class_names
    images, labels = splits[""]
    chosen = hash_split(digests[""], [str(label) for label in labels], SHARES)
    for indices in chosen.values():
        if absent := sorted(set(range(len(class_names))) - set(labels[indices].tolist())):
            count = len({one for one, label in zip(digests[""], labels, strict=True) if label == absent[0]})
            raise ValueError(
                f"images: class {class_names[absent[0]]!r} has too few different images for train, validation and "
                f"test: it needs 3 at least, got {count}"
            )
    return {split: (images[indices], labels[indices]) for split, indices in chosen.items()}, class_names


def unlabelled(path: Path) -> list[tuple[str, Path]]:
    """(place, file) of an image without a class, or of those in a folder at any depth, in order: its name, or its path
    in the folder. What `files` leaves aside is left aside.

    Raises ValueError where nothing is there, or a file is no image.
    """
    if path.is_dir():
        return [(file.relative_to(path).as_posix(), file) for file in _images(path)]
    if not path.is_file():
        raise ValueError(f"path: got {str(path)!r}, takes a file or folder that is there")
    _check_ending(path)
    return [(path.name, path)]


def _read(file: Path, side: int, channels: int) -> tuple[np.ndarray, str]:
    try:
        return read_with_digest(file, side, side, channels)
    except ValueError as error:
        raise ValueError(f"images: {error}") from error


def _is_aside(name: str) -> bool:
    """Whether a file or folder is nothing of the user's: hidden, or put there by a system."""
    return name.startswith(".") or name.lower() in BESIDE


def _folders(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and not _is_aside(path.name)}


def _classes(folder: Path) -> dict[str, list[Path]]:
    beside = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in ENDINGS and not _is_aside(path.name)]
    if beside:
        raise ValueError(f"images: {beside[0]} must lie in the folder of its class, and lies beside the folders")
    classes = _folders(folder)
    if len(classes) < 2:
        raise ValueError(
            f"images: {folder} must have a folder of images for each of at least 2 classes, "
            f"got {', '.join(classes) or 'none'}"
        )
    return {name: _images(path) for name, path in classes.items()}


def _images(folder: Path) -> list[Path]:
    aside = lambda path: any(map(_is_aside, path.relative_to(folder).parts))
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not aside(path)]
    if not found:
        raise ValueError(f"images: {folder} has no images")
    for file in found:
        _check_ending(file)
    return found


def _check_ending(file: Path) -> None:
    if file.suffix.lower() not in ENDINGS:
        raise ValueError(f"images: {file} is no image: takes files that end in {', '.join(ENDINGS)}")
