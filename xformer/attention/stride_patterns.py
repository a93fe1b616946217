"""Patterns of strides: in the order of positions, and in orders that put together what a stride puts apart.

In the order of positions a dilated window touches every tile it reaches across. Among the tokens of one residue class
of positions it is a window like any other (`ClassWindow`), and the summary tokens of a stride, taken out, are a short
list of keys (`SummaryKeys`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from xformer.attention.pattern import Pattern, Reach, Tiles, as_pairs
from xformer.attention.spans import END, Spans


def _no_span(like: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros_like(like), np.full_like(like, -1)


@dataclasses.dataclass(frozen=True)
class Dilated(Pattern):
    """Keys at distances that are multiples of `dilation`, at most `left` such steps before and `right` after."""

    left: int
    right: int
    dilation: int

    def _ends(self) -> tuple[int, int]:
        return min(self.left * self.dilation, END), min(self.right * self.dilation, END)

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = as_pairs(q_positions, k_positions)
        distance, (left, right) = key - query, self._ends()
        return (distance % self.dilation == 0) & (distance >= -left) & (distance <= right)

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        left, right = self._ends()
        every = (q_last - left, q_first + right) if self.dilation == 1 else _no_span(q_first)
        return Spans.of((q_first - left, q_last + right)), Spans.of(every)

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        left, right = self._ends()
        distance = tiles.k_first - tiles.q_first
        near = np.clip(distance, -left - tiles.kv_block, right + tiles.q_block)
        return [near, distance % self.dilation]

    def reach(self, q_first: Any, q_block: int, *, causal: bool = False) -> list[Reach] | None:
        left, right = self._ends()
        if max(left, 0 if causal else right) >= END:
            return None
        return [Reach((q_first - left)[None, :, None], left + q_block + (0 if causal else right), 1)]


@dataclasses.dataclass(frozen=True)
class Summary(Pattern):
    """Keys among the last `size` of every `stride` positions, for all queries (Child et al. 2019, section 4.3)."""

    stride: int
    size: int

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = as_pairs(q_positions, k_positions)
        return (key % self.stride >= self.stride - self.size) & (query >= 0)

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        some = Spans.of((np.zeros_like(q_first), END))
        return some, some if self.size == self.stride else Spans.of(_no_span(q_first))

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        return [tiles.k_first % self.stride]


@dataclasses.dataclass(frozen=True)
class From(Pattern):
    """Queries from position `query` on and keys from position `key` on."""

    query: int
    key: int

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = as_pairs(q_positions, k_positions)
        return (query >= self.query) & (key >= self.key)

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        keys = lambda held: Spans.of((np.full_like(q_first, self.key), np.where(held, END, -1)))
        return keys(q_last >= self.query), keys(q_first >= self.query)

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        return [
            np.clip(self.query - tiles.q_first, 0, tiles.q_block),
            np.clip(self.key - tiles.k_first, 0, tiles.kv_block),
        ]


@dataclasses.dataclass(frozen=True)
class NotSelf(Pattern):
    """Every key but the query's own."""

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = as_pairs(q_positions, k_positions)
        return query != key

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        return Spans.of((np.zeros_like(q_first), END)), Spans.of((0, q_first - 1), (q_last + 1, END))

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        return [np.clip(tiles.k_first - tiles.q_first, -tiles.kv_block, tiles.q_block)]


@dataclasses.dataclass(frozen=True)
class ByHead(Pattern):
    """Each head has a pattern of its own: head h has `patterns[of_head[h]]`, which all heads could share."""

    patterns: tuple[Pattern, ...]
    of_head: tuple[int, ...]

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        xp = np if isinstance(q_positions, np.ndarray) else jnp
        allowed = [pattern.allows(q_positions, k_positions) for pattern in self.patterns]
        own = [allowed[kind][min(head, len(allowed[kind]) - 1)] for head, kind in enumerate(self.of_head)]
        return xp.stack(own)

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        some, every = zip(*(pattern.spans(q_first, q_last) for pattern in self.patterns), strict=True)
        return self._of_heads(some), self._of_heads(every)

    def _of_heads(self, spans: tuple[Spans, ...]) -> Spans:
        most = max(part.first.shape[2] for part in spans)
        wide = lambda x, empty: np.pad(x[0], ((0, 0), (0, most - x.shape[2])), constant_values=empty)
        first, last = (np.stack([wide(part[end], empty) for part in spans]) for end, empty in ((0, 0), (1, -1)))
        return Spans(first[list(self.of_head)], last[list(self.of_head)])

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        kinds = np.asarray(self.of_head)[tiles.head % len(self.of_head)]
        columns = [kinds]
        for kind, pattern in enumerate(self.patterns):
            columns += [np.where(kinds == kind, column, 0) for column in pattern.signature(tiles)]
        return columns

    def reach(self, q_first: Any, q_block: int, *, causal: bool = False) -> list[Reach] | None:
        each = [pattern.reach(q_first, q_block, causal=causal) for pattern in self.patterns]
        known = [reach for reach in each if reach is not None]
        if len(known) < len(each) or len({tuple(r.first.shape[2] for r in reach) for reach in known}) > 1:
            return None
        out = []
        for ranges in zip(*known, strict=True):
            xp = np if all(isinstance(r.first, np.ndarray) for r in ranges) else jnp
            first = xp.concatenate([xp.broadcast_to(r.first, (1, len(q_first), r.first.shape[2])) for r in ranges])
            multiple = int(np.gcd.reduce([r.multiple_of for r in ranges]))
            out.append(Reach(first[np.asarray(self.of_head)], max(r.length for r in ranges), multiple))
        return out


