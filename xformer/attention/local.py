"""Block-local attention, as the Long Range Arena has it (Tay et al. 2021, "Long Range Arena", section 3.3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from xformer.attention import pattern
from xformer.attention.engine.tile_policy import tile_of_blocks
from xformer.attention.pattern_attention import PatternAttention
from xformer.attention.sizing import block_for_length
from xformer.checks import check_integer


@dataclasses.dataclass(frozen=True)
class Local(PatternAttention):
    """Each query attends to the tokens of its own block: positions `block_size * b` up to `block_size * (b + 1) - 1`.

    Nothing passes from block to block. With `causal`, to those of its block up to itself.

    Attributes:
      block_size: tokens in a block; the last block may be shorter.
    """

    REFUSES: ClassVar[Mapping[str, str]] = {"positions": "its blocks are of tokens in order"}

    block_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("Local.block_size", self.block_size)

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """Blocks of twice a 32nd of the positions, 16 to 128 tokens: about as many keys as `Window` has."""
        return cls(**{"block_size": 2 * block_for_length(num_positions), **overrides})

    def token_pattern(self, kv_len: int, num_heads: int) -> pattern.Pattern:
        return pattern.Window(0, 0, self.block_size)

    def own_block(self) -> int | None:
        has_end = self.position is not None and self.position.num_positions is not None
        return self.block_size if self.causal and not has_end else None

    def sees_all(self, num_positions: int) -> bool:
        return self.block_size >= num_positions

    def block(self, kv_len: int) -> int | None:
        return None if self.sees_all(kv_len) else tile_of_blocks(self.block_size)
