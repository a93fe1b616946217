"""What tasks from one text to another share: rows of pairs, label smoothing, and what is generated for a split."""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer.generate import generate
from xformer.tasks import baseline, checks, store
from xformer.tasks.dataset import Preprocessing, TaskData
from xformer.tasks.location import Progress
from xformer.tasks.outputs import Outputs, Scores
from xformer.tasks.packing import EDGE
from xformer.tasks.pair_data import PairData
from xformer.tasks.sizes import Sizes
from xformer.tasks.target_tokens import TargetTokens
from xformer.tasks.text import Source, TextTask
from xformer.tasks.vocab import TextVocabulary

logger = logging.getLogger(__name__)

BATCH = 32  # sources that are generated from at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceToSequence(TextTask):
    """A target for each source; both are texts of one vocabulary, learnt from the sources and targets of training.

    A model reads a source, of at most `max_len` tokens, and the target before each token that it is to tell: the id 0
    and its tokens; after the last, 0 is to be told. In training pairs share rows (`packing`) without seeing each other;
    in validation and test a row is a pair. Of the test split, what a trained model generates is kept beside the
    references and judged.

    target_max_len: tokens of a target, its end included; None: `max_len`.
    packing: False: a row for each pair, and no segments, which some attention refuses.
    label_smoothing: share of the probability that the training loss spreads over all tokens.
    num_beams, length_penalty: of beam search on the test split; with 1 beam the likeliest token is taken each time.
    num_validation, num_test: pairs that are kept of those splits, evenly spread; None: all of them.
    """

    max_len: int = 128
    vocab: TextVocabulary = "subword"
    target_max_len: int | None = None
    packing: bool = True
    label_smoothing: float = 0.0
    num_beams: int = 4
    length_penalty: float = 0.6
    num_validation: int | None = None
    num_test: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cut != "head":
            raise ValueError(
                f"{self.name}: cut must be 'head', as a target is told from its beginning, got {self.cut!r}"
            )
        if self.vocab == "tokenizer":
            raise ValueError(f"{self.name}: vocab must be 'bytes' or 'subword': 0 is the end of a target here")
        for key in ("target_max_len", "num_validation", "num_test", "num_beams"):
            if getattr(self, key) is not None:
                checks.whole(self.name, key, getattr(self, key), at_least=1)
        if not isinstance(self.packing, bool):
            raise ValueError(f"{self.name}: packing must be True or False, got {self.packing!r}")
        for key, most in (("label_smoothing", 1.0), ("length_penalty", np.inf)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < most:
                limit = " and below 1" if most == 1 else ""
                raise ValueError(f"{self.name}: {key} must be a number of at least 0{limit}, got {value!r}")

    @abc.abstractmethod
    def score(self, predictions: Sequence[str], references: Sequence[str]) -> Scores:
        """What generated texts score against the references."""

    @property
    def generates(self) -> bool:
        return True

    @property
    def family(self) -> TargetTokens:
        return TargetTokens(self.label_smoothing)

    @property
    def longest_target(self) -> int:
        """Tokens of a target as the decoder reads it."""
        return self.max_len if self.target_max_len is None else self.target_max_len

    def expected_sizes(self) -> Sizes:
        sizes = super().expected_sizes()
        assumed = ("vocab_size", "num_classes") if "vocab_size" in sizes.assumed else ()
        return Sizes(self._sizes(sizes["vocab_size"], self.max_len), assumed)

    def sizes(self, preprocessing: Preprocessing | None = None) -> Sizes:
        """`vocab_size` and `target_vocab_size`, that of the vocabulary with the id 0, as many `num_classes`, `max_len`
        and `target_max_len`.
        """
        if preprocessing is None:
            return self.expected_sizes()
        return Sizes(self._sizes(preprocessing.vocabulary.size, preprocessing.max_len))

    def _sizes(self, size: int, max_len: int) -> dict[str, int]:
        ids = dict.fromkeys(("vocab_size", "num_classes", "target_vocab_size"), size)
        return {**ids, "max_len": max_len, "target_max_len": self.longest_target}

    def example_batch(self, batch_size: int, preprocessing: Preprocessing | None = None) -> dict[str, Any]:
        """A batch, shapes and dtypes instead of arrays: what `PairRows.read` gives, and `weights` float32 [batch]."""
        tokens = jax.ShapeDtypeStruct((batch_size, self.max_len), jnp.int32)
        targets = jax.ShapeDtypeStruct((batch_size, self.longest_target), jnp.int32)
        batch = {"inputs": tokens, "segment_ids": tokens, "targets": targets}
        batch |= {"decoder_inputs": targets, "decoder_segment_ids": targets}
        return batch | {"weights": jax.ShapeDtypeStruct((batch_size,), jnp.float32)}

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """`inputs`, `decoder_inputs` and their masks, and the segments of both, None where nothing is packed."""
        segments = {name: batch[name] if self.packing else None for name in ("segment_ids", "decoder_segment_ids")}
        return {
            "inputs": batch["inputs"],
            "mask": batch["segment_ids"] > 0,
            "decoder_inputs": batch["decoder_inputs"],
            "decoder_mask": batch["decoder_segment_ids"] > 0,
            **segments,
        }

    def outputs(self, model: Any, data: TaskData, split: str, progress: Progress = None) -> Outputs:
        """What the model generates for the sources of a split, at most 50 tokens more than the longest of each batch
        (Vaswani et al. 2017, section 6.1), and what that scores against the whole targets.
        """
        assert isinstance(data, PairData)
        spell = data.vocabulary.decode
        pairs = list(data.pairs(split))
        lengths = np.array([min(len(source), self.max_len) for source, _ in pairs])
        texts = [""] * len(pairs)
        order = np.argsort(-lengths, kind="stable")
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            if progress is not None and start:
                progress(f"{start:,} of {len(order):,} texts generated")
            rows = np.concatenate([some, np.repeat(some[-1:], BATCH - len(some))])  # one shape
            tokens = np.zeros((BATCH, lengths[rows].max()), np.int32)
            for row, index in zip(tokens, rows, strict=True):
                row[: lengths[index]] = pairs[index][0][: self.max_len]
            found = generate(
                model,
                tokens,
                lengths[rows],
                max_tokens=min(self.longest_target, int(lengths[rows].max()) + 50),
                num_beams=self.num_beams,
                length_penalty=self.length_penalty,
                end_id=EDGE,
            )
            for index, row in zip(some, np.asarray(found), strict=False):
                texts[index] = spell(row)
        if texts and not any(texts):
            logger.warning(f"{self.name}: each of the {len(texts):,} texts generated for {split} is empty")
        sources, references = [spell(source) for source, _ in pairs], [spell(target) for _, target in pairs]
        return Outputs(split, sources, references, texts, self.score(texts, references))

    def baseline(self, data: TaskData) -> dict[str, Any]:
        """The cross entropy of the shares of tokens in the training targets, one more of each than there is."""
        assert isinstance(data, PairData)
        guess = self.family.guess(data.labels("train"), data.vocab_size).astype(np.float64)
        scores = {}
        for split in baseline.SPLITS:
            asked = data.labels(split)
            loss = -guess[asked].mean()
            found = {"perplexity": np.exp(loss), "loss": loss, "accuracy": (asked == guess.argmax()).mean()}
            scores[split] = {name: round(float(value), 6) for name, value in found.items()}
        return {"name": self.family.guesser, "scores": scores}

    def _open(self, data_dir: str | Path | None, source: Source) -> PairData:
        return PairData(self, store.read(self._directory(data_dir, source)))