@dataclasses.dataclass(frozen=True)
class ClassWindow(Pattern):
    """A window among the positions of one residue class, of tokens in the order of `token_order.Classes`.

    Keys of the query's class at most `left` places before and `right` after it there. Only positions in
    `[first, length)` are seen, and only from positions of `first` on.
    """

    left: int
    right: int
    stride: int
    width: int
    length: int
    first: int = 0

    def _places(self, positions: Any) -> tuple[Any, Any]:
        return positions // self.width, positions % self.width

    def _count(self, classes: Any) -> Any:
        """The places that exist of each class."""
        return (self.length - classes + self.stride - 1) // self.stride

    def _start(self, classes: Any) -> Any:
        """The first place of each class that counts."""
        return np.maximum(self.first - classes + self.stride - 1, 0) // self.stride

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = as_pairs(q_positions, k_positions)
        (q_class, q_place), (k_class, k_place) = self._places(query), self._places(key)
        distance = k_place - q_place
        near = (distance >= -min(self.left, END)) & (distance <= min(self.right, END))
        exists = (k_place >= self._start(k_class)) & (k_place < self._count(k_class))
        return (q_class == k_class) & near & exists & (q_place >= self._start(q_class))

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        (low_class, low), (high_class, high) = self._places(q_first), self._places(q_last)
        one, begin = low_class == high_class, low_class * self.width
        start, last = self._start(low_class), self._count(low_class) - 1
        left, right = min(self.left, END), min(self.right, END)
        some = np.maximum(low - left, start), np.where(high < start, -1, np.minimum(high + right, last))
        every = np.maximum(high - left, start), np.where(low < start, -1, np.minimum(low + right, last))
        empty = every[1] < every[0]
        return (
            Spans.of(
                (
                    np.where(one, begin + some[0], begin),
                    np.where(one, np.where(some[1] < some[0], -1, begin + some[1]), (high_class + 1) * self.width - 1),
                )
            ),
            Spans.of((begin + every[0], np.where(~one | empty, -1, begin + every[1]))),
        )

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        if self.width % tiles.q_block or self.width % tiles.kv_block:
            return [tiles.q_first, tiles.k_first]
        (q_class, q_place), (k_class, k_place) = self._places(tiles.q_first), self._places(tiles.k_first)
        left, right = min(self.left, END), min(self.right, END)
        return [
            np.clip(k_class - q_class, -1, 1),
            np.clip(k_place - q_place, -left - tiles.kv_block, right + tiles.q_block),
            np.clip(self._count(k_class) - k_place, 0, tiles.kv_block),
            np.clip(self._start(k_class) - k_place, 0, tiles.kv_block),
            np.clip(self._start(q_class) - q_place, 0, tiles.q_block),
        ]


@dataclasses.dataclass(frozen=True)
class SummaryKeys(Pattern):
    """`Summary` where the keys are only those that it has, in order: key k of them is in block `k // size`.

    Attributes:
      stride, size: of the summary.
      own: whether a query sees those of its own block.
      causal: queries see none at a later position.
    """

    stride: int
    size: int
    own: bool
    causal: bool

    def allows(self, q_positions: Any, k_positions: Any) -> Any:
        query, key = as_pairs(q_positions, k_positions)
        block = key // self.size
        seen = block * self.stride + self.stride - self.size + key % self.size <= query if self.causal else key >= 0
        return seen & (query >= 0) if self.own else seen & (block != query // self.stride)

    def spans(self, q_first: np.ndarray, q_last: np.ndarray) -> tuple[Spans, Spans]:
        low, high = (q // self.stride * self.size for q in (q_first, q_last))
        zero, end = np.zeros_like(q_first), np.full_like(q_first, END)
        if self.causal:
            return Spans.of((zero, high + (self.size if self.own else 0) - 1)), Spans.of((zero, low - 1))
        if self.own:
            return Spans.of((zero, end)), Spans.of((zero, end))
        every = Spans.of((zero, low - 1), (high + self.size, end))
        return Spans.of((zero, np.where(low == high, low - 1, end)), (high + self.size, end)), every

    def signature(self, tiles: Tiles) -> list[np.ndarray]:
        block = tiles.k_first // self.size - tiles.q_first // self.stride
        near = np.clip(block, -(tiles.kv_block // self.size) - 2, tiles.q_block // self.stride + 2)
        return [tiles.q_first % self.stride, tiles.k_first % self.size, near]
