"""Tags of the words of sentences whose dependency trees are known."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import baseline, checks, conllu, pipeline, store
from xformer.tasks import vocab as vocabularies
from xformer.tasks.conllu import Column, Sentence
from xformer.tasks.dataset import TaskData
from xformer.tasks.family import Family
from xformer.tasks.location import DataMissing, Progress
from xformer.tasks.origin import Origin
from xformer.tasks.ragged import Ragged
from xformer.tasks.splits import hash_split, normal
from xformer.tasks.text import DEFAULT_SUBWORDS, Source, Texts, TextTask, digest
from xformer.tasks.token_classification import NO_LABEL, TokenClassification

INSTALL = "pip install --no-deps turkish-treebanks"
_READING = "1"  # what the same files are read as; another number where that changes


@dataclasses.dataclass(frozen=True)
class Sentences(Texts):
    """The texts of sentences, and the sentences."""

    sentences: Mapping[str, list[Sentence]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Treebank(TextTask):
    """A tag for each word of a sentence: part-of-speech tagging, with the tree of the sentence beside its text.

    A word is cut into subwords (or bytes). The first of them has the tag and the word's place in the tree; the others
    have no tag, which nothing is asked of, and depend on the first. So an edge between words is one between their first
    subwords. What depends on a word that is cut off at `max_len` is a root.

    path: a CoNLL-U file, or a folder of files *.conllu; "": the Turkish Web Treebank (Kayadelen et al. 2020) in the
    installed PyPI package `turkish-treebanks`, 2,541 sentences of the web and 2,310 of Wikipedia. A split without a
    path of its own is cut from these sentences by a hash of the text: `validation_share` and `test_share`. Sentences
    with one text stay in one split, and the data's info counts those that repeat another (`copies`).

    column: what is asked: "upos", the universal part of speech, "xpos", that of the treebank, or "deprel", the relation
    to the parent. Where a file says `_` nothing is asked.
    """

    name: ClassVar[str] = "treebank"

    path: str = ""
    validation_path: str | None = None
    test_path: str | None = None
    column: Column = "upos"
    max_len: int = 128
    vocab: vocabularies.TextVocabulary = "subword"
    validation_share: float = 0.1
    test_share: float = 0.15

    def __post_init__(self) -> None:
        checks.choice(self.name, "vocab", self.vocab, ("bytes", "subword"))
        super().__post_init__()
        checks.choice(self.name, "column", self.column, get_args(Column))
        checks.choice(self.name, "cut", self.cut, ("head",))
        checks.shares(self.name, validation_share=self.validation_share, test_share=self.test_share)
        for key in ("path", "validation_path", "test_path"):
            value = getattr(self, key)
            if not (isinstance(value, str) and (value or key == "path")) and not (value is None and key != "path"):
                raise ValueError(f"{self.name}: {key} must be a path, got {value!r}")

    @property
    def family(self) -> Family:
        return TokenClassification()

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        turkish = "Turkish Web Treebank, of the PyPI package turkish-treebanks"
        own = Origin("your own treebank in CoNLL-U", "yours", "as many as you have", given={"path": "FILE"})
        return Origin(turkish, "Apache 2.0, as the package says", "4,851 sentences", fetch=INSTALL), own

    def example_batch(self, batch_size: int, preprocessing: Any = None) -> dict[str, Any]:
        """As that of every task, and `parents` int32 [batch, length]."""
        parents = jax.ShapeDtypeStruct((batch_size, self.max_len), jnp.int32)
        return super().example_batch(batch_size, preprocessing) | {"parents": parents}

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """`inputs`, `mask` and `parents`: int32 [batch, length], the place of each token's parent, -1 at roots."""
        return super().inputs(batch) | {"parents": batch["parents"]}

    def baseline(self, data: TaskData) -> dict[str, Any]:
        """The commonest tag at each word, and among `others` the commonest tag of each word; see `by_word`."""
        return super().baseline(data) | {"others": [by_word(self, data)]}

    def _source(self, data_dir: str | Path | None) -> Source:
        given = {"train": self.path, "validation": self.validation_path, "test": self.test_path}
        paths = {split: Path(path).expanduser() for split, path in given.items() if path}
        found = {split: conllu.files(path) for split, path in paths.items()}
        name = ", ".join(map(str, paths.values()))
        if "train" not in found:
            found = {"train": _installed(), **found}
            name = ", ".join(["turkish-treebanks", *map(str, paths.values())])
        shares = {"validation": self.validation_share, "test": self.test_share}
        parts = [part for split, some in found.items() for file in some for part in (split, file.read_bytes())]
        read = lambda: self._read(found, {split: share for split, share in shares.items() if split not in found})
        return Source(name, digest(_READING, self.column, str(shares), *parts), read)

    def _read(self, found: Mapping[str, Sequence[Path]], shares: Mapping[str, float]) -> Sentences:
        splits = {split: [one for file in some for one in conllu.read(file)] for split, some in found.items()}
        for split, some in splits.items():
            if not some:
                raise ValueError(f"{self.name}: no sentence in {', '.join(map(str, found[split]))}")
        whole = splits["train"]
        texts = [conllu.text_of(sentence) for sentence in whole]
        chosen = hash_split(texts, [""] * len(whole), shares)
        splits |= {split: [whole[index] for index in indices] for split, indices in chosen.items()}
        for split in ("train", "validation", "test"):
            if not splits[split]:
                raise ValueError(f"{self.name}: {len(whole)} sentences are too few to cut off {split}")
        ordered = {split: splits[split] for split in ("train", "validation", "test")}
        by_split = {split: {tag for one in some for tag in self._tags(one)} - {""} for split, some in ordered.items()}
        if bare := next((split for split, tags in by_split.items() if not tags), None):
            where = ", ".join(map(str, found.get(bare, found["train"])))
            raise ValueError(f"{self.name}: no word of {bare} has a {self.column} in {where}")
        facts = {
            "copies": len(texts) - len(set(map(normal, texts))),
            "words": {split: sum(map(len, some)) for split, some in ordered.items()},
        }
        as_texts = {split: (list(map(conllu.text_of, some)), [0] * len(some)) for split, some in ordered.items()}
        return Sentences(as_texts, sorted(set.union(*by_split.values())), facts, sentences=ordered)

    def _tags(self, sentence: Sentence) -> list[str]:
        return [getattr(word, self.column) for word in sentence]

    def _tokenise(self, source: Source, progress: Progress) -> store.Corpus:
        texts = source.read()
        assert isinstance(texts, Sentences)
        vocabulary: vocabularies.Vocabulary = vocabularies.Bytes()
        if self.vocab == "subword":
            if progress:
                progress(f"{self.name}: learning subwords from {len(texts.sentences['train']):,} sentences")
            known = texts.splits["train"][0]
            vocabulary = vocabularies.Subword.train(known, self.vocab_size or DEFAULT_SUBWORDS)
        ids = {tag: index for index, tag in enumerate(texts.class_names)} | {"": NO_LABEL}
        splits = {}
        for split, sentences in texts.sentences.items():
            tokens, labels, parents = [], [], []
            for sentence in sentences:
                words = words_in_tokens(sentence, vocabulary)
                first = np.cumsum([0, *map(len, words)])
                tokens.append([token for word in words for token in word])
                own, above = np.full(first[-1], NO_LABEL), np.zeros(first[-1], np.int32)
                for index, (word, tag) in enumerate(zip(sentence, self._tags(sentence), strict=True)):
                    above[first[index] : first[index + 1]] = first[index]
                    above[first[index]] = first[word.parent] if word.parent >= 0 else -1
                    own[first[index]] = ids[tag]
                labels.append(own)
                parents.append(above)
            examples = Ragged.with_label_sequences(tokens, labels, store.token_dtype(vocabulary))
            splits[split] = dataclasses.replace(examples, parents=np.concatenate(parents))
        facts = {"source": source.name, **texts.facts, "near_duplicates": self._near_duplicates(texts)}
        return store.Corpus(splits, vocabulary, texts.class_names, facts)

    def _open(self, data_dir: str | Path | None, source: Source) -> TaskData:
        return TreebankData(store.read(self._directory(data_dir, source)), self.max_len, self.family)


