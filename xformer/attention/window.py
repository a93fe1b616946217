"""Sliding-window attention (Child et al. 2019; Beltagy et al. 2020, section 3.1)."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from xformer.attention import pattern
from xformer.attention.engine.tile_policy import tile_of_window
from xformer.attention.pattern_attention import PatternAttention
from xformer.attention.sizing import block_for_length
from xformer.checks import check_integer


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
            check_integer(f"Window.{name}", getattr(self, name), at_least=0)

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """A window of about a 32nd of the positions to each side, from 8 to 64; none to the right if causal.

        Raises ValueError for `causal` with a `right` above 0, which would have no effect.
        """
        side = block_for_length(num_positions)
        if overrides.get("causal") and overrides.get("right", 0) > 0:
            raise ValueError(f"Window.right must be 0 in a causal window, got {overrides['right']}")
        return cls(**{"left": side, "right": 0 if overrides.get("causal") else side, **overrides})

    def token_pattern(self, kv_len: int, num_heads: int) -> pattern.Pattern:
        farthest = 2**31 - 1  # no distance is larger: positions are 32-bit integers
        return pattern.Window(min(self.left, farthest), min(self.right, farthest))

    def sees_all(self, num_positions: int) -> bool:
        return self.left >= num_positions - 1 and (self.causal or self.right >= num_positions - 1)

    def lookback(self) -> int | None:
        has_end = self.position is not None and self.position.num_positions is not None
        return self.left if self.causal and not has_end else None

    def block(self, kv_len: int) -> int | None:
        return tile_of_window(self.left + (0 if self.causal else self.right) + 1, kv_len)
