"""Masked language modelling on the texts of any other task: some tokens are hidden, and the model names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.checks import ArgumentError
from xformer.tasks import baseline, checks, pipeline
from xformer.tasks.dataset import Preprocessing, TaskData
from xformer.tasks.family import Family
from xformer.tasks.interface import Task
from xformer.tasks.location import Progress
from xformer.tasks.masked_tokens import MaskedTokens
from xformer.tasks.origin import Origin
from xformer.tasks.ragged import Ragged
from xformer.tasks.sizes import Sizes
from xformer.tasks.store import Corpus
from xformer.tasks.token_classification import NO_LABEL

MASKED, RANDOM = 0.8, 0.1  # shares of the hidden tokens; the others stand as they are
_FIXED, _DRAWN = 0, 1  # kinds of draws, so that none is another's
_BATCH = 256


@dataclasses.dataclass(frozen=True)
class MaskedLM(Task):
    """Hidden tokens of texts, as in BERT (Devlin et al. 2019, section 3.1 and appendix A.1).

    Of a text of n tokens, cut at `max_len`, `mask_share` x n are hidden, rounded, but at least one. 80 % of them are
    replaced by the id of the mask, `vocab_size - 1`, 10 % by a random token, and 10 % stand as they are; padding is
    never hidden. In training they are drawn anew in every epoch, by the seed of the run, the epoch and the example
    alone; in the other splits they are the same for ever.

    The model reads `inputs`, `mask` and `places`, int32 [batch, places]: where its logits are wanted. The number of
    places is that of a text of `max_len` tokens; what a shorter one has less are zeros without a target.

    source: the task whose texts these are; its labels are not read. Of pairs of texts each is an example. In a config a
    section like that of the task: `{"name": "masked_lm", "source": {"name": "imdb", "max_len": 512}}`.

    Raises ValueError for what is no task, texts read by a tokenizer from outside, or a share out of range.
    """

    name: ClassVar[str] = "masked_lm"

    source: Task
    mask_share: float = 0.15

    def __post_init__(self) -> None:
        if not isinstance(self.source, Task) or isinstance(self.source, MaskedLM):
            raise ValueError(f"{self.name}: source must be a task with texts of its own, got {self.source!r}")
        if getattr(self.source, "vocab", None) == "tokenizer":
            raise ArgumentError(
                "source.vocab",
                f"{self.name}: source.vocab must be 'bytes' or 'subword', got 'tokenizer': how many characters its "
                "tokens stand for is not known",
            )
        checks.shares(self.name, mask_share=self.mask_share)

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        return (Origin("the texts of any other task", "that of the texts", given={"source.name": "TASK"}),)

    @property
    def family(self) -> Family:
        return MaskedTokens()

    @property
    def length(self) -> int:
        return self.source.length

    @property
    def num_places(self) -> int:
        """Places of an example in a batch: those of the longest text."""
        return self.num_hidden(self.length)

    def num_hidden(self, length: int) -> int:
        """Hidden tokens of a text of so many."""
        return max(round(self.mask_share * length), 1) if length else 0

    def prepare(self, data_dir: str | Path | None = None, *, progress: Progress = None) -> None:
        self.source.prepare(data_dir, progress=progress)

    def folder(self, data_dir: str | Path | None = None) -> Path | None:
        return self.source.folder(data_dir)

    def open(self, data_dir: str | Path | None = None) -> MaskedData:
        return MaskedData(self, self.source.open(data_dir))

    def sizes(self, preprocessing: Preprocessing | None = None) -> Sizes:
        """As any task's: `vocab_size` counts the id of the mask, `num_classes` is without it."""
        sizes = self.source.sizes(preprocessing)
        tokens = sizes["vocab_size"]
        assumed = ("vocab_size", "num_classes") if "vocab_size" in sizes.assumed else ()
        return Sizes({**sizes, "vocab_size": tokens + 1, "num_classes": tokens}, assumed)

    def example_batch(self, batch_size: int, preprocessing: Preprocessing | None = None) -> dict[str, Any]:
        """A batch, shapes and dtypes instead of arrays: `inputs` int32 [batch, length] with hidden tokens, `places` and
        `targets` int32 [batch, places], `characters` and `weights` float32 [batch].
        """
        places = self.family.targets(batch_size, self.num_places, 0)
        number = jax.ShapeDtypeStruct((batch_size,), jnp.float32)
        inputs = jax.ShapeDtypeStruct((batch_size, self.length), jnp.int32)
        return {"inputs": inputs, "places": places, "targets": places, "characters": number, "weights": number}

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return super().inputs(batch) | {"places": batch["places"]}

    def baseline(self, data: TaskData) -> dict[str, Any]:
        """The cross entropy of the shares of tokens in the training split, one more of each than there is."""
        assert isinstance(data, MaskedData)
        guess = self.family.guess(data.labels("train"), data.num_classes).astype(np.float64)
        scores = {}
        for split in baseline.SPLITS:
            totals: dict[str, Any] = {}
            for batch in data.batches(split, _BATCH, seed=0, shuffle=False, epochs=1):
                hidden = batch["targets"] != NO_LABEL
                targets, weights = batch["targets"][hidden], np.ones(hidden.sum())
                read = [(batch["inputs"] > 0).sum(), batch["characters"].sum()]
                found = {"loss": -guess[targets], "accuracy": targets == guess.argmax()}
                entries = {name: (values, weights) for name, values in found.items()} | {"read": read}
                totals = {name: baseline.add(totals.get(name), entry) for name, entry in entries.items()}
            scores[split] = {name: round(value, 6) for name, value in self.finish(totals).items()}
        return {"name": self.family.guesser, "scores": scores}


