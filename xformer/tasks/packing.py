"""Documents as rows of one length for a language model: cut into pieces, several of which may share a row."""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from xformer.tasks.ragged import Ragged
from xformer.tasks.token_classification import NO_LABEL

EDGE = 0
"""The id that stands before a document and is to be told at its end; no vocabulary has a text for it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """Rows of up to `max_len` tokens and the pieces of documents in them, row by row. A document of n tokens is read as
    n + 1: `EDGE` and its tokens; what is to be told after each is its tokens and `EDGE`.

    document, start, length, known: int64 [pieces]: tokens `start` to `start + length` of a document as it is read, of
      which the targets of the first `known` are asked elsewhere.
    first: int64 [rows + 1]: row i has the pieces first[i] to first[i + 1].
    """

    max_len: int
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    known: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return self.first.size - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        return np.add.reduceat(self.length, self.first[:-1]) if len(self) else np.zeros(0, np.int64)

    @property
    def padding(self) -> float:
        """The share of the places of all rows that hold no token."""
        return 1 - float(self.length.sum()) / max(len(self) * self.max_len, 1)

    def some(self, count: int) -> Packed:
        """So many of the rows, evenly spread; all where there are no more."""
        if count >= len(self):
            return self
        rows = np.linspace(0, len(self) - 1, count).round().astype(np.int64)
        pieces = np.concatenate([np.arange(self.first[row], self.first[row + 1]) for row in rows])
        first = np.concatenate([[0], np.cumsum(np.diff(self.first)[rows])])
        document, start, length, known = (x[pieces] for x in (self.document, self.start, self.length, self.known))
        return Packed(self.max_len, document, start, length, known, first)

    def read(self, documents: Ragged, indices: np.ndarray, rows: int) -> dict[str, np.ndarray]:
        """The named rows and then empty ones: `inputs`, `targets` and `segment_ids`, int32 [rows, max_len].

        Segments count from 1 in each row; padding is of segment 0, and `NO_LABEL` the target where nothing is asked.
        """
        inputs = np.full((rows, self.max_len), EDGE, np.int32)
        targets, segment_ids = np.full_like(inputs, NO_LABEL), np.zeros_like(inputs)
        for row, index in enumerate(indices):
            place = 0
            for segment, piece in enumerate(range(self.first[index], self.first[index + 1]), start=1):
                document = documents[self.document[piece]]
                start, length, known = (int(x[piece]) for x in (self.start, self.length, self.known))
                whole = np.concatenate([[EDGE], document, [EDGE]])[start : start + length + 1]
                stop = place + length
                inputs[row, place:stop] = whole[:-1]
                targets[row, place + known : stop] = whole[1 + known :]
                segment_ids[row, place:stop] = segment
                place = stop
        return {"inputs": inputs, "targets": targets, "segment_ids": segment_ids}


def pack(document_lengths: np.ndarray, max_len: int, *, stride: int | None = None, together: bool = True) -> Packed:
    """Rows in which every token of every document, and its end, is asked once.

    A longer document is cut into pieces that begin `stride` apart: so a token is told from at least `max_len - stride`
    of those before it, or from all there are. Pieces share rows by best fit, the longest first (Johnson 1974), the same
    in every process.

    Args:
      document_lengths: int [documents], in tokens.
      max_len: tokens of a row.
      stride: at most `max_len`, its default: pieces that do not overlap.
      together: False: a row for each piece.
    """
    stride = stride or max_len
    total = np.asarray(document_lengths, np.int64) + 1
    counts = 1 + -(-np.maximum(total - max_len, 0) // stride)
    document = np.repeat(np.arange(total.size), counts)
    number = np.arange(document.size) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * stride
    length = np.minimum(total[document] - start, max_len)
    known = np.where(number > 0, max_len - stride, 0)
    row = _best_fit(length, max_len) if together else np.arange(length.size)
    order = np.argsort(row, kind="stable")
    first = np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2))
    return Packed(max_len, document[order], start[order], length[order], known[order], first)


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, int64 [pieces]: the fullest that has room for it, or a new one."""
    rows, used = np.zeros(lengths.size, np.int64), 0
    spaces: list[tuple[int, int]] = []  # (room, row) of rows that are not full, least room first
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        place = bisect.bisect_left(spaces, (length, -1))
        if place < len(spaces):
            room, row = spaces.pop(place)
        else:
            room, row, used = capacity, used, used + 1
        rows[piece] = row
        if room > length:
            bisect.insort(spaces, (room - length, row))
    return rows
