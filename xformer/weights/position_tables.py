"""Learned positions for longer texts than a model was trained on."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from xformer.weights.errors import WeightsError

Extension = Literal["copy", "interpolate"]


def check_extension(how: str) -> None:
    """Raises WeightsError for an unknown name."""
    if how not in get_args(Extension):
        raise WeightsError(f"positions must be 'copy' or 'interpolate', got {how!r}")


def extend(table: np.ndarray, rows: int, offset: int, how: Extension) -> np.ndarray:
    """A table for more or fewer positions.

    Args:
      table: `[offset + max_len, width]`; the first `offset` rows stay as they are.
      rows: of the new table, those `offset` included. Fewer than there are: the table is cut.
      offset: see `LearnedPositions`.
      how: "copy": the rows of positions are repeated from the first (Beltagy et al. 2020, section 5). "interpolate":
        the new positions lie evenly between the first and the last, linearly (as Chen et al. 2023, section 3.2, do
        with rotary positions).
    """
    head, body, length = table[:offset], table[offset:], rows - offset
    if length <= len(body):
        return table[:rows]
    if how == "copy":
        return np.concatenate([head, body[np.arange(length) % len(body)]])
    place = np.arange(length) * ((len(body) - 1) / max(length - 1, 1))
    low = np.minimum(place.astype(int), max(len(body) - 2, 0))
    high, share = np.minimum(low + 1, len(body) - 1), (place - low)[:, None].astype(np.float32)
    between = body[low] * (1 - share) + body[high] * share
    return np.concatenate([head, between.astype(table.dtype)])