class MaskedData(TaskData):
    """The texts of another task, with hidden tokens.

    Args:
      task: says how many.
      data: the opened data of its source.
    """

    def __init__(self, task: MaskedLM, data: TaskData) -> None:
        facts: dict[str, Any] = {
            key: data.info[key] for key in ("source", "data_version", "near_duplicates") if key in data.info
        }
        splits = {split: _texts(data.examples(split)) for split in data.splits}
        super().__init__(Corpus(splits, data.vocabulary, [], facts), data.max_len, task.family, data.preprocess.cut)
        self.sizes = task.sizes(self.preprocess)
        self.vocab_size, self.num_classes = self.sizes["vocab_size"], self.sizes["num_classes"]
        self.info |= {"vocab_size": self.vocab_size, "num_classes": self.num_classes, "mask_share": task.mask_share}
        self.labels_are_sequences = True
        self._task, self._characters = task, data.vocabulary.characters

    def labels(self, split: str) -> np.ndarray:
        """All tokens of a split, those of texts that are cut too."""
        return self.examples(split).tokens

    def _change(self, split: str, seed: int) -> pipeline.Change:
        """Whole texts become `inputs` with hidden tokens, `places`, `targets`, `characters` and `weights`."""

        def change(batch: dict[str, np.ndarray], indices: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
            keys = np.stack([np.full_like(indices, seed), epoch, indices], axis=1)
            draws = (_DRAWN, keys) if split == "train" else (_FIXED, indices[:, None])
            characters = self._characters[batch["inputs"]].sum(axis=1).astype(np.float32)
            return {**self._hide(batch["inputs"], *draws), "characters": characters, "weights": batch["weights"]}

        return change

    def _hide(self, inputs: np.ndarray, kind: int, keys: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of whole texts, int32 [rows, length], hidden by the draws of a key for each row, int [rows, n]."""
        inputs = inputs.copy()
        places = np.zeros((len(inputs), self._task.num_hidden(inputs.shape[1])), np.int32)
        targets = np.full_like(places, NO_LABEL)
        for row, key in enumerate(keys.tolist()):
            length = int(np.count_nonzero(inputs[row]))
            count = self._task.num_hidden(length)
            # Only `random.random` is used: NumPy promises its values for ever, and those of other methods not.
            random = np.random.Generator(np.random.Philox(np.random.SeedSequence([kind, *key])))
            chosen = np.sort(np.argsort(random.random(length), kind="stable")[:count])
            fate, others = random.random(count), 1 + (random.random(count) * (self.num_classes - 1)).astype(np.int32)
            places[row, :count], targets[row, :count] = chosen, inputs[row, chosen]
            replaced = np.where(fate < MASKED + RANDOM, others, inputs[row, chosen])
            inputs[row, chosen] = np.where(fate < MASKED, self.num_classes, replaced)
        return {"inputs": inputs, "places": places, "targets": targets}


def _texts(examples: Ragged) -> Ragged:
    """The texts of examples, without labels; of pairs of texts first the first ones, then the second."""
    tokens, offsets = examples.tokens, examples.offsets
    if examples.tokens2 is not None and examples.offsets2 is not None:
        tokens = np.concatenate([tokens, examples.tokens2])
        offsets = np.concatenate([offsets, offsets[-1] + examples.offsets2[1:]])
    return Ragged(tokens, offsets, np.zeros((offsets.size - 1, 0), bool))
