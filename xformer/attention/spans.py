"""Ranges of keys, many a query tile: how a pattern says which keys a query tile sees, at the cost of what is listed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

END = 2**31 - 1  # beyond any position


class Spans(NamedTuple):
    """Ranges of key positions (or of tiles), inclusive; empty where `last < first`. They may overlap.

    Attributes:
      first, last: int64 `[heads or 1, query tiles, spans]`.
    """

    first: np.ndarray
    last: np.ndarray

    @classmethod
    def of(cls, *ranges: tuple[np.ndarray | int, np.ndarray | int]) -> Spans:
        """Spans of one head from `(first, last)`, each `[query tiles]`."""
        firsts, lasts = zip(*ranges, strict=True)
        stack = lambda ends: np.stack(np.broadcast_arrays(*ends), -1).astype(np.int64)[None]
        return cls(*np.broadcast_arrays(stack(firsts), stack(lasts)))

    def join(self, other: Spans) -> Spans:
        """The spans of both."""
        heads = max(self.first.shape[0], other.first.shape[0])
        wide = lambda x: np.broadcast_to(x, (heads, *x.shape[1:]))
        return Spans(*(np.concatenate([wide(x), wide(y)], -1) for x, y in zip(self, other, strict=True)))

    def meet(self, other: Spans) -> Spans:
        """What each span has in common with each of the other's."""
        first = np.maximum(self.first[..., None], other.first[..., None, :])
        last = np.minimum(self.last[..., None], other.last[..., None, :])
        return Spans(*(x.reshape(*x.shape[:-2], -1) for x in (first, last)))

    def counts(self) -> np.ndarray:
        """The number of entries of every span, `[heads or 1, query tiles, spans]`."""
        return np.maximum(self.last - self.first + 1, 0)

    def touched(self, size: int, length: int) -> Spans:
        """The tiles of `size` keys that hold any key of the spans: ascending, each tile once.

        Only keys at `[0, length)` count.
        """
        first, last, reached, _ = self._ascending(length)
        return _disjoint(first // size, np.where(last < first, -1, reached // size))

    def covered(self, size: int, length: int) -> Spans:
        """The tiles of `size` keys of which the spans together hold every key: ascending, each tile once.

        Only keys at `[0, length)` count, so of the last tile those that it has.
        """
        first, last, reached, start = self._ascending(length)
        last_tile = np.where(reached == length - 1, (length - 1) // size, (reached + 1) // size - 1)
        return _disjoint(-(-start // size), np.where(last < first, -1, last_tile))

    def _ascending(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """First and last key of the spans in order, empty ones at the end; the last key that they and those before them
        reach; and where the unbroken run of keys begins that they belong to.
        """
        first, last = np.clip(self.first, 0, END), np.clip(self.last, -1, length - 1)
        code = np.where(last < first, np.iinfo(np.int64).max, first << 32 | last + 1)
        if code.shape[-1] > 1:
            code = np.sort(code, -1)
        first, last = code >> 32, (code & (2**32 - 1)) - 1
        empty = code == np.iinfo(np.int64).max
        last = np.where(empty, -1, last)
        reached = np.maximum.accumulate(last, -1)
        begins = np.ones(first.shape, bool)
        begins[..., 1:] = first[..., 1:] > reached[..., :-1] + 1
        start = np.maximum.accumulate(np.where(begins, first, 0), -1)
        return first, last, reached, start


def _disjoint(first: np.ndarray, last: np.ndarray) -> Spans:
    """Spans, in ascending order, without what those before them hold already."""
    reached = np.maximum.accumulate(last, -1)
    first = first.copy()
    first[..., 1:] = np.maximum(first[..., 1:], reached[..., :-1] + 1)
    return Spans(first, last)


def expand(spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Every entry of disjoint, ascending spans: its line (head x query tiles + query tile) and itself, int64 `[n]`."""
    counts = spans.counts().reshape(-1)
    num_spans, total = max(spans.first.shape[-1], 1), int(counts.sum())
    owner = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    place = np.arange(total) - before[owner]
    return owner // num_spans, spans.first.reshape(-1)[owner] + place
