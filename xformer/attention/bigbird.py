"""BigBird: random, window and global blocks (Zaheer et al. 2020, section 2 and appendix D)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from xformer.attention import pattern
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.engine.tile_policy import MAX_TILE
from xformer.attention.pattern_attention import PatternAttention
from xformer.attention.sizing import block_for_length
from xformer.checks import check_integer


@dataclasses.dataclass(frozen=True)
class BigBird(PatternAttention):
    """The union of a block window, global blocks and random blocks; the internal construction (ITC).

    The length is cut into `ceil(length / block_size)` blocks, so the pattern is a function of the padded length. Of the
    `num_global_blocks`, the first half (rounded up) and the last half attend to all and are attended by all. Every
    other block attends to the `num_window_blocks` around it and to `num_random_blocks` drawn without replacement from
    the blocks of the whole length that it does not see already (all of them where there are fewer), anew for each head
    and layer. Lengths so short that this covers everything are full attention.

    With `num_global_tokens` the first positions, which the caller puts there, are global: the external construction
    (ETC) of section 2.

    With `causal` the same is cut at the diagonal and the random blocks are drawn from the past.

    Attributes:
      block_size: tokens in a block.
      num_random_blocks: random blocks a query block, 0 or more.
      num_window_blocks: blocks of the window, odd, the query's own included.
      num_global_blocks: global blocks, 0 or more; 2 is the first and the last.
      num_global_tokens: global tokens at the start, 0 or more.
      seed: seed of the random blocks.
      layer: which layer's random blocks.
    """

    PLAN_FIELDS: ClassVar[tuple[str, ...]] = ("seed", "layer")

    block_size: int = 64
    num_random_blocks: int = 3
    num_window_blocks: int = 3
    num_global_blocks: int = 2
    num_global_tokens: int = 0
    seed: int = 0
    layer: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"block_size": 1, "num_window_blocks": 1}
        for field in dataclasses.fields(BigBird):
            if field.kw_only:
                continue
            check_integer(f"BigBird.{field.name}", getattr(self, field.name), at_least=least.get(field.name, 0))
        if self.num_window_blocks % 2 == 0:
            raise ValueError(
                f"BigBird.num_window_blocks must be odd (centred on the query), got {self.num_window_blocks}"
            )

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """About 32 blocks of 8 to 64 tokens: `block_size` is the power of 2 nearest to a 32nd of the positions."""
        return cls(**{"block_size": block_for_length(num_positions), **overrides})

    def at_layer(self, index: int) -> BigBird:
        return dataclasses.replace(self, layer=index)

    def token_pattern(self, kv_len: int, num_heads: int) -> pattern.Pattern:
        # A block beyond the length is the length, and so is a window: as numbers they may not fit 32 bits.
        unit = min(self.block_size, kv_len)
        num_blocks = ceil_div(kv_len, unit)
        side = min(self.num_window_blocks // 2, num_blocks)
        first = min(ceil_div(self.num_global_blocks, 2), num_blocks)
        last = min(self.num_global_blocks // 2, num_blocks - first)
        visible: pattern.Pattern = pattern.Window(side, side, unit)
        if self.num_global_blocks:
            visible |= pattern.Global(first, last, num_blocks, unit)
        if self.num_global_tokens:
            visible |= pattern.Global(min(self.num_global_tokens, kv_len), 0, kv_len)
        if not self.num_random_blocks:
            return visible
        count = min(self.num_random_blocks, num_blocks)
        return visible | pattern.Random(count, num_blocks, unit, num_heads, visible, self.seed, self.layer, self.causal)

    def block(self, kv_len: int) -> int | None:
        block = min(self.block_size, kv_len)
        while block > MAX_TILE[0]:
            block = block // 2 if block % 2 == 0 else MAX_TILE[1]
        return block

    def num_positions(self, kv_len: int) -> int:
        return kv_len  # queries stand among the keys, whose blocks are numbered
