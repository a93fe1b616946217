"""Opened data: batches for training, facts for the report, and the preprocessing that a run keeps for predictions."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xformer.tasks import pipeline, store, vocab
from xformer.tasks.ragged import Ragged

if TYPE_CHECKING:
    import grain

logger = logging.getLogger(__name__)

_FILE = "preprocessing.json"
_VOCABULARY = "vocabulary.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Preprocessing:
    """Turns texts into a model's arguments as in training: the vocabulary, the length, and the names of the classes."""

    vocabulary: vocab.Vocabulary
    max_len: int
    class_names: list[str]

    def __call__(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """`inputs` int32 [texts, max_len], cut at `max_len` and padded with 0, and `mask` bool, True at tokens.

        All texts are padded to `max_len`, as the batches of training are, so that a pattern that depends on the padded
        length (that of a bidirectional BigBird) is the one that the model was trained with.

        Raises ValueError for a single string in place of a list, and for an empty text.
        """
        return self.encode(texts)[0]

    def encode(self, texts: Sequence[str]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """What a call returns, and which texts were cut, bool [texts]. Raises ValueError as a call does."""
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"texts must be a list of strings, got {texts!r:.60}")
        ids = self.vocabulary.encode_batch(texts)
        empty = [index for index, sequence in enumerate(ids) if not sequence or not texts[index].strip()]
        if empty:
            raise ValueError(f"text {empty[0]} of {len(ids)} is empty: {texts[empty[0]]!r}")
        inputs = np.zeros((len(ids), self.max_len), np.int32)
        for row, sequence in zip(inputs, ids, strict=True):
            row[: len(sequence)] = sequence[: self.max_len]
        truncated = np.array([len(sequence) > self.max_len for sequence in ids], bool)
        return {"inputs": inputs, "mask": inputs > 0}, truncated

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the meaning of inputs and outputs: `vocabulary` (a digest), `class_names`, `max_len`."""
        vocabulary = json.dumps(self.vocabulary.to_json(), sort_keys=True)
        return {
            "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest(),
            "class_names": list(self.class_names),
            "max_len": self.max_len,
        }

    def save(self, directory: str | Path) -> None:
        """Writes the vocabulary and the rest into a run's directory."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.vocabulary.save(directory / _VOCABULARY)
        rest = {"max_len": self.max_len, "class_names": self.class_names}
        (directory / _FILE).write_text(json.dumps(rest) + "\n", encoding="utf-8")


def load_preprocessing(directory: str | Path) -> Preprocessing:
    """The preprocessing that a run saved. Raises FileNotFoundError where there is none."""
    directory = Path(directory)
    rest = json.loads((directory / _FILE).read_text(encoding="utf-8"))
    return Preprocessing(vocab.load(directory / _VOCABULARY), rest["max_len"], rest["class_names"])


class TaskData:
    """The splits of a task in memory (mapped), cut to `max_len` tokens as they are read.

    num_classes, vocab_size (padding included), max_len: int; class_names, in the order of the labels; vocabulary;
    splits. fingerprint, JSON-able: all that a model is trained and evaluated on, part by part: digests of the texts and
    of the labels of each split and of the vocabulary, class_names, max_len, and `digest`, one for all of them, whatever
    the files are called. info, JSON-able: that digest, num_examples, truncated (the share of inputs cut), median_length
    in tokens, label_shares and majority_accuracy (what always answering the split's commonest class scores), each by
    split, and where the data is from.
    """

    def __init__(self, corpus: store.Corpus, max_len: int):
        self.max_len = max_len
        self.vocabulary = corpus.vocabulary
        self.class_names = corpus.class_names
        self.vocab_size = corpus.vocabulary.size
        self.num_classes = len(corpus.class_names)
        self.preprocess = Preprocessing(self.vocabulary, max_len, self.class_names)
        self._splits = corpus.splits
        shares = {
            split: np.bincount(examples.labels, minlength=self.num_classes) / max(len(examples), 1)
            for split, examples in corpus.splits.items()
        }
        truncated = {split: _share(e.lengths > max_len) for split, e in corpus.splits.items()}
        parts = {**corpus.digests, **self.preprocess.fingerprint}
        total = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        self.fingerprint: dict[str, Any] = {"digest": total, **parts}
        self.info: dict[str, Any] = {
            **corpus.facts,
            "digest": total,
            "num_examples": {split: len(examples) for split, examples in corpus.splits.items()},
            "num_classes": self.num_classes,
            "vocab_size": self.vocab_size,
            "max_len": max_len,
            "median_length": {split: float(np.median(e.lengths)) for split, e in corpus.splits.items()},
            "truncated": truncated,
            "label_shares": {split: [round(float(share), 6) for share in values] for split, values in shares.items()},
            "majority_accuracy": {split: round(float(values.max()), 6) for split, values in shares.items()},
        }
        logger.info(self.summary)

    @property
    def summary(self) -> str:
        """One line for people: how many examples, and what share of them is truncated."""
        parts = [
            f"{self.info['num_examples'][split]:,} {split} ({share:.1%} truncated)"
            for split, share in self.info["truncated"].items()
        ]
        return f"{', '.join(parts)} at max_len={self.max_len}"

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return list(self._splits)

    def num_examples(self, split: str) -> int:
        """Examples of a split. Raises ValueError if there is no such split."""
        return len(self._examples(split))

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> grain.DatasetIterator[dict[str, np.ndarray]]:
        """A Grain iterator over a split; see `xformer.tasks.pipeline.batches`. `batch_size` is that of one shard."""
        return pipeline.batches(
            self._examples(split),
            batch_size,
            max_len=self.max_len,
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            shard_index=shard_index,
            shard_count=shard_count,
        )

    def save(self, directory: str | Path) -> None:
        """Stores the preprocessing with a run, for `load_preprocessing`."""
        self.preprocess.save(directory)

    def _examples(self, split: str) -> Ragged:
        if split not in self._splits:
            raise ValueError(f"split must be one of {', '.join(self._splits)}, got {split!r}")
        return self._splits[split]


def _share(values: Iterable[bool]) -> float:
    return round(float(np.mean(np.asarray(values))), 6)
