"""Images from files by Pillow, in one size, and as the numbers that models read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from xformer import extras

Image = extras.Lazy("PIL.Image")  # optional
ImageOps = extras.Lazy("PIL.ImageOps")

MODES = {1: "L", 3: "RGB"}  # Pillow's names, by the numbers of a pixel


def read(file: str | Path, height: int, width: int, channels: int) -> np.ndarray:
    """The image of a file, upright, cut to the proportions of the size around its middle and scaled to it.

    Of an animation it is the first picture; what is transparent is not; grey values of 16 bits become those of 8.

    Args:
      file: of any format that Pillow reads.
      channels: 1, grey, or 3, red, green and blue.

    Returns:
      uint8 `[height, width, channels]`.

    Raises:
      ValueError: the file can't be read as an image.
      MissingExtra: Pillow is not installed.
    """
    return read_with_digest(file, height, width, channels)[0]


def read_with_digest(file: str | Path, height: int, width: int, channels: int) -> tuple[np.ndarray, str]:
    """As `read`, and a digest of the upright image in its own size, which copies of it have in common."""
    open_image, errors = Image.open, (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
    try:
        with open_image(file) as opened:
            converted = _eight_bits(ImageOps.exif_transpose(opened)).convert(MODES[channels])
            fitted = ImageOps.fit(converted, (width, height), Image.Resampling.BILINEAR)
    except errors as error:
        raise ValueError(f"{file} can't be read as an image: {' '.join(str(error).split())[:200]}") from error
    whole = hashlib.sha256(f"{converted.size}".encode() + converted.tobytes()).hexdigest()
    return np.asarray(fitted, np.uint8).reshape(height, width, channels), whole


def _eight_bits(image: Any) -> Any:
    """Grey values of 16 bits as those of 8: Pillow itself would cut off what is above 255."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.clip(np.asarray(image), 0, 65_535) // 257).astype(np.uint8))


def resized(images: np.ndarray, side: int) -> np.ndarray:
    """Square images uint8 `[examples, height, width, channels]` in another size, by Pillow's bilinear filter.

    Raises MissingExtra where Pillow is not installed.
    """
    if images.shape[1:3] == (side, side):
        return images
    scale: Any = lambda x: Image.fromarray(x).resize((side, side), Image.Resampling.BILINEAR)
    scaled = [np.asarray(scale(image[..., 0] if image.shape[-1] == 1 else image), np.uint8) for image in images]
    return np.stack(scaled).reshape(len(images), side, side, images.shape[-1])


def standard(values: Any) -> Any:
    """Values from 0 to 255 as numbers from -1 to 1."""
    return values / 127.5 - 1
