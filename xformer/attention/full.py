"""Full attention (Vaswani et al. 2017, section 3.2.1)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from xformer.attention import pattern
from xformer.attention.pattern_attention import PatternAttention


@dataclasses.dataclass(frozen=True)
class Full(PatternAttention):
    """Every query attends to every key: softmax(Q K^T / sqrt(head_dim)) V.

    Computed tile by tile with an online softmax (Dao et al. 2022), in memory linear in the length.
    """

    POSITIONAL: ClassVar[bool] = False

    def token_pattern(self, kv_len: int, num_heads: int) -> pattern.Pattern:
        return pattern.Full()

    def remarks(self, num_positions: int) -> tuple[str, ...]:
        return ()  # full attention is what was asked for