class TreebankData(TaskData):
    """Sentences with the parents of their tokens."""

    def _change(self, split: str, seed: int) -> pipeline.Change:
        del seed
        examples = self.examples(split)

        def with_parents(batch: dict[str, np.ndarray], rows: np.ndarray, epochs: np.ndarray) -> dict[str, np.ndarray]:
            del epochs
            return {**batch, "parents": examples.pad_parents(rows, *batch["inputs"].shape)}

        return with_parents


def words_in_tokens(sentence: Sentence, vocabulary: vocabularies.Vocabulary) -> list[list[int]]:
    """The ids of each word, of which there is at least one; a space before a word is a part of it."""
    spaces = [False, *(word.space for word in sentence)]
    return vocabulary.encode_batch([" " * space + word.form for space, word in zip(spaces, sentence, strict=False)])


def by_word(task: Any, data: TaskData) -> dict[str, Any]:
    """What scores the commonest tag of each word in training, and of words that do not occur there the commonest of
    all; `loss` is that of the shares of a word's tags, to each of which the shares of all are added once.
    """
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for word, tag in _tagged_words(data, "train"):
        counts[word][tag] += 1
    classes = range(data.num_classes)
    whole = np.array([sum(held[tag] for held in counts.values()) for tag in classes], np.float64) + 1
    shares = whole / whole.sum()
    scores = {}
    for split in baseline.SPLITS:
        words = list(_tagged_words(data, split))
        held = np.array([[counts[word][tag] if word in counts else 0 for tag in classes] for word, _ in words])
        logits = jnp.log(jnp.asarray((held + shares) / (held.sum(1, keepdims=True) + 1), jnp.float32))[None]
        batch = {"targets": jnp.asarray([[tag for _, tag in words]]), "weights": jnp.ones(1)}
        totals = {name: baseline.add(None, entry) for name, entry in task.metrics(logits, batch).items()}
        scores[split] = {name: round(float(value), 6) for name, value in task.finish(totals).items()}
    return {"title": "words", "name": "answers the commonest tag of each word", "scores": scores}


def _tagged_words(data: TaskData, split: str) -> list[tuple[str, int]]:
    """The words that a model is asked for, each up to the next such word, and their tags."""
    found, examples = [], data.examples(split)
    for index in range(len(examples)):
        tokens, labels = (x[: data.max_len] for x in (examples[index], examples.label(index)))
        first = np.flatnonzero(labels != NO_LABEL)
        for start, stop in itertools.pairwise([*first, len(tokens)]):
            found.append((data.vocabulary.decode(tokens[start:stop]).strip(), int(labels[start])))
    return found


def _installed() -> list[Path]:
    """The files of the PyPI package, which lie beside its modules."""
    spec = importlib.util.find_spec("turkish_treebanks")
    folders = (Path(folder).parent / "data" for folder in (spec and spec.submodule_search_locations) or ())
    for found in ([folder / "web.conllu", folder / "wiki.conllu"] for folder in folders):
        if all(file.is_file() for file in found):
            return found
    raise DataMissing(f"treebank: no treebank installed; install one ({INSTALL}), or give path, a CoNLL-U file")
