"""The sizes that all contenders of `benchmarks.train_steps` share, and the random data that they train on."""

from __future__ import annotations

from typing import Any

import numpy as np

LAYERS, WIDTH, HEADS, MLP_DIM, BLOCK, VOCAB, CLASSES = 4, 512, 8, 1024, 64, 256, 10
DECODER_VOCAB, PATCH, CHANNELS = 1024, 4, 3
LEARNING_RATE = 1e-5  # so small that the loss stays away from zero, and gradients from numbers that CPUs are slow at
WEIGHT_DECAY = 1e-4


def layers() -> dict[str, Any]:
    """The keywords of our models."""
    return {"num_layers": LAYERS, "width": WIDTH, "num_heads": HEADS, "mlp_dim": MLP_DIM}


def tokens(batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [batch, length] (none is Transformers' padding id 0) and labels [batch], int32."""
    rng = np.random.default_rng(0)
    return rng.integers(1, VOCAB, (batch, length), np.int32), rng.integers(0, CLASSES, batch, np.int32)


def next_tokens(batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and those that come after them, int32 [batch, length] each."""
    drawn = np.random.default_rng(0).integers(1, DECODER_VOCAB, (batch, length + 1), np.int32)
    return drawn[:, :-1], drawn[:, 1:]


def images(batch: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Square images, float32 [batch, side, side, CHANNELS], and labels, int32 [batch]."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(batch, side, side, CHANNELS)).astype(np.float32), rng.integers(0, CLASSES, batch, np.int32)
