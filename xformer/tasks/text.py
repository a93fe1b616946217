"""What tasks made of texts share: the choice of a vocabulary, tokenising once, and opening the result."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np

from xformer import tokenizer_files
from xformer.tasks import bag_of_words, checks, chunks, store
from xformer.tasks import vocab as vocabularies
from xformer.tasks.classification import Classification
from xformer.tasks.dataset import TaskData
from xformer.tasks.interface import Task
from xformer.tasks.location import Progress
from xformer.tasks.multi_label import MultiLabel
from xformer.tasks.ragged import Cut, Ragged
from xformer.tasks.sizes import Sizes
from xformer.tasks.splits import normal

DEFAULT_SUBWORDS = 8192
_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Texts:
    """Labelled texts by split, the names of labels 0, 1, ..., and facts for the results.

    splits: (texts, labels): an int for each text, or an array [texts, ...] as `Ragged.labels`. second: the second text
    of each example by split, where there are two. center, scale: see `store.Corpus`.
    """

    splits: Mapping[str, tuple[list[str], list[int] | np.ndarray]]
    class_names: list[str]
    facts: dict[str, Any]
    second: Mapping[str, list[str]] | None = None
    center: float = 0.0
    scale: float | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """Where texts come from: a name in words, a digest of all that decides what `read` returns, and `read` itself."""

    name: str
    digest: str
    read: Callable[[], Texts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """Classification of texts, cut at `max_len` tokens; the share that is cut is in the data's info.

    cut: what is kept of a longer text: "head", its first tokens, "tail", its last, or "head_tail", the first half of
    `max_len` from its beginning and the other from its end. Nothing is cut where `max_len` is that of the longest;
    `model.chunk_len` then makes a classifier read the text in chunks.

    vocab: "bytes" (256 of them), "subword" (byte-level BPE of `vocab_size` tokens, 8,192 by default, learnt from the
    training split only) or "tokenizer": that of `tokenizer`, a `tokenizer.json`, a folder with one or with
    other files of a tokenizer, or the `vocabulary.json` of a run (`xformer.tokenizer_files`); its ids, special tokens
    and truncation are used.
    """

    name: ClassVar[str]

    max_len: int = 1024
    vocab: vocabularies.TextVocabulary = "bytes"
    vocab_size: int | None = None
    cut: Cut = "head"
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        checks.whole(self.name, "max_len", self.max_len, at_least=1)
        checks.choice(self.name, "cut", self.cut, get_args(Cut))
        checks.choice(self.name, "vocab", self.vocab, get_args(vocabularies.TextVocabulary))
        if self.vocab_size is not None:
            if self.vocab != "subword":
                raise ValueError(
                    f"{self.name}: vocab_size is for vocab='subword', got {self.vocab_size} with {self.vocab!r}"
                )
            checks.whole(
                self.name, "vocab_size", self.vocab_size, at_least=258, why=" (256 bytes, padding and a merge)"
            )

        if (self.vocab == "tokenizer") != (self.tokenizer is not None):
            raise ValueError(
                f"{self.name}: tokenizer must be a tokenizer.json, or train.init_from an hf: folder that has one, with "
                f"vocab='tokenizer', and None with another vocab; got {self.tokenizer!r} with {self.vocab!r}"
            )
        if self.tokenizer is not None:
            if self.cut != "head":
                raise ValueError(
                    f"{self.name}: cut must be 'head' with a tokenizer, which cuts itself, got {self.cut!r}"
                )
            self._tokenizer()

    @property
    def length(self) -> int:
        return self.max_len

    def _tokenizer(self) -> vocabularies.Tokenizer:
        """The tokenizer of the file. Raises ValueError where it can't be read."""
        try:
            return vocabularies.Tokenizer(tokenizer_files.read(str(self.tokenizer)), self.max_len)
        except (OSError, UnicodeError, ValueError) as error:
            raise ValueError(f"{self.name}: tokenizer: {self.tokenizer}: {' '.join(str(error).split())}") from error

    @property
    def known_classes(self) -> list[str] | None:
        """The names of the classes, where they don't depend on the user's files."""
        return None

    def expected_sizes(self) -> Sizes:
        sizes, assumed = dict(super().expected_sizes()), []
        sizes["vocab_size"] = vocabularies.Bytes.size
        if self.tokenizer is not None:
            sizes["vocab_size"] = self._tokenizer().size
        if self.vocab == "subword":  # at most: a small corpus has fewer merges
            sizes["vocab_size"] = self.vocab_size or DEFAULT_SUBWORDS
            assumed.append("vocab_size")
        if self.known_classes is not None:
            sizes["num_classes"] = self.family.num_outputs(self.known_classes)
        elif self.family.num_outputs(["a"]) != self.family.num_outputs(["a", "b"]):
            assumed.append("num_classes")
        return Sizes(sizes, assumed)

    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        source = self._source(data_dir)

        def make() -> store.Corpus:
            if progress:
                progress(f"{self.name}: reading {source.name}, tokenising into {self.vocab}")
            return self._tokenise(source, progress)

        store.write(self._directory(data_dir, source), make, progress)
        if progress:
            progress(f"{self.name}: {self._open(data_dir, source).summary}")

    def open(self, data_dir: str | Path | None = None) -> TaskData:
        return self._open(data_dir, self._source(data_dir))

    def folder(self, data_dir: str | Path | None = None) -> Path:
        return self._directory(data_dir, self._source(data_dir))

    def baseline(self, data: TaskData) -> dict[str, Any]:
        """A guesser that reads no text, and among `others` a classifier by words; see `bag_of_words.scores`."""
        words = isinstance(self.family, Classification | MultiLabel)
        return super().baseline(data) | ({"others": [bag_of_words.scores(self, data)]} if words else {})

    def _open(self, data_dir: str | Path | None, source: Source) -> TaskData:
        return TaskData(store.read(self._directory(data_dir, source)), self.max_len, self.family, self.cut)

    @abc.abstractmethod
    def _source(self, data_dir: str | Path | None) -> Source:
        """The texts. Raises DataMissing if there are none."""

    def _directory(self, data_dir: str | Path | None, source: Source) -> Path:
        vocab = f"subword{self.vocab_size or DEFAULT_SUBWORDS}" if self.vocab == "subword" else self.vocab
        if self.tokenizer is not None:
            vocab += digest(json.dumps(self._tokenizer().to_json(), sort_keys=True))[:16]
        return store.directory(data_dir, self.name, f"{vocab}_{source.digest[:16]}")

    def _tokenise(self, source: Source, progress: Progress) -> store.Corpus:
        texts = source.read()
        total = sum(len(documents) for documents, _ in texts.splits.values())
        say = chunks.every_few_seconds(progress, f"{self.name}: COUNT of {total:,} examples tokenised")
        done = 0
        vocabulary: vocabularies.Vocabulary = vocabularies.Bytes()
        if self.vocab == "subword":
            known = [*texts.splits["train"][0], *(texts.second["train"] if texts.second else ())]
            if progress:
                progress(f"{self.name}: learning subwords from {len(known):,} training texts")
            vocabulary = vocabularies.Subword.train(known, self.vocab_size or DEFAULT_SUBWORDS)
        if self.tokenizer is not None:
            vocabulary = self._tokenizer()
        dtype = store.token_dtype(vocabulary)
        splits = {}
        for split, (documents, labels) in texts.splits.items():
            second = _encode(vocabulary, texts.second[split]) if texts.second else None
            first = _encode(vocabulary, documents, say, done)
            splits[split] = Ragged.from_lists(first, labels, dtype, second=second)
            done += len(documents)
        facts = {"source": source.name, **texts.facts, "near_duplicates": self._near_duplicates(texts)}
        return store.Corpus(splits, vocabulary, texts.class_names, facts, texts.center, texts.scale)

    def _near_duplicates(self, texts: Texts) -> dict[str, int]:
        """Texts of each other split that also stand in the training split but for case and white space."""

        def folded(split: str) -> Iterator[str]:
            second = texts.second[split] if texts.second else itertools.repeat("")
            return (normal(f"{first}\n{more}").casefold() for first, more in zip(texts.splits[split][0], second))  # noqa: B905

        known = set(folded("train"))
        return {split: sum(text in known for text in folded(split)) for split in texts.splits if split != "train"}


def digest(*parts: bytes | str) -> str:
    """A hash of the parts, each one apart from the next."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", errors="surrogateescape") if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def _encode(
    vocabulary: vocabularies.Vocabulary,
    documents: Sequence[str],
    say: Callable[[int], None] = lambda count: None,
    before: int = 0,
) -> Iterator[list[int]]:
    """The ids of each document; `say` gets the number of those that are done, with so many `before`."""
    for start in range(0, len(documents), _BATCH):
        say(before + start)
        yield from vocabulary.encode_batch(documents[start : start + _BATCH])
