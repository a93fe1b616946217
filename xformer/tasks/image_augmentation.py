"""Other views of training images, on the device: flips and crops by PIX, and mixtures of two.

What is drawn for an image follows from the run's seed, the image's number and the epoch alone, so that a run goes on
exactly, on any number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer import extras
from xformer.tasks.ragged import Ragged

pix = extras.Lazy("dm_pix")  # optional

Array = jax.Array
VIEW, PARTNER, PARTNER_VIEW, SHARE = "view", "inputs2", "view2", "share"
"""Keys of a batch: uint32 [batch, 2], what the view of an image is drawn by; the values of the image that is mixed in,
int32 [batch, values], and its view; and the first image's share, float32 [batch]."""


def draw(
    batch: dict[str, np.ndarray], examples: Ragged, rows: np.ndarray, epochs: np.ndarray, *, seed: int, mixup: float
) -> dict[str, np.ndarray]:
    """A batch with what the views of its images are drawn by; with `mixup` also with other images and their shares.

    Args:
      rows, epochs: of the examples, int64.
      mixup: alpha of the Beta distribution that the shares are from; 0: images are not mixed.
    """
    count, size = len(batch["weights"]), len(rows)
    words = np.zeros((count, 4), np.uint32)
    partners, shares = np.zeros(size, np.int64), np.ones(count, np.float32)
    for place, key in enumerate(zip(rows.tolist(), epochs.tolist(), strict=True)):
        words[place] = np.random.SeedSequence([seed, *key]).generate_state(4)
        if mixup:
            # Only `random` of a generator is promised to give the same numbers for ever.
            random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *key, 1]))).random
            partners[place], shares[place] = int(random() * len(examples)), _beta(random, mixup)
    views: dict[str, np.ndarray] = {VIEW: words[:, :2]}
    if mixup:
        views |= {PARTNER: examples.pad(partners, count, batch["inputs"].shape[1]), PARTNER_VIEW: words[:, 2:]}
        views |= {SHARE: shares, "targets2": examples.targets(partners, count, 0)}
    return batch | views


def _beta(random: Any, alpha: float) -> float:
    """A number from Beta(alpha, alpha), in logarithms (Jöhnk 1964)."""
    while True:
        first, second = (np.log1p(-random()) / alpha for _ in range(2))
        top = max(first, second)
        total = top + np.log(np.exp(first - top) + np.exp(second - top))
        if total <= 0:
            return float(np.exp(first - total))


def view(images: Array, words: Array, *, flip: bool, crop: int) -> Array:
    """The views of images float `[batch, height, width, channels]` that `words`, uint32 `[batch, 2]`, draw.

    Args:
      flip: each is its mirror image with probability 0.5.
      crop: each is moved by up to so many pixels, as a crop of the image with its edges mirrored (He et al. 2016,
        section 4.2, with zeros).
    """

    def one(image: Array, word: Array) -> Array:
        flip_key, crop_key = jax.random.split(jax.random.wrap_key_data(word, impl="threefry2x32"))
        size = image.shape
        if flip:
            image = pix.random_flip_left_right(flip_key, image, probability=0.5)
        if crop:
            image = jnp.pad(image, ((crop, crop), (crop, crop), (0, 0)), mode="reflect")
            image = pix.random_crop(crop_key, image, size)
        return image

    return jax.vmap(one)(images, words)


def mixed(images: Array, others: Array, share: Array) -> Array:
    """Mixtures of two images each (Zhang et al. 2018, "mixup", equation 1); `share` `[batch]` is that of the first."""
    own = share[:, None, None, None]
    return own * images + (1 - own) * others


def mixed_loss(own: tuple[Array, Array], other: tuple[Array, Array], batch: Mapping[str, Any]) -> tuple[Array, Array]:
    """The loss of a mixture, which is linear in the target: that of both targets, by their shares."""
    share = batch[SHARE]
    return share * own[0] + (1 - share) * other[0], own[1]
