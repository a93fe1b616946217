"""Longformer: a dilated sliding window and global tokens (Beltagy et al. 2020, section 3.1)."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from xformer.attention import pattern
from xformer.attention.engine.tile_policy import tile_of_window
from xformer.attention.pattern import Pattern
from xformer.attention.sizing import block_for_length
from xformer.attention.stride_patterns import ByHead, ClassWindow, Dilated, From
from xformer.attention.token_order import First, Order
from xformer.attention.union_attention import HeadParts, Part, UnionAttention, class_window
from xformer.checks import check_integer


@dataclasses.dataclass(frozen=True)
class Longformer(UnionAttention):
    """Each query attends to a window around it, and to the global tokens; a global token attends to every token.

    The window has `window / 2` keys on each side besides the query's own. With a dilation d the keys are d positions
    apart ("dilated sliding window"), so it reaches d times as far at the same cost: tokens are attended in the order of
    their positions modulo d. With `causal` all of it is cut at the diagonal.

    Global tokens are attended with the same projections as others; the paper's own projections for them are a matter of
    the layer around the op.

    Attributes:
      window: keys of the window, those on both sides counted, even: 512 is 256 to each side.
      dilation: distance between the window's keys, of all heads, or a tuple of one for each head.
      num_global_tokens: how many tokens at the start are global, 0 or more.
    """

    window: int = 512
    dilation: int | tuple[int, ...] = 1
    num_global_tokens: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("Longformer.window", self.window, at_least=2)
        if self.window % 2:
            raise ValueError(f"Longformer.window must be even (half on each side), got {self.window}")
        check_integer("Longformer.num_global_tokens", self.num_global_tokens, at_least=0)
        if not isinstance(self.dilation, list | tuple):
            check_integer("Longformer.dilation", self.dilation)
            return
        if not self.dilation:
            raise ValueError("Longformer.dilation must be an integer or one for each head, got ()")
        for head, dilation in enumerate(self.dilation):
            check_integer(f"Longformer.dilation[{head}]", dilation)
        object.__setattr__(self, "dilation", tuple(self.dilation))

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """A window of about a 32nd of the positions to each side, from 8 to 64."""
        return cls(**{"window": 2 * block_for_length(num_positions), **overrides})

    @property
    def side(self) -> int:
        """Keys on each side of the window."""
        return self.window // 2

    def dilations(self, num_heads: int) -> tuple[int, ...]:
        """The dilation of each head. Raises ValueError where there is not one for each."""
        if not isinstance(self.dilation, tuple):
            return (self.dilation,) * num_heads
        if len(self.dilation) != num_heads:
            raise ValueError(
                f"Longformer.dilation must be one for each of {num_heads} heads, got {len(self.dilation)}: "
                f"{self.dilation}"
            )
        return self.dilation

    def token_pattern(self, kv_len: int, num_heads: int) -> Pattern:
        dilations = self.dilations(num_heads)
        kinds = sorted(set(dilations))
        windows = [self._window(dilation) for dilation in kinds]
        window = windows[0] if len(kinds) == 1 else ByHead(tuple(windows), tuple(map(kinds.index, dilations)))
        if not self.num_global_tokens:
            return window
        return window | pattern.Global(self.num_global_tokens, 0, kv_len)

    def _window(self, dilation: int) -> Pattern:
        return pattern.Window(self.side, self.side) if dilation == 1 else Dilated(self.side, self.side, dilation)

    def parts(self, length: int, num_heads: int) -> tuple[HeadParts, ...]:
        dilations, count = self.dilations(num_heads), min(self.num_global_tokens, length)
        rows = () if self.causal else (Part(From(0, count), queries=First(count)),)
        everywhere = (Part(self._cut(pattern.Full()), keys=First(count)), *rows) if count else ()
        groups = []
        for dilation in sorted(set(dilations)):
            heads = tuple(head for head in range(num_heads) if dilations[head] == dilation)
            parts = (self._window_part(dilation, length, count), *everywhere)
            groups.append(HeadParts(None if len(heads) == num_heads else heads, parts))
        return tuple(groups)

    def _window_part(self, dilation: int, length: int, count: int) -> Part:
        """The window, without global queries and keys."""
        dilation = min(dilation, length)  # beyond that, too, no key is as near as one step
        left, right = self.side, 0 if self.causal else self.side
        if dilation == 1:
            window: Pattern = pattern.Window(left, right)
            window = window & From(count, count) if count else window
            return Part(window, block=tile_of_window(left + right + 1, length))
        order, block = class_window(left, right, dilation, length)
        window = ClassWindow(left, right, dilation, order.width, length, count)
        return Part(window, order, order, block)

    def _cut(self, whole: Pattern) -> Pattern:
        return pattern.Causal() if self.causal else whole

    def sees_all(self, num_positions: int) -> bool:
        dilations = self.dilation if isinstance(self.dilation, tuple) else (self.dilation,)
        near = self.side >= num_positions - 1 and set(dilations) == {1}
        return near or self.num_global_tokens >= num_positions or num_positions == 1

    def lookback(self) -> int | None:
        has_end = self.position is not None and self.position.num_positions is not None
        if not self.causal or self.num_global_tokens or has_end:
            return None
        return self.side * (max(self.dilation) if isinstance(self.dilation, tuple) else self.dilation)

    def block(self, kv_len: int) -> int | None:
        return tile_of_window(self.side * (1 if self.causal else 2) + 1, kv_len)
