"""A variant of attention: a pattern, so that the engine does the rest."""

from __future__ import annotations

import dataclasses

from xformer.attention import pattern
from xformer.attention.pattern_attention import PatternAttention


@dataclasses.dataclass(frozen=True)
class FirstAndNear(PatternAttention):
    """Every query attends to `reach` tokens on both sides and to the first `num_first` tokens, which attend to all."""

    reach: int = 8
    num_first: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reach < 0 or self.num_first < 0:
            raise ValueError(f"FirstAndNear.reach and num_first must be at least 0, got {self.reach}, {self.num_first}")

    def token_pattern(self, kv_len: int, num_heads: int) -> pattern.Pattern:
        return pattern.Window(self.reach, self.reach) | pattern.Global(self.num_first, 0, kv_len)
