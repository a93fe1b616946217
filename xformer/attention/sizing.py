"""Hyperparameters that suit a length, for the `for_length` of the variants and position terms."""

from __future__ import annotations

import math


def block_for_length(num_positions: int) -> int:
    """A granularity for patterns over so many positions: the power of 2 nearest to a 32nd of them, from 8 to 64."""
    return min(max(1 << round(math.log2(max(num_positions, 32) / 32)), 8), 64)
