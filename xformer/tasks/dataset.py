"""Opened data: batches for training, facts for the report, and the preprocessing that a run keeps for predictions."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from xformer.tasks import pipeline, store, vocab
from xformer.tasks.classification import Classification
from xformer.tasks.family import Family
from xformer.tasks.ragged import Cut, Ragged, shorten
from xformer.tasks.sizes import Sizes

if TYPE_CHECKING:
    import grain

logger = logging.getLogger(__name__)

_FILE = "preprocessing.json"
VOCABULARY = "vocabulary.json"


Text = str | tuple[str, str]
"""What a model reads: a text, or two of them where it compares documents."""


@dataclasses.dataclass(frozen=True, eq=False)
class Preprocessing:
    """Turns texts into a model's arguments as in training.

    Attributes:
      vocabulary: text to token ids.
      max_len: tokens that each text is cut or padded to.
      class_names: names of the classes or labels, in the order of the model's outputs; empty for numbers.
      num_texts: documents of an example, 1 or 2.
      center, scale: a number is the model's output x scale + center; `scale` is None where it gives no numbers.
      cut: which tokens of a longer text are kept.
    """

    vocabulary: vocab.Vocabulary
    max_len: int
    class_names: list[str]
    num_texts: int = 1
    center: float = 0.0
    scale: float | None = None
    cut: Cut = "head"

    def __call__(self, texts: Sequence[Text]) -> dict[str, np.ndarray]:
        """`inputs` int32 [texts, max_len], cut at `max_len` and padded with 0, and `mask` bool, True at tokens.

        Of pairs of texts, the second ones are `inputs2` and `mask2`. All texts are padded to `max_len`, as the batches
        of training are, so that a pattern that depends on the padded length (that of a bidirectional BigBird) is the
        one that the model was trained with.

        Raises ValueError for a single string in place of a list, for an empty text, and for one text where two are
        needed.
        """
        return self.encode(texts)[0]

    def encode(self, texts: Sequence[Text]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """What a call returns, and which examples were cut, bool [texts]. Raises ValueError as a call does.

        Of images, paths of files or uint8 arrays, it is `images` float32 [images, height, width, channels].
        """
        if isinstance(self.vocabulary, vocab.ImageValues):
            if isinstance(texts, str):
                raise ValueError(f"images must be a list of paths or arrays, got {texts!r:.60}")
            return {"images": self.vocabulary.images(texts)}, np.zeros(len(texts), bool)
        if self.num_texts == 1:
            inputs, truncated = self._encode(texts)
            return {"inputs": inputs, "mask": inputs > 0}, truncated
        pairs: list[Any] = [] if isinstance(texts, str) else list(texts)
        if isinstance(texts, str) or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"texts must be a list of pairs of strings (text, text2), got {texts!r:.60}")
        inputs, truncated = self._encode([first for first, _ in pairs])
        inputs2, truncated2 = self._encode([second for _, second in pairs])
        features = {"inputs": inputs, "mask": inputs > 0, "inputs2": inputs2, "mask2": inputs2 > 0}
        return features, truncated | truncated2

    def _encode(self, texts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(texts, str) or not hasattr(texts, "__len__") or not all(_is_text(text) for text in texts):
            raise ValueError(f"texts must be a list of strings{_halves(texts)}, got {texts!r:.60}")
        ids = self.vocabulary.encode_batch(texts)
        empty = [index for index, sequence in enumerate(ids) if not sequence or not texts[index].strip()]
        if empty:
            raise ValueError(f"text {empty[0]} of {len(ids)} is empty: {texts[empty[0]]!r}")
        inputs = np.zeros((len(ids), self.max_len), np.int32)
        for row, sequence in zip(inputs, ids, strict=True):
            kept = shorten(sequence, self.max_len, self.cut)
            row[: len(kept)] = kept
        return inputs, np.array([len(sequence) > self.max_len for sequence in ids], bool)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the meaning of inputs and outputs: `vocabulary` (a digest), `class_names`, `max_len`, ..."""
        vocabulary = json.dumps(self.vocabulary.to_json(), sort_keys=True)
        return {
            "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest(),
            "class_names": list(self.class_names),
            "max_len": self.max_len,
            **self._unusual,
        }

    @property
    def _unusual(self) -> dict[str, Any]:
        """What the first version did not know, where it is not as it was then: its files and digests stay valid."""
        found: dict[str, Any] = {} if self.num_texts == 1 else {"num_texts": self.num_texts}
        found |= {} if self.cut == "head" else {"cut": self.cut}
        return found if self.scale is None else found | {"center": self.center, "scale": self.scale}

    def save(self, directory: str | Path, sizes: Sizes | None = None) -> None:
        """Writes the vocabulary and the rest into a run's directory, with the model's `sizes` for readers."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.vocabulary.save(directory / VOCABULARY)
        rest = {"max_len": self.max_len, "class_names": self.class_names, **self._unusual}
        rest |= {"sizes": sizes} if sizes is not None else {}
        (directory / _FILE).write_text(json.dumps(rest) + "\n", encoding="utf-8")


def load_preprocessing(directory: str | Path) -> Preprocessing:
    """The preprocessing that a run saved.

    Raises:
      FileNotFoundError: there is none.
      ValueError: a file of it is damaged; the message names it.
    """
    path = Path(directory) / _FILE
    try:
        rest = json.loads(path.read_text(encoding="utf-8"))
        more = {key: rest[key] for key in ("num_texts", "center", "scale", "cut") if key in rest}
        max_len, class_names = rest["max_len"], rest["class_names"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({' '.join(str(error).split()) or type(error).__name__})") from error
    path = path.with_name(VOCABULARY)
    try:
        vocabulary = vocab.load(path)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({' '.join(str(error).split()) or type(error).__name__})") from error
    return Preprocessing(vocabulary, max_len, class_names, **more)


class TaskData:
    """The splits of a task in memory (mapped), cut to `max_len` tokens as they are read.

    Attributes:
      num_classes, vocab_size, max_len: outputs of the model, token ids (padding included), tokens; together `sizes`.
      vocabulary, class_names, splits: the names in the order of the labels.
      center, scale: of labels that are numbers; 0 and 1 elsewhere.
      fingerprint: JSON-able, all that a model is trained and evaluated on, part by part: digests of the texts and of
        the labels of each split and of the vocabulary, class_names, max_len, and `digest`, one for all of them,
        whatever the files are called.
      info: JSON-able, that digest, num_examples, truncated (the share of inputs cut), median_length and lengths (the
        median, 90 %, 99 %, the longest) in tokens, and what the family says of the labels, such as label_shares and
        majority_accuracy (what always answering the split's commonest class scores), each by split; of texts also
        near_duplicates (those of a split that are training texts too, but for case and white space); the tokenizer
        (its kind, size and digest), where the data is from and, where it was prepared, data_version.

    Args:
      corpus: the prepared splits.
      max_len: tokens that a text is cut to.
      family: the kind of target.
      cut: which tokens of a longer text are kept.
    """

    by_length: ClassVar[bool] = True  # whether texts of like length can meet in a batch

    def __init__(
        self,
        corpus: store.Corpus,
        max_len: int,
        family: Family = Classification(),  # noqa: B008
        cut: Cut = "head",
    ):
        self.max_len = max_len
        self.vocabulary = corpus.vocabulary
        self.class_names = corpus.class_names
        self.vocab_size = corpus.vocabulary.size
        self.num_classes = family.num_outputs(corpus.class_names)
        self.sizes = Sizes({"vocab_size": self.vocab_size, "num_classes": self.num_classes, "max_len": max_len})
        self._splits = corpus.splits
        self._numbers: dict[str, Any] = {"center": corpus.center, "scale": corpus.scale}
        self.center, self.scale = corpus.center, 1.0 if corpus.scale is None else corpus.scale
        first = next(iter(corpus.splits.values()))
        self.labels_are_sequences = first.label_offsets is not None
        num_texts = 1 if first.tokens2 is None else 2
        self.preprocess = Preprocessing(self.vocabulary, max_len, self.class_names, num_texts, **self._numbers, cut=cut)
        if (weights := family.example_weights(corpus.splits["train"].labels, self.num_classes)) is not None:
            self._numbers["class_weights"] = weights
        facts: dict[str, dict[str, Any]] = {}
        for split, examples in corpus.splits.items():
            for name, value in family.facts(examples.labels, self.num_classes).items():
                facts.setdefault(name, {})[split] = value
        truncated = {split: _share(e.lengths > max_len) for split, e in corpus.splits.items()}
        parts = {**corpus.digests, **self.preprocess.fingerprint}
        total = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        self.fingerprint: dict[str, Any] = {"digest": total, **parts}
        self.info: dict[str, Any] = {
            **corpus.facts,
            "digest": total,
            "num_examples": {split: len(examples) for split, examples in corpus.splits.items()},
            "num_classes": self.num_classes,
            "tokenizer": {
                "kind": self.vocabulary.to_json().get("kind", type(self.vocabulary).__name__),
                "size": self.vocab_size,
                "digest": self.preprocess.fingerprint["vocabulary"],
            },
            "vocab_size": self.vocab_size,
            "max_len": max_len,
            "median_length": {split: float(np.median(e.lengths)) for split, e in corpus.splits.items()},
            "lengths": {split: _quantiles(e.lengths) for split, e in corpus.splits.items()},
            "truncated": truncated,
            **facts,
        }
        logger.info(self.summary)
        for split, count in self.info.get("near_duplicates", {}).items():
            if count:
                some = (
                    f"{self.info.get('source', 'the data')}: {count:,} of {len(corpus.splits[split]):,} {split} texts"
                )
                _warn(f"{some} are training texts too, but for case and white space")

    @property
    def summary(self) -> str:
        """One line for people: how long the examples are, how many, and what share of them is truncated."""
        parts = [
            f"{self.info['num_examples'][split]:,} {split} ({share:.1%} truncated)"
            for split, share in self.info["truncated"].items()
        ]
        lengths = ", ".join(f"{name} {value:,}" for name, value in self.info["lengths"]["train"].items())
        return f"lengths in tokens: {lengths}; {', '.join(parts)} at max_len={self.max_len}"

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return list(self._splits)

    def num_examples(self, split: str) -> int:
        """Examples of a split. Raises ValueError if there is no such split."""
        return len(self.examples(split))

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
        length_buckets: int = 1,
    ) -> grain.DatasetIterator[dict[str, np.ndarray]]:
        """A Grain iterator over a split; see `xformer.tasks.pipeline.batches`. `batch_size` is that of one shard.

        length_buckets: above 1, batches hold texts of like length and are padded to one of so many lengths: `max_len`,
        half of it, a quarter, ...; see `xformer.tasks.pipeline.ByLength`.
        """
        padded = pipeline.bucket_lengths(self.max_len, length_buckets)
        return pipeline.batches(
            self.num_examples(split),
            batch_size,
            self._reader(split, batch_size, seed),
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            shard_index=shard_index,
            shard_count=shard_count,
            by_length=pipeline.ByLength(self.examples(split).lengths, padded) if length_buckets > 1 else None,
        )

    def _reader(self, split: str, batch_size: int, seed: int) -> pipeline.Read:
        """What reads the batches of a split."""
        return pipeline.reader(
            self.examples(split),
            batch_size,
            max_len=self.max_len,
            **self._numbers,
            cut=self.preprocess.cut,
            change=self._change(split, seed),
        )

    def _change(self, split: str, seed: int) -> pipeline.Change | None:
        """What is made of each batch of a split; see `pipeline.reader`. None: it stays as it is read."""
        del split, seed
        return None

    def labels(self, split: str) -> np.ndarray:
        """The stored labels of a split, all examples' one after the other; see `Ragged.labels`."""
        return self.examples(split).labels

    def targets(self, split: str, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        """What the batches of a split hold besides texts, example by example in order; the last may be smaller."""
        examples = self.examples(split)
        for start in range(0, len(examples), batch_size):
            chosen = np.arange(start, min(start + batch_size, len(examples)))
            yield pipeline.read_targets(examples, chosen, len(chosen), max_len=self.max_len, **self._numbers)

    def facts_by_example(self, split: str) -> dict[str, np.ndarray]:
        """What is known of each example of a split besides its batch: `length` in tokens, not cut, int64 [examples]."""
        return {"length": self.examples(split).lengths}

    def save(self, directory: str | Path) -> None:
        """Stores the preprocessing with a run, for `load_preprocessing`."""
        self.preprocess.save(directory, self.sizes)

    def examples(self, split: str) -> Ragged:
        """The stored examples of a split, not cut. Raises ValueError if there is no such split."""
        if split not in self._splits:
            raise ValueError(f"split must be one of {', '.join(self._splits)}, got {split!r}")
        return self._splits[split]


def _quantiles(lengths: np.ndarray) -> dict[str, int]:
    """Median, 90 %, 99 % and the longest, in tokens."""
    names = ("median", "90 %", "99 %", "longest")
    found = np.quantile(lengths, [0.5, 0.9, 0.99, 1.0], method="inverted_cdf") if len(lengths) else np.zeros(4)
    return {name: int(value) for name, value in zip(names, found, strict=True)}


def _share(values: Iterable[bool]) -> float:
    return round(float(np.mean(np.asarray(values))), 6)


def _halves(texts: Any) -> str:
    """Says so where half a surrogate pair is all that is wrong."""
    strings = not isinstance(texts, str) and all(isinstance(text, str) for text in texts)
    return " of whole characters (one holds half a surrogate pair)" if strings else ""


def _is_text(value: Any) -> bool:
    """Whether a value is a string of whole characters: half of a surrogate pair, as JSON may hold, is none."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


@functools.cache  # data is opened again and again, by each run of a comparison
def _warn(message: str) -> None:
    logger.warning(message)
