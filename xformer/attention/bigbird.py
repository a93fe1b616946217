"""BigBird: random, window and global blocks (Zaheer et al. 2020, section 2 and appendix D)."""

from __future__ import annotations

import dataclasses

import numpy as np

from xformer.attention import pattern
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.pattern_attention import MAX_TILE, PatternAttention


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
            value, minimum = getattr(self, field.name), least.get(field.name, 0)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
                raise ValueError(f"BigBird.{field.name} must be an integer of at least {minimum}, got {value!r}")
        if self.num_window_blocks % 2 == 0:
            raise ValueError(
                f"BigBird.num_window_blocks must be odd (centred on the query), got {self.num_window_blocks}"
            )

    def at_layer(self, index: int) -> BigBird:
        return dataclasses.replace(self, layer=index)

    def token_pattern(self, kv_len: int, num_heads: int) -> pattern.Pattern:
        num_blocks, side = ceil_div(kv_len, self.block_size), self.num_window_blocks // 2
        first = min(ceil_div(self.num_global_blocks, 2), num_blocks)
        last = min(self.num_global_blocks // 2, num_blocks - first)
        visible: pattern.Pattern = pattern.Window(side, side, self.block_size)
        if self.num_global_blocks:
            visible |= pattern.Global(first, last, num_blocks, self.block_size)
        if self.num_global_tokens:
            visible |= pattern.Global(min(self.num_global_tokens, kv_len), 0, kv_len)
        if not self.num_random_blocks:
            return visible
        count = min(self.num_random_blocks, num_blocks)
        return visible | pattern.Random(
            count, num_blocks, self.block_size, num_heads, visible, self.seed, self.layer, self.causal
        )

    def block(self, kv_len: int) -> int | None:
        block = min(self.block_size, kv_len)
        while block > MAX_TILE[0]:
            block = block // 2 if block % 2 == 0 else MAX_TILE[1]
        return block

    def check_positions(self, first: int, q_len: int, kv_len: int) -> None:
        if first + q_len > kv_len:
            raise ValueError(
                f"BigBird's queries stand among its keys: query_offset {first} and q_len {q_len} reach past kv_len "
                f"{kv_len}"
            )
