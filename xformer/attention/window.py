"""Sliding-window attention (Child et al. 2019; Beltagy et al. 2020, section 3.1)."""

from __future__ import annotations

import dataclasses

import numpy as np

from xformer.attention import pattern
from xformer.attention.pattern_attention import PatternAttention


@dataclasses.dataclass(frozen=True)
class Window(PatternAttention):
    """Each query attends to itself, the `left` tokens before it and the `right` tokens after it.

    Attributes:
      left, right: tokens on each side, inclusive. With `causal`, `right` has no effect.
    """

    left: int = 128
    right: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("left", "right"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0:
                raise ValueError(f"Window.{name} must be an integer of at least 0, got {size!r}")

    def token_pattern(self, kv_len: int, num_heads: int) -> pattern.Pattern:
        return pattern.Window(self.left, self.right)

    def sees_all(self, num_positions: int) -> bool:
        return self.left >= num_positions - 1 and (self.causal or self.right >= num_positions - 1)

    def block(self, kv_len: int) -> int | None:
        width = self.left + (0 if self.causal else self.right) + 1
        if 2 * width > kv_len:
            return None
        return min(max(1 << (width // 4).bit_length(), 32 if width < 64 else 64), 256)
