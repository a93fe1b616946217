"""Token sequences of different lengths in three flat arrays: compact, memory-mapped, cut to size for a batch."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Cut = Literal["head", "tail", "head_tail"]
"""Which tokens of a sequence that is too long are kept: the first, the last, or the first half and the last half."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """Labelled token sequences.

    tokens: [total] unsigned, all sequences one after the other; ids from 1, as 0 is padding.
    offsets: int64 [examples + 1]; example i is `tokens[offsets[i]:offsets[i + 1]]`.
    labels: [examples, ...]; or [total labels], where `label_offsets` says which are whose.
    label_offsets: int64 [examples + 1] where each example has a sequence of labels.
    tokens2, offsets2: the second document of each example, where it has two.
    parents: int32 [total], where tokens are in a tree: the place of each token's parent in its example, -1 at roots.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    label_offsets: np.ndarray | None = None
    tokens2: np.ndarray | None = None
    offsets2: np.ndarray | None = None
    parents: np.ndarray | None = None

    @classmethod
    def from_lists(
        cls,
        sequences: Iterable[Sequence[int] | np.ndarray],
        labels: Iterable[int] | np.ndarray,
        dtype: npt.DTypeLike,
        *,
        second: Iterable[Sequence[int] | np.ndarray] | None = None,
    ) -> Ragged:
        """From one sequence of ids an example.

        Args:
          labels: an int an example; or an array [examples, ...] of bools or floats, which is kept as it is.
          dtype: of the ids.
          second: the sequences of second documents.

        Raises:
          ValueError: an id or an integer label that is no whole number, below 0 or too large for its dtype.
        """
        kept = isinstance(labels, np.ndarray) and labels.dtype.kind in "bf"
        held = np.asarray(labels) if kept else _whole("label", np.asarray(list(labels)), np.int32)
        two = _flat("token id", second, dtype) if second is not None else (None, None)
        return cls(*_flat("token id", sequences, dtype), held, None, *two)

    @classmethod
    def with_label_sequences(
        cls,
        sequences: Iterable[Sequence[int] | np.ndarray],
        labels: Iterable[Sequence[int] | np.ndarray],
        dtype: npt.DTypeLike,
    ) -> Ragged:
        """From one sequence of ids and one of labels an example; -1 stands for no label.

        Raises ValueError as `from_lists` does.
        """
        flat, offsets = _flat("label", (np.asarray(sequence) + 1 for sequence in labels), np.int32)
        return cls(*_flat("token id", sequences, dtype), flat - 1, offsets)

    def __len__(self) -> int:
        return self.offsets.size - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def label(self, index: int) -> Any:
        """The label of an example: a scalar or array, or its sequence of labels."""
        if self.label_offsets is None:
            return self.labels[index]
        return self.labels[self.label_offsets[index] : self.label_offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int64 [examples]; of the longer document where it has two."""
        first = np.diff(self.offsets)
        return first if self.offsets2 is None else np.maximum(first, np.diff(self.offsets2))

    def pad(self, indices: Sequence[int] | np.ndarray, rows: int, max_len: int, cut: Cut = "head") -> np.ndarray:
        """The named examples cut to `max_len` and padded with 0, then rows of 0: int32 [rows, max_len]."""
        return _pad(self.tokens, self.offsets, indices, rows, max_len, 0, cut)

    def pad_second(self, indices: Sequence[int] | np.ndarray, rows: int, max_len: int, cut: Cut = "head") -> np.ndarray:
        """The second documents, as `pad` gives the first."""
        assert self.tokens2 is not None and self.offsets2 is not None
        return _pad(self.tokens2, self.offsets2, indices, rows, max_len, 0, cut)

    def pad_parents(self, indices: np.ndarray, rows: int, max_len: int) -> np.ndarray:
        """The parents of the tokens that `pad` gives, -1 at roots, at padding and where the parent is cut off."""
        assert self.parents is not None
        found = _pad(self.parents, self.offsets, indices, rows, max_len, -1)
        return np.where(found < max_len, found, -1)

    def targets(self, indices: np.ndarray, rows: int, max_len: int) -> np.ndarray:
        """Labels of the named examples, then zeros: [rows, ...]; sequences are cut and padded with -1, for no label."""
        if self.label_offsets is not None:
            return _pad(self.labels, self.label_offsets, indices, rows, max_len, -1)
        found = np.zeros((rows, *self.labels.shape[1:]), self.labels.dtype)
        found[: len(indices)] = self.labels[indices]
        return found

    def digests(self) -> dict[str, str]:
        """SHA-256 of the `texts` (token ids and where each sequence ends), of the `labels` and more, in order."""
        parts = {"texts": (self.tokens, self.offsets), "labels": (self.labels, self.label_offsets)}
        if self.tokens2 is not None:
            parts["second texts"] = (self.tokens2, self.offsets2)
        if self.parents is not None:
            parts["trees"] = (self.parents, self.offsets)
        found = {}
        for name, arrays in parts.items():
            total = hashlib.sha256()
            for array in arrays:
                if array is not None:
                    total.update(f"{array.dtype.str}{array.shape}".encode())
                    total.update(np.ascontiguousarray(array).data)
            found[name] = total.hexdigest()
        return found

    def save(self, directory: Path, split: str) -> None:
        """Writes a .npy file for each array into the directory."""
        for field in dataclasses.fields(self):
            if (array := getattr(self, field.name)) is not None:
                np.save(directory / f"{split}.{field.name}.npy", array)

    @classmethod
    def load(cls, directory: Path, split: str) -> Ragged:
        """Maps the files that `save` wrote into memory, read-only."""
        paths = {field: directory / f"{split}.{field.name}.npy" for field in dataclasses.fields(cls)}
        needed = (field for field, path in paths.items() if field.default is dataclasses.MISSING or path.exists())
        return cls(**{field.name: np.load(paths[field], mmap_mode="r") for field in needed})


def _flat(
    what: str, sequences: Iterable[Sequence[int] | np.ndarray], dtype: npt.DTypeLike
) -> tuple[np.ndarray, np.ndarray]:
    """(all values one after the other, where each sequence starts and the last ends)."""
    arrays = [_whole(what, np.asarray(sequence), dtype) for sequence in sequences]
    offsets = np.concatenate([[0], np.cumsum([array.size for array in arrays], dtype=np.int64)])
    return np.concatenate([np.empty(0, dtype), *arrays]), offsets


def shorten(sequence: Sequence[int] | np.ndarray, max_len: int, cut: Cut) -> Sequence[int] | np.ndarray:
    """At most `max_len` tokens of a sequence."""
    if len(sequence) <= max_len or cut == "head":
        return sequence[:max_len]
    if cut == "tail":
        return sequence[len(sequence) - max_len :]
    last = max_len // 2
    return np.concatenate([sequence[: max_len - last], sequence[len(sequence) - last :]])


def _pad(
    values: np.ndarray,
    offsets: np.ndarray,
    indices: Sequence[int] | np.ndarray,
    rows: int,
    length: int,
    filler: int,
    cut: Cut = "head",
) -> np.ndarray:
    padded = np.full((rows, length), filler, np.int32)
    for row, index in enumerate(indices):
        kept = shorten(values[offsets[index] : offsets[index + 1]], length, cut)
        padded[row, : len(kept)] = kept
    return padded


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
