"""BigBird: random, window and global blocks (Zaheer et al. 2020, section 2 and appendix D)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from xformer.attention import pattern
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.engine.tile_policy import tile_of_blocks
from xformer.attention.pattern_attention import PatternAttention
from xformer.attention.random_blocks import Random
from xformer.attention.sizing import block_for_length
from xformer.checks import check_integer


@dataclasses.dataclass(frozen=True)
class BigBird(PatternAttention):
    """The union of a block window, global blocks and random blocks; the internal construction (ITC).

    The length is cut into `ceil(length / block_size)` blocks, and the pattern is a function of the padded length: with
    more padding at the end, real tokens see other last blocks and draw others. (Not so with `causal`.) Of the
    `num_global_blocks`, the first half (rounded up) and the last half attend to all and are attended by all. Every
    other block attends to the `num_window_blocks` around it and to `num_random_blocks` drawn without replacement from
    the blocks of the whole length that it does not see already (all of them where there are fewer), anew for each head
    and layer. Lengths so short that this covers everything are full attention.

    With `num_global_tokens` the first positions, which the caller puts there, are global: the external construction
    (ETC) of section 2.

    With `causal` the keys of a query depend on its position alone, whatever the length: the same is cut at the
    diagonal, the random blocks are drawn from the past by the block's own index, and no last blocks are global (the
    first half of `num_global_blocks` are). Queries whose `query_offset` is known only at run time, as in decoding, then
    visit a fixed number of tiles, which are looked up in a table `[num_heads, num_blocks, num_random_blocks]` on the
    device. Without `causal` they visit all tiles, unless nothing is global: a query of a global block sees every key.

    The same op in every layer repeats the same random blocks: give layer i `op.at_layer(i)`, as the models here do.

    Attributes:
      block_size: tokens in a block.
      num_random_blocks: random blocks a query block, 0 or more.
      num_window_blocks: blocks of the window, odd, the query's own included.
      num_global_blocks: global blocks, 0 or more; 2 is the first and the last.
      num_global_tokens: global tokens at the start, 0 or more.
      seed: seed of the random blocks.
      layer: which layer's random blocks.
    """

    REFUSES: ClassVar[Mapping[str, str]] = {"positions": "its blocks are of tokens in order"}
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
        if self.sees_all(kv_len):
            return pattern.Full()
        num_blocks, side = ceil_div(kv_len, self.block_size), self.num_window_blocks // 2
        first, last = self._global_blocks(num_blocks)
        visible: pattern.Pattern = pattern.Window(side, side, self.block_size)
        if first:
            visible |= pattern.Global(first, last, num_blocks, self.block_size)
        if self.num_global_tokens:
            visible |= pattern.Global(self.num_global_tokens, 0, kv_len)
        if not self.num_random_blocks:
            return visible
        return visible | Random(
            self.num_random_blocks, num_blocks, self.block_size, num_heads, visible, self.seed, self.layer, self.causal
        )

    def sees_all(self, num_positions: int) -> bool:
        num_blocks, side = ceil_div(num_positions, self.block_size), self.num_window_blocks // 2
        first, last = self._global_blocks(num_blocks)
        # The block that sees least by window and global blocks must see the others by drawing them.
        row = np.arange(first, num_blocks - last)
        low, high = np.maximum(row - side, first), np.minimum(row + side, num_blocks - last - 1)
        unseen = num_blocks - first - last - (high - low + 1) if not self.causal else low - first
        return bool((unseen <= self.num_random_blocks).all())

    def _global_blocks(self, num_blocks: int) -> tuple[int, int]:
        """How many blocks at the start and at the end are global."""
        first = min(ceil_div(self.num_global_blocks, 2), num_blocks)
        return first, 0 if self.causal else min(self.num_global_blocks // 2, num_blocks - first)

    def block(self, kv_len: int) -> int | None:
        if self.sees_all(kv_len):
            return None
        # Tiles that divide the blocks: such a tile is drawn as a whole or not at all.
        return tile_of_blocks(self.block_size)

    def num_positions(self, kv_len: int) -> int:
        return kv_len  # queries stand among the keys, whose blocks are numbered
