"""ROUGE of summaries, by the package rouge-score, with intervals over the examples."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import numpy as np

from xformer import extras
from xformer.tasks.outputs import Scores

rouge_scorer = extras.Lazy("rouge_score.rouge_scorer")  # optional

NAMES = ("rouge1", "rouge2", "rougeL")
RESAMPLES = 2000


def by_example(predictions: Sequence[str], references: Sequence[str]) -> dict[str, np.ndarray]:
    """F1 of each prediction by `NAMES`, float64 [examples], from 0 to 1: of words, of pairs of words, and of the
    longest common subsequence of words (Lin 2004). Words are as the package has them by default: runs of ASCII letters
    and digits in lower case, not stemmed.

    Raises MissingExtra where rouge-score is not installed.
    """
    scorer = rouge_scorer.RougeScorer(list(NAMES))
    scored = [scorer.score(target, text) for target, text in zip(references, predictions, strict=True)]
    return {name: np.array([score[name].fmeasure for score in scored], np.float64) for name in NAMES}


def unread(texts: Sequence[str]) -> float:
    """Which share of the letters in texts the package does not read, as they are not ASCII; 0 where there are none."""
    letters = [char for text in texts for char in text if char.isalpha()]
    return sum(not char.isascii() for char in letters) / max(len(letters), 1)


def scores(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """The means of `by_example`; and as `intervals` that of 95 % of each, by the percentile bootstrap over examples:
    what other texts of the kind could have given, not what other seeds would. None for one text alone.
    """
    found = by_example(predictions, references)
    signature = f"rouge-score {importlib.metadata.version('rouge-score')}, F1, not stemmed"
    details = {"intervals": {name: interval(values) for name, values in found.items()}, "rouge": signature}
    return Scores({name: float(values.mean()) for name, values in found.items()}, details)


def interval(values: np.ndarray) -> list[float] | None:
    """The 95 % interval of a mean, [low, high] (Efron and Tibshirani 1993, section 13.3); None below 2 values."""
    if len(values) < 2:
        return None
    rng, count = np.random.default_rng(0), len(values)
    drawn = [values[rng.integers(0, count, count)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return [float(low), float(high)]
