"""Multi-query associative recall: key-value pairs come first, each key once more later; what was its value?

Arora et al. 2024 ("Zoology", arXiv:2312.04927), section 4 and figure 2. Half of the symbols are keys, half are
values. An example begins with `num_pairs` pairs, keys all different and values all different. Each key comes once more
later; at that place, and nowhere else, there is a label: the key's value. Where nothing was put stands a filler, or any
symbol.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import baseline, checks, family
from xformer.tasks.dataset import TaskData
from xformer.tasks.family import Family, Metric
from xformer.tasks.generated import Symbolic
from xformer.tasks.token_classification import NO_LABEL, TokenClassification

FILLER = "."


@dataclasses.dataclass(frozen=True)
class Preset:
    """Length in tokens, pairs and symbols of a setting, and how many examples it is learnt from."""

    length: int
    num_pairs: int
    num_symbols: int
    num_train: int


PresetName = Literal[
    "recall_64", "recall_128", "recall_256", "recall_512",
    "recall_1k", "recall_2k", "recall_4k",
    "recall_64_small", "recall_128_small", "recall_256_small",
    "recall_128_4_pairs", "recall_256_4_pairs",
]  # fmt: skip
PRESETS: Mapping[PresetName, Preset] = MappingProxyType(
    {
        # The four settings of figure 2.
        "recall_64": Preset(64, 4, 8_192, 100_000),
        "recall_128": Preset(128, 8, 8_192, 100_000),
        "recall_256": Preset(256, 16, 8_192, 100_000),
        "recall_512": Preset(512, 64, 8_192, 100_000),
        # Extensions to lengths that were not published.
        "recall_1k": Preset(1_024, 64, 8_192, 100_000),
        "recall_2k": Preset(2_048, 128, 8_192, 100_000),
        "recall_4k": Preset(4_096, 256, 8_192, 100_000),
        # Few enough symbols to be learnt on a CPU.
        "recall_64_small": Preset(64, 4, 64, 20_000),
        "recall_128_small": Preset(128, 8, 128, 20_000),
        "recall_256_small": Preset(256, 16, 256, 20_000),
        # Nothing but the length differs from recall_64_small.
        "recall_128_4_pairs": Preset(128, 4, 64, 20_000),
        "recall_256_4_pairs": Preset(256, 4, 64, 20_000),
    }
)


@dataclasses.dataclass(frozen=True)
class Recall(Symbolic):
    """Recall by preset; `num_train` is the preset's unless it is given.

    Symbols: the filler, then keys and values. Of 8,192 there are 4,095 keys and 4,096 values. Pair i stands at places
    2 i and 2 i + 1, counted from 0; its key comes again at place 2 num_pairs + 2 g[i]. The gaps g are drawn without
    replacement from 0 to (length - 2 num_pairs) / 2 - 1, with probabilities proportional to (g + 1) ** (alpha - 1):
    most keys come again soon. A label is the number of the value. The model reads `inputs`, `mask` and `places`, int32
    [batch, num_pairs]: a token classifier computes logits where there is a label, and nowhere else.

    The baseline answers one of the example's values: it is right once in `num_pairs` labels.

    Args:
      alpha: 0.01 in figure 2.
      noise: what stands at the other places: "filler", one symbol for all, or "random" keys and values.

    Raises ValueError for a preset or noise that doesn't exist, or an alpha that is no number above 0.
    """

    name: ClassVar[str] = "recall"

    preset: PresetName = "recall_64"
    alpha: float = 0.01
    noise: Literal["filler", "random"] = "filler"
    num_validation: int | None = dataclasses.field(default=3_000, kw_only=True)
    num_test: int | None = dataclasses.field(default=3_000, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice(self.name, "preset", self.preset, PRESETS)
        checks.choice(self.name, "noise", self.noise, ("filler", "random"))
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 < self.alpha < math.inf:
            raise ValueError(f"{self.name}: alpha must be a number above 0, got {self.alpha!r}")

    @property
    def family(self) -> Family:
        return TokenClassification()

    @classmethod
    def presets(cls) -> tuple[Mapping[str, Any], ...]:
        return tuple({"preset": name} for name in PRESETS)

    @property
    def length(self) -> int:
        return PRESETS[self.preset].length

    @property
    def usual_sizes(self) -> dict[str, int]:
        return {"train": PRESETS[self.preset].num_train}

    @property
    def options(self) -> dict[str, int | float | str]:
        return {"preset": self.preset, "alpha": self.alpha, "noise": self.noise}

    @property
    def symbols(self) -> tuple[str, ...]:
        return (FILLER, *(f"k{index}" for index in range(1, self._half)), *self.class_names)

    @property
    def class_names(self) -> list[str]:
        return [f"v{index}" for index in range(1, self._half + 1)]

    @property
    def _half(self) -> int:
        return PRESETS[self.preset].num_symbols // 2

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return super().inputs(batch) | {"places": self._places(batch["targets"])}

    def metrics(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """The metrics of outputs at the labelled places, float [batch, num_pairs, values], or at all places."""
        if outputs.shape[1] == self.length:
            return super().metrics(outputs, batch)
        targets = jnp.take_along_axis(batch["targets"], self._places(batch["targets"]), axis=1)
        return super().metrics(outputs, {**batch, "targets": targets})

    def _places(self, targets: Any) -> jax.Array:
        """The places with a label, in their order, int32 [batch, num_pairs]; those of a filler mean nothing."""
        first = jnp.argsort(targets == NO_LABEL, axis=1, stable=True)
        return first[:, : PRESETS[self.preset].num_pairs].astype(jnp.int32)

    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        pairs, half = PRESETS[self.preset].num_pairs, self._half
        first_key, first_value = 2, 1 + half  # ids; 1 is the filler
        ids = np.ones((count, self.length), np.int64)
        if self.noise == "random":
            ids = first_key + (random.random(ids.shape) * (2 * half - 1)).astype(np.int64)
        keys = _choose(random, count, half - 1, pairs)
        values = _choose(random, count, half, pairs)
        ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = first_key + keys, first_value + values
        weights = np.arange(1, (self.length - 2 * pairs) // 2 + 1) ** (self.alpha - 1)
        # Who comes first in a race of exponential times is drawn by weight, and so is who comes next.
        gaps = np.argsort(-np.log1p(-random.random((count, weights.size))) / weights, axis=1)[:, :pairs]
        rows, places = np.arange(count)[:, None], 2 * pairs + 2 * gaps
        ids[rows, places] = first_key + keys
        labels = np.full(ids.shape, NO_LABEL)
        labels[rows, places] = values
        return ids, labels

    def baseline(self, data: TaskData) -> dict[str, Any]:
        pairs = PRESETS[self.preset].num_pairs
        scores = {}
        for split in baseline.SPLITS:
            examples = data.examples(split)
            labels = np.asarray(examples.labels).reshape(len(examples), -1)
            told = labels[labels >= 0].reshape(len(examples), pairs)
            answers = np.broadcast_to(examples.tokens.reshape(labels.shape)[:, 1:2] - (1 + self._half), told.shape)
            by_class = lambda chosen: np.bincount(chosen, minlength=data.num_classes)
            hits = answers == told
            counts = np.array([by_class(told[hits]), by_class(answers[~hits]), by_class(told[~hits])])
            f1 = family.f1_scores(counts)[counts.sum(axis=0) > 0].mean()
            scores[split] = {"accuracy": float(hits.mean()), "macro_f1": float(f1), "loss": math.log(pairs)}
        return {"name": "knows the values of an example and not their keys, and answers the first", "scores": scores}


def _choose(random: np.random.Generator, count: int, size: int, number: int) -> np.ndarray:
    """`number` different whole numbers from 0 below `size`, in any order: int64 [count, number] (Fisher and Yates)."""
    left = np.tile(np.arange(size), (count, 1))
    draws = random.random((count, number))
    rows = np.arange(count)
    for index in range(number):
        other = index + (draws[:, index] * (size - index)).astype(np.int64)
        left[rows, other], left[rows, index] = left[rows, index], left[rows, other]
    return left[:, :number]
