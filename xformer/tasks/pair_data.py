"""Opened pairs of a source and a target: rows for a model, and the texts to generate from and to compare with."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from xformer.tasks import pipeline, store
from xformer.tasks.dataset import Preprocessing, TaskData
from xformer.tasks.family import Family
from xformer.tasks.packing import EDGE
from xformer.tasks.pair_rows import PairRows, pair_rows
from xformer.tasks.ragged import Ragged
from xformer.tasks.sizes import Sizes
from xformer.tasks.target_tokens import unlabelled

logger = logging.getLogger(__name__)


class PairOptions(Protocol):
    """What rows of pairs depend on; see `SequenceToSequence`."""

    @property
    def max_len(self) -> int: ...
    @property
    def longest_target(self) -> int: ...
    @property
    def packing(self) -> bool: ...
    @property
    def num_validation(self) -> int | None: ...
    @property
    def num_test(self) -> int | None: ...
    @property
    def family(self) -> Family: ...
    def sizes(self, preprocessing: Preprocessing | None = None) -> Sizes: ...


class PairData(TaskData):
    """Pairs, read as rows. An example is a row: of the training split several pairs, of the others one.

    `info` has the number of `pairs` by split and the share of `padding` in the rows; `truncated` is the share of pairs
    of which a source or a target is cut.
    """

    by_length = False  # all batches have one length

    def __init__(self, task: PairOptions, corpus: store.Corpus) -> None:
        splits = {split: dataclasses.replace(e, labels=unlabelled(len(e))) for split, e in corpus.splits.items()}
        facts = {**corpus.facts, "pairs": {split: len(pairs) for split, pairs in splits.items()}}
        super().__init__(store.Corpus(splits, corpus.vocabulary, [], facts), task.max_len, task.family)
        self.preprocess = dataclasses.replace(self.preprocess, num_texts=1)  # a model reads the source alone
        self.sizes = task.sizes(self.preprocess)
        self.num_classes = self.sizes["num_classes"]
        self.labels_are_sequences = True
        self._rows: dict[str, PairRows] = {}
        longest, truncated, padding = (task.max_len, task.longest_target), {}, {}
        for split, pairs in splits.items():
            lengths, target_lengths = np.diff(pairs.offsets), np.diff(_second(pairs))
            together = task.packing and split == "train"
            rows = pair_rows(lengths, target_lengths, *longest, together=together)
            kept = {"validation": task.num_validation, "test": task.num_test}.get(split)
            self._rows[split] = rows if kept is None else rows.some(kept)
            cut = (lengths > longest[0]) | (target_lengths + 1 > longest[1])
            truncated[split] = float(cut.mean()) if cut.size else 0.0
            used = np.minimum(lengths, longest[0]) + np.minimum(target_lengths + 1, longest[1])
            used = used[self._rows[split].pairs].sum()
            padding[split] = round(1 - float(used) / max(len(self._rows[split]) * sum(longest), 1), 6)
        self.info |= {
            "num_classes": self.num_classes,
            "target_max_len": task.longest_target,
            "num_examples": {split: len(rows) for split, rows in self._rows.items()},
            "truncated": truncated,
            "padding": padding,
        }
        logger.info(self.summary)

    @property
    def summary(self) -> str:
        """One line for people: how many pairs and rows there are, and what share of the rows is padding."""
        if "padding" not in self.info:
            return super().summary
        info = self.info
        parts = (
            f"{info['pairs'][split]:,} {split} in {info['num_examples'][split]:,} rows ({share:.1%} padding, "
            f"{info['truncated'][split]:.1%} of pairs cut)"
            for split, share in info["padding"].items()
        )
        return f"pairs of up to {self.max_len:,} and {info['target_max_len']:,} tokens: {', '.join(parts)}"

    def num_examples(self, split: str) -> int:
        return len(self.rows(split))

    def rows(self, split: str) -> PairRows:
        """The rows of a split. Raises ValueError if there is no such split."""
        self.examples(split)
        return self._rows[split]

    def labels(self, split: str) -> np.ndarray:
        """All tokens of the targets of a split, and an end of each."""
        tokens = self.examples(split).tokens2
        assert tokens is not None
        return np.concatenate([tokens.astype(np.int64), np.full(self.info["pairs"][split], EDGE, np.int64)])

    def pairs(self, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens of the source, tokens of the target) of each pair in the rows of a split, in their order, not cut."""
        examples = self.examples(split)
        offsets = _second(examples)
        assert examples.tokens2 is not None
        for pair in self.rows(split).pairs:
            yield examples[pair], examples.tokens2[offsets[pair] : offsets[pair + 1]]

    def facts_by_example(self, split: str) -> dict[str, np.ndarray]:
        """`length` of each row in tokens of sources, not cut, int64 [rows]."""
        rows, lengths = self.rows(split), np.diff(self.examples(split).offsets)
        if not len(rows):
            return {"length": np.zeros(0, np.int64)}
        return {"length": np.add.reduceat(lengths[rows.pairs], rows.first[:-1])}

    def targets(self, split: str, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        """The batches of a split in order; the last may be smaller."""
        count = self.num_examples(split)
        for start in range(0, count, batch_size):
            chosen = np.arange(start, min(start + batch_size, count))
            yield self._read(split, chosen, len(chosen))

    def _reader(self, split: str, batch_size: int, seed: int) -> pipeline.Read:
        del seed  # rows are the same in every epoch
        return lambda rows, epochs: self._read(split, rows, batch_size)

    def _read(self, split: str, indices: np.ndarray, rows: int) -> dict[str, np.ndarray]:
        weights = np.zeros(rows, np.float32)
        weights[: len(indices)] = 1
        return {**self.rows(split).read(self.examples(split), indices, rows), "weights": weights}


def _second(pairs: Ragged) -> np.ndarray:
    """Where the targets begin and the last ends."""
    assert pairs.offsets2 is not None
    return pairs.offsets2
