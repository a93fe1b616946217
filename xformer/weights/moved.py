"""How far logits move when a loaded model is changed, on given texts."""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import nnx

from xformer.weights.errors import WeightsError
from xformer.weights.loading import Pretrained


def moved(before: Pretrained, after: Pretrained, inputs: str | Any, mask: Any = None) -> dict[str, float]:
    """What a swap of the attention, or a longer table of positions, does to the logits before any training.

    Args:
      before, after: two models out of one folder, with the same head.
      inputs: a text, which the folder's tokenizer reads; or int `[batch, length]` token ids of the folder.
      mask: bool `[batch, length]`, True at real tokens; None: all are.

    Returns:
      `largest` and `mean` absolute difference of a logit, `scale`, the mean absolute logit of `before`, and
      `same_choice`, the share of texts, or of tokens, whose largest logit is the same one.

    Raises:
      ValueError: logits of different shapes, or a text where the folder has no tokenizer.
    """
    if isinstance(inputs, str):
        if (tokenizer := before.tokenizer) is None:
            raise WeightsError(f"{before.folder} has no tokenizer to read a text with; give token ids")
        longest = min(found.architecture.max_len for found in (before, after))
        inputs = np.array([tokenizer.encode(inputs).ids[:longest]], np.int32)
    first, second = (_logits(found.model, inputs, mask) for found in (before, after))
    if first.shape != second.shape:
        raise ValueError(f"both models must give logits of one shape, got {first.shape} and {second.shape}")
    if first.ndim == 3 and mask is not None:
        first, second = (x[np.asarray(mask) > 0] for x in (first, second))
    difference = np.abs(first - second)
    return {
        "largest": float(difference.max()),
        "mean": float(difference.mean()),
        "scale": float(np.abs(first).mean()),
        "same_choice": float((first.argmax(-1) == second.argmax(-1)).mean()),
    }


def _logits(model: Any, inputs: Any, mask: Any) -> np.ndarray:
    out = nnx.jit(lambda model, inputs, mask: model(inputs, mask))(model, inputs, mask)
    return np.asarray(out.dense() if hasattr(out, "dense") else out)
