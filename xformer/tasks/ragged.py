"""Token sequences of different lengths in three flat arrays: compact, memory-mapped, cut to size for a batch."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """Labelled token sequences.

    tokens: [total] unsigned, all sequences one after the other; ids from 1, as 0 is padding.
    offsets: int64 [examples + 1]; example i is `tokens[offsets[i]:offsets[i + 1]]`.
    labels: int32 [examples].
    """

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray

    @classmethod
    def from_lists(
        cls, sequences: Iterable[Sequence[int] | np.ndarray], labels: Iterable[int], dtype: npt.DTypeLike
    ) -> Ragged:
        """From one sequence of ids an example.

        Raises ValueError for an id or a label that is no whole number, below 0 or too large for its dtype.
        """
        arrays = [_whole("token id", np.asarray(sequence), dtype) for sequence in sequences]
        offsets = np.concatenate([[0], np.cumsum([array.size for array in arrays], dtype=np.int64)])
        tokens = np.concatenate([np.empty(0, dtype), *arrays])
        return cls(tokens, offsets, _whole("label", np.asarray(list(labels)), np.int32))

    def __len__(self) -> int:
        return self.labels.size

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int64 [examples]."""
        return np.diff(self.offsets)

    def pad(self, indices: Sequence[int] | np.ndarray, rows: int, max_len: int) -> np.ndarray:
        """The named examples cut to `max_len` and padded with 0, then rows of 0: int32 [rows, max_len]."""
        padded = np.zeros((rows, max_len), np.int32)
        for row, index in enumerate(indices):
            start = self.offsets[index]
            stop = min(self.offsets[index + 1], start + max_len)
            padded[row, : stop - start] = self.tokens[start:stop]
        return padded

    def digests(self) -> dict[str, str]:
        """SHA-256 of the `texts` (token ids and where each sequence ends) and of the `labels`, in order."""
        parts = {"texts": (self.tokens, self.offsets), "labels": (self.labels,)}
        found = {}
        for name, arrays in parts.items():
            total = hashlib.sha256()
            for array in arrays:
                total.update(f"{array.dtype.str}{array.shape}".encode())
                total.update(np.ascontiguousarray(array).data)
            found[name] = total.hexdigest()
        return found

    def save(self, directory: Path, split: str) -> None:
        """Writes three .npy files into the directory."""
        for field in dataclasses.fields(self):
            np.save(directory / f"{split}.{field.name}.npy", getattr(self, field.name))

    @classmethod
    def load(cls, directory: Path, split: str) -> Ragged:
        """Maps the files that `save` wrote into memory, read-only."""
        fields = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.load(directory / f"{split}.{name}.npy", mmap_mode="r") for name in fields))


def _whole(what: str, values: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """The values in an integer dtype that holds each of them as it is: nothing is cut off, nothing wraps around."""
    if not values.size:
        return values.astype(dtype)
    if values.dtype.kind not in "iu":
        raise ValueError(f"a {what} must be a whole number that fits {np.dtype(dtype)}, got {values.flat[0]!r}")
    largest = np.iinfo(dtype).max
    wrong = values[(values < 0) | (values > largest)]
    if wrong.size:
        raise ValueError(f"a {what} must be from 0 to {largest}, got {wrong[0]}")
    return values.astype(dtype)
