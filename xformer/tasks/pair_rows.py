"""Pairs of a source and a target as rows of fixed lengths, several pairs of which may share a row."""

from __future__ import annotations

import dataclasses

import numpy as np

from xformer.tasks.packing import EDGE
from xformer.tasks.ragged import Ragged
from xformer.tasks.token_classification import NO_LABEL

OPEN_ROWS = 128  # that the next pair may be put in: a search over all would take time quadratic in their number


@dataclasses.dataclass(frozen=True, eq=False)
class PairRows:
    """Rows of up to `max_len` tokens of sources and `target_max_len` of targets.

    A source is cut at `max_len`. A target of n tokens is read as `EDGE` and its tokens, and after each the next is to
    be told, `EDGE` after the last: n + 1, cut at `target_max_len`.

    pairs: int64 [pairs], by row; first: int64 [rows + 1]: row i has pairs[first[i] : first[i + 1]].
    """

    max_len: int
    target_max_len: int
    pairs: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return self.first.size - 1

    def some(self, count: int) -> PairRows:
        """So many of the rows, evenly spread; all where there are no more."""
        if count >= len(self):
            return self
        rows = np.linspace(0, len(self) - 1, count).round().astype(np.int64)
        pairs = np.concatenate([self.pairs[self.first[row] : self.first[row + 1]] for row in rows])
        first = np.concatenate([[0], np.cumsum(np.diff(self.first)[rows])])
        return PairRows(self.max_len, self.target_max_len, pairs, first)

    def read(self, examples: Ragged, indices: np.ndarray, rows: int) -> dict[str, np.ndarray]:
        """The named rows and then empty ones: int32 `inputs` and `segment_ids` [rows, max_len], `decoder_inputs`,
        `decoder_segment_ids` and `targets` [rows, target_max_len].

        Segments, pairs of a row, count from 1; padding is of segment 0, and `NO_LABEL` the target where nothing is
        asked.
        """
        assert examples.tokens2 is not None and examples.offsets2 is not None
        inputs = np.full((rows, self.max_len), EDGE, np.int32)
        decoder_inputs = np.full((rows, self.target_max_len), EDGE, np.int32)
        segments, target_segments = np.zeros_like(inputs), np.zeros_like(decoder_inputs)
        targets = np.full_like(decoder_inputs, NO_LABEL)
        for row, index in enumerate(indices):
            place = target_place = 0
            for segment, pair in enumerate(self.pairs[self.first[index] : self.first[index + 1]], start=1):
                source = examples[pair][: self.max_len]
                own = examples.tokens2[examples.offsets2[pair] : examples.offsets2[pair + 1]]
                whole = np.concatenate([[EDGE], own, [EDGE]])[: self.target_max_len + 1]
                stop, target_stop = place + len(source), target_place + len(whole) - 1
                inputs[row, place:stop], segments[row, place:stop] = source, segment
                decoder_inputs[row, target_place:target_stop] = whole[:-1]
                targets[row, target_place:target_stop] = whole[1:]
                target_segments[row, target_place:target_stop] = segment
                place, target_place = stop, target_stop
        return {
            "inputs": inputs,
            "segment_ids": segments,
            "decoder_inputs": decoder_inputs,
            "decoder_segment_ids": target_segments,
            "targets": targets,
        }


def pair_rows(
    lengths: np.ndarray, target_lengths: np.ndarray, max_len: int, target_max_len: int, *, together: bool
) -> PairRows:
    """Rows in which each pair stands once, in their order, the same in every process.

    Args:
      lengths, target_lengths: int [pairs], in tokens, ends not counted.
      max_len, target_max_len: tokens of a row.
      together: a pair is put in the row among the last `OPEN_ROWS` that has room for both halves and least of it left,
        or in a new one. False: a row for each pair.
    """
    count = len(lengths)
    if not together:
        return PairRows(max_len, target_max_len, np.arange(count), np.arange(count + 1))
    capacity = np.array([max_len, target_max_len])
    sizes = np.minimum(np.stack([lengths, np.asarray(target_lengths) + 1], axis=1), capacity)
    row, used = np.zeros(count, np.int64), 0
    rooms, open_rows = np.zeros((OPEN_ROWS, 2), np.int64), np.full(OPEN_ROWS, -1)
    for pair, size in enumerate(sizes):
        left = rooms - size
        fits = (left >= 0).all(axis=1) & (open_rows >= 0)
        waste = (left / capacity).sum(axis=1)
        if fits.any():
            place = int(np.argmin(np.where(fits, waste, np.inf)))
        else:  # the fullest of the open rows is closed
            place = int(np.argmin(np.where(open_rows < 0, -np.inf, (rooms / capacity).sum(axis=1))))
            open_rows[place], rooms[place], used = used, capacity, used + 1
        row[pair] = open_rows[place]
        rooms[place] -= size
    order = np.argsort(row, kind="stable")
    first = np.searchsorted(row[order], np.arange(used + 1))
    return PairRows(max_len, target_max_len, order, first)
