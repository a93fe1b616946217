"""Learned positions for longer texts than a model was trained on."""

from __future__ import annotations

from typing import Literal

import numpy as np

Extension = Literal["copy", "interpolate"]


def extend(table: np.ndarray, rows: int, offset: int, how: Extension) -> np.ndarray:
    """A table for more or fewer positions.

    Args:
      table: `[..., offset + max_len, width]`; the first `offset` rows stay as they are.
      rows: of the new table, those `offset` included. Fewer than there are: the table is cut.
      offset: see `LearnedPositions`.
      how: "copy": the rows of positions are repeated from the first (Beltagy et al. 2020, section 5). "interpolate":
        the new positions lie evenly between the first and the last, linearly (as Chen et al. 2023, section 3.2, do
        with rotary positions).
    """
    head, body, length = table[..., :offset, :], table[..., offset:, :], rows - offset
    known = body.shape[-2]
    if length <= known:
        return table[..., :rows, :]
    join = lambda longer: np.concatenate([head, longer.astype(table.dtype)], axis=-2)
    if how == "copy":
        return join(np.take(body, np.arange(length) % known, axis=-2))
    place = np.arange(length) * ((known - 1) / max(length - 1, 1))
    low = np.minimum(place.astype(int), max(known - 2, 0))
    high, share = np.minimum(low + 1, known - 1), (place - low)[:, None].astype(np.float32)
    return join(np.take(body, low, axis=-2) * (1 - share) + np.take(body, high, axis=-2) * share)
