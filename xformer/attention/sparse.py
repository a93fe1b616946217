"""Sparse Transformer: strided and fixed factorised patterns (Child et al. 2019, sections 4.2 and 4.3)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

from xformer.attention import pattern
from xformer.attention.engine.tile_policy import tile_of_blocks, tile_of_window
from xformer.attention.pattern import Pattern
from xformer.attention.spans import END
from xformer.attention.stride_patterns import ByHead, ClassWindow, Dilated, NotSelf, Summary, SummaryKeys
from xformer.attention.token_order import First, Summaries
from xformer.attention.union_attention import HeadParts, Part, UnionAttention, class_window
from xformer.checks import check_integer

Kind = Literal["strided", "fixed"]
Heads = Literal["merged", "split"]
SUMMARY_TILE = 128  # queries and summary keys: larger ones differ in their pairs, tile by tile, along the diagonal


@dataclasses.dataclass(frozen=True)
class Sparse(UnionAttention):
    """Two patterns of about sqrt(length) keys each, which together reach every token in two steps.

    "strided": the `stride` keys before the query (and, bidirectional, after it) with its own, and every key whose
    distance is a multiple of `stride`. "fixed": the keys of the query's own block of `stride` tokens, and the last
    `summary` keys of every block. With `causal` both are cut at the diagonal, as in the paper, which is causal
    throughout; bidirectional attention has both sides.

    The keys of a stride are attended in the order of their positions modulo `stride`, and summary keys are taken out of
    the others, so either costs what it lists: about `length * (2 * stride + length / stride)` pairs strided, and
    `length * (stride + summary * length / stride)` fixed, bidirectional. In `heads="split"`, causal and fixed, the
    queries before the first summary see nothing in every second head and have zeros there.

    Attributes:
      stride: l of the paper, near the square root of the length.
      kind: "strided", for data with a period, as images are; "fixed", for text.
      summary: c of the paper, keys of a block that all see, for "fixed" only; None: a 16th of `stride`, as the paper's
        8 of 128.
      heads: "merged": every head has both patterns (section 4.2, equation 6's union); "split": heads 0, 2, ... have the
        first and heads 1, 3, ... the second.
    """

    REFUSES: ClassVar[Mapping[str, str]] = {"positions": "its strides and blocks are of tokens in order"}

    stride: int = 128
    kind: Kind = "strided"
    summary: int | None = None
    heads: Heads = "merged"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("Sparse.stride", self.stride)
        for name, choices in (("kind", get_args(Kind)), ("heads", get_args(Heads))):
            if getattr(self, name) not in choices:
                raise ValueError(f"Sparse.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.summary is not None and self.kind == "strided":
            raise ValueError(f'Sparse.summary must be None where kind is "strided", got {self.summary!r}')
        if self.summary is not None:
            check_integer("Sparse.summary", self.summary, at_most=self.stride)

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """The stride is the power of 2 nearest to the square root of the positions, 8 or more."""
        return cls(**{"stride": max(1 << round(math.log2(max(num_positions, 1)) / 2), 8), **overrides})

    @property
    def num_summary(self) -> int:
        """Summary keys of a block."""
        return self.summary or max(self.stride // 16, 1)

    def token_pattern(self, kv_len: int, num_heads: int) -> Pattern:
        first: Pattern = pattern.Window(0, 0, self.stride)
        second: Pattern = Summary(self.stride, self.num_summary)
        if self.kind == "strided":
            first, second = pattern.Window(self.stride, self.stride), Dilated(END, END, self.stride)
        if self.heads == "merged":
            return first | second
        return ByHead((first, second), tuple(head % 2 for head in range(num_heads)))

    def parts(self, length: int, num_heads: int) -> tuple[HeadParts, ...]:
        merged = self.heads == "merged"
        make = self._strided_parts if self.kind == "strided" else self._fixed_parts
        first, second = make(length, whole=not merged)
        if merged:
            return (HeadParts(None, (first, *second)),)
        own = HeadParts(tuple(range(0, num_heads, 2)), (first,))
        if num_heads == 1:
            return (own,)
        return own, HeadParts(tuple(range(1, num_heads, 2)), second)

    def _strided_parts(self, length: int, *, whole: bool) -> tuple[Part, tuple[Part, ...]]:
        """The window and the stride. In every head the window leaves out what the stride has, unless it is `whole`."""
        near = self.stride if whole else self.stride - 1
        left, right = near, 0 if self.causal else near
        window = pattern.Window(left, right) if whole else pattern.Window(left, right) & NotSelf()
        stride = min(self.stride, length)  # beyond that, too, no key but the query's own is at a multiple
        order, block = class_window(END, 0 if self.causal else END, stride, length)
        keys = ClassWindow(END, 0 if self.causal else END, stride, order.width, length)
        first = Part(window, block=tile_of_window(left + right + 1, length))
        return first, (Part(keys, order, order, block),)

    def _fixed_parts(self, length: int, *, whole: bool) -> tuple[Part, tuple[Part, ...]]:
        """The block and the summaries. In every head the latter leave out those of the block, unless `whole`."""
        block: Pattern = pattern.Window(0, 0, self.stride)
        block = block & pattern.Causal() if self.causal else block
        keys = Summaries(self.stride, self.num_summary)
        first = Part(block, block=tile_of_blocks(self.stride) if self.stride < length else None)
        seen = SummaryKeys(self.stride, self.num_summary, whole, self.causal)
        if keys.length(length):
            return first, (Part(seen, keys=keys, block=SUMMARY_TILE),)
        return first, (Part(pattern.Global(0, 0, 1), keys=First(1)),) if whole else ()  # too short for a summary

    def sees_all(self, num_positions: int) -> bool:
        if self.heads == "split":
            return num_positions == 1
        if self.kind == "fixed":
            return self.stride >= num_positions or self.num_summary == self.stride
        return self.stride >= num_positions - 1 or self.stride == 1

    def block(self, kv_len: int) -> int | None:
        return None  # the stride is all over the length
