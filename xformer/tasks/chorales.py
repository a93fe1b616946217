"""Bach's chorales: four voices on a grid of sixteenths, each next pitch told from all before it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import baseline, checks, chorale_scores, chorale_tokens, pipeline, store
from xformer.tasks.chorale_scores import VOICES
from xformer.tasks.dataset import TaskData
from xformer.tasks.family import Family, Sums
from xformer.tasks.interface import Task
from xformer.tasks.language_model import LanguageData
from xformer.tasks.location import Progress
from xformer.tasks.next_tokens import NextTokens
from xformer.tasks.origin import Origin
from xformer.tasks.packing import EDGE
from xformer.tasks.ragged import Ragged
from xformer.tasks.sizes import Sizes
from xformer.tasks.splits import hash_split
from xformer.tasks.text import digest

_READING = "1"  # what the same files are read as; another number where that changes


class NextPitches(NextTokens):
    """`NextTokens` of what spells no bytes: a run selects by `loss`, in nats a token."""

    better: ClassVar[Mapping[str, str]] = MappingProxyType({"loss": "min", "accuracy": "max", "perplexity": "min"})

    def finish(self, sums: Sums) -> dict[str, float]:
        found = super().finish(sums)
        del found["bits_per_byte"]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chorales(Task):
    """Language modelling of four-part chorales (Huang et al. 2018, section 4.1): a token is the pitch of one voice at
    one sixteenth, or a rest; voices take turns, soprano to bass.

    Whole pieces are for training, validation or test, by a hash of what they are in any key; a copy, in another key or
    not, is left out. Rows and what is asked are as in `LanguageModel`: every token once, told from at least `max_len -
    stride` before it or from all there are; pieces share rows and do not see each other.

    path: a folder of compressed MusicXML (.mxl) at any depth, of which those in four parts are read; "": Bach's in the
    installed PyPI package `music21`.

    transpose: in training a row is transposed by up to so many semitones up or down, as far as there are tokens for it,
    anew in every epoch; 0: never.
    stride: `max_len / 2` where it is None.
    """

    name: ClassVar[str] = "chorales"
    packing: ClassVar[bool] = True
    num_validation: ClassVar[None] = None
    num_test: ClassVar[None] = None

    path: str = ""
    max_len: int = 1024
    validation_share: float = 0.1
    test_share: float = 0.1
    transpose: int = 5
    stride: int | None = None

    def __post_init__(self) -> None:
        checks.whole(self.name, "max_len", self.max_len, at_least=1)
        checks.shares(self.name, validation_share=self.validation_share, test_share=self.test_share)
        checks.whole(self.name, "transpose", self.transpose, at_least=0)
        if not isinstance(self.path, str):
            raise ValueError(f"{self.name}: path must be a string, got {self.path!r}")
        if self.stride is not None:
            checks.whole(self.name, "stride", self.stride, at_least=1)
            if self.stride > self.max_len:
                raise ValueError(f"{self.name}: stride must be at most max_len {self.max_len}, got {self.stride}")

    @property
    def length(self) -> int:
        return self.max_len

    @property
    def eval_stride(self) -> int:
        """Tokens between the pieces of validation and test."""
        return self.stride or max(self.max_len // 2, 1)

    @property
    def family(self) -> Family:
        return NextPitches()

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        bach = "Bach's four-part chorales in the PyPI package music21"
        own = Origin("your own scores, .mxl in four parts", "yours", "as many as you have", given={"path": "FOLDER"})
        return Origin(bach, chorale_scores.LICENCE, "364 pieces", fetch=chorale_scores.INSTALL), own

    def sizes(self, preprocessing: Any = None) -> Sizes:
        """`vocab_size` and `num_classes`, those of the tokens with the id 0, and `max_len`; known without the data."""
        del preprocessing
        size = chorale_tokens.VOCABULARY.size
        return Sizes({"vocab_size": size, "num_classes": size, "max_len": self.max_len})

    def example_batch(self, batch_size: int, preprocessing: Any = None) -> dict[str, Any]:
        """A batch, shapes and dtypes instead of arrays, as that of `LanguageModel`; `bytes` are zeros."""
        del preprocessing
        tokens = jax.ShapeDtypeStruct((batch_size, self.max_len), jnp.int32)
        number = jax.ShapeDtypeStruct((batch_size,), jnp.float32)
        return {"inputs": tokens, "targets": tokens, "segment_ids": tokens, "bytes": number, "weights": number}

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """`inputs`, `mask` and `segment_ids`, as those of `LanguageModel`."""
        segment_ids = batch["segment_ids"]
        return {"inputs": batch["inputs"], "mask": segment_ids > 0, "segment_ids": segment_ids}

    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        files = chorale_scores.files(self.path)
        store.write(self._directory(data_dir, files), lambda: self._read(files), progress)
        if progress:
            progress(f"{self.name}: {self.open(data_dir).summary}")

    def open(self, data_dir: str | Path | None = None) -> ChoraleData:
        return ChoraleData(self, store.read(self.folder(data_dir)))

    def folder(self, data_dir: str | Path | None = None) -> Path:
        return self._directory(data_dir, chorale_scores.files(self.path))

    def _directory(self, data_dir: str | Path | None, files: list[Path]) -> Path:
        shares = f"{self.validation_share} {self.test_share}"
        key = digest(_READING, shares, *(part for file in files for part in (file.name, file.read_bytes())))
        return store.directory(data_dir, self.name, key[:16])

    def _read(self, files: list[Path]) -> store.Corpus:
        scores = [score for file in files if (score := chorale_scores.read(file)) is not None]
        if not scores:
            raise ValueError(f"{self.name}: none of {len(files)} files is in four parts")
        pieces: dict[str, np.ndarray] = {}
        for score in scores:
            ids = chorale_tokens.encode(score)
            low, _ = chorale_tokens.room(ids)
            pieces.setdefault(" ".join(map(str, chorale_tokens.transposed(ids, low))), ids)
        keys = list(pieces)
        shares = {"validation": self.validation_share, "test": self.test_share}
        chosen = hash_split(keys, [""] * len(keys), shares)
        splits = {split: _ragged([pieces[keys[index]] for index in indices]) for split, indices in chosen.items()}
        where = f"{self.path}" if self.path else f"music21 {chorale_scores.version()}".strip()
        facts = {"source": f"{len(pieces)} chorales, {where}", "copies_left_out": len(scores) - len(pieces)}
        return store.Corpus(splits, chorale_tokens.VOCABULARY, ["document"], facts)

    def baseline(self, data: TaskData) -> dict[str, Any]:
        """The cross entropy of the shares of tokens in the training split; and of a guesser that expects each voice to
        stay where it was, as often as voices do so there, and else knows the shares.
        """
        assert isinstance(data, ChoraleData)
        asked = {split: _asked(data.examples(split)) for split in ("train", *baseline.SPLITS)}
        shares = np.exp(self.family.guess(asked["train"][0], data.vocab_size).astype(np.float64))
        stays = (asked["train"][0] == asked["train"][1]).mean()
        scores, held = {}, {}
        for split in baseline.SPLITS:
            tokens, before = asked[split]
            chance = shares[tokens] * np.where(before >= 0, 1 - stays, 1) + stays * (tokens == before)
            best = np.where(before >= 0, before, shares.argmax())
            scores[split] = _scores(shares[tokens], tokens == shares.argmax())
            held[split] = _scores(chance, tokens == best)
        other = {"title": "holds", "name": "expects each voice to hold its pitch", "scores": held}
        return {"name": self.family.guesser, "scores": scores, "others": [other]}


class ChoraleData(LanguageData):
    """Pieces as rows; those of training in other keys in every epoch."""

    def __init__(self, task: Chorales, corpus: store.Corpus) -> None:
        super().__init__(task, corpus)
        self._transpose = task.transpose
        self.info["copies_left_out"] = corpus.facts.get("copies_left_out", 0)

    @property
    def token_bytes(self) -> np.ndarray:
        return np.zeros(self.vocabulary.size, np.int64)

    def _reader(self, split: str, batch_size: int, seed: int) -> pipeline.Read:
        read = super()._reader(split, batch_size, seed)
        if split != "train" or not self._transpose:
            return read

        def transposed(rows: np.ndarray, epochs: np.ndarray) -> dict[str, np.ndarray]:
            batch = read(rows, epochs)
            for place, key in enumerate(zip(rows.tolist(), epochs.tolist(), strict=True)):
                low, high = chorale_tokens.room(batch["inputs"][place])
                low, high = max(low, -self._transpose), min(high, self._transpose)
                # Only `random` of a generator is promised to give the same numbers for ever.
                draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *key]))).random()
                semitones = low + int(draw * (high - low + 1))
                for name in ("inputs", "targets"):
                    batch[name][place] = chorale_tokens.transposed(batch[name][place], semitones)
            return batch

        return transposed


def _ragged(pieces: list[np.ndarray]) -> Ragged:
    return Ragged.from_lists(pieces, [0] * len(pieces), store.token_dtype(chorale_tokens.VOCABULARY))


def _asked(pieces: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """All that is asked, int64 [tokens], and what the same voice had a sixteenth before, -1 where there is none."""
    tokens, before = [], []
    for index in range(len(pieces)):
        piece = np.append(pieces[index].astype(np.int64), EDGE)
        tokens.append(piece)
        before.append(np.concatenate([np.full(VOICES, -1), piece[:-VOICES]])[: piece.size])
    return np.concatenate(tokens), np.concatenate(before)


def _scores(chance: np.ndarray, right: np.ndarray) -> dict[str, float]:
    loss = float(-np.log(chance).mean())
    return {"loss": round(loss, 6), "accuracy": round(float(right.mean()), 6), "perplexity": round(math.exp(loss), 6)}
