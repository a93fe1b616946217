"""What summaries score that need no model: the beginning of a text, and the summary of the most similar one."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from xformer import extras
from xformer.tasks import baseline
from xformer.tasks.pair_data import PairData
from xformer.tasks.summary_scores import scores

text = extras.Lazy("sklearn.feature_extraction.text")

logger = logging.getLogger(__name__)

SENTENCES = (1, 2, 3)
_END = re.compile(r"(?<=[.!?])\s+")


def others(data: PairData) -> list[dict[str, Any]]:
    """Each method with `title`, `name` (what it does) and `scores` (split -> metric -> value), on what models read of
    the sources, against whole references.

    `lead`: the first sentences of a text, as many of 1 to 3 as score the best rougeL on validation. `nearest`: the
    target of the training text with the largest cosine of TF-IDF weights, as `bag_of_words` has them.

    Where a package is missing there are no scores but `missing`, the line that says how to get it.
    """
    texts = {split: _texts(data, split) for split in ("train", *baseline.SPLITS)}
    found = []
    for title, does, method in (
        ("lead", "begins as the text does", _lead),
        ("nearest", "copies the nearest", _nearest),
    ):
        try:
            found.append(method(texts))
        except extras.MissingExtra as error:
            logger.warning("no baseline %s: %s", title, error)
            found.append({"title": title, "name": does, "scores": {}, "missing": str(error)})
    return found


Pairs = tuple[list[str], list[str]]
"""Sources and targets."""


def _texts(data: PairData, split: str) -> Pairs:
    spell = data.vocabulary.decode
    pairs = [(spell(source[: data.max_len]), spell(target)) for source, target in data.pairs(split)]
    return [source for source, _ in pairs], [target for _, target in pairs]


def _lead(texts: dict[str, Pairs]) -> dict[str, Any]:
    tried = [
        {
            split: _judged([lead(source, count) for source in texts[split][0]], texts[split][1])
            for split in baseline.SPLITS
        }
        for count in SENTENCES
    ]
    best = max(range(len(SENTENCES)), key=lambda index: tried[index]["validation"]["rougeL"])
    count = SENTENCES[best]
    first = "sentence of a text" if count == 1 else f"{count} sentences of a text"
    return {"title": "lead", "name": f"answers with the first {first}", "scores": tried[best]}


def _nearest(texts: dict[str, Pairs]) -> dict[str, Any]:
    known, targets = texts["train"]
    found = {
        split: _judged([targets[index] for index in nearest(known, texts[split][0])], texts[split][1])
        for split in baseline.SPLITS
    }
    name = "answers with the target of the most similar training text (TF-IDF)"
    return {"title": "nearest", "name": name, "scores": found}


def _judged(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in scores(predictions, references).metrics.items()}


def lead(source: str, sentences: int) -> str:
    """The first sentences of a text: what ends on `.`, `!` or `?` before white space."""
    return " ".join(_END.split(source.strip(), maxsplit=sentences)[:sentences])


def nearest(known: Sequence[str], asked: Sequence[str]) -> list[int]:
    """For each text that is asked for the index of the most similar known one, the first of equals."""
    vectorizer = text.TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    try:
        rows = vectorizer.fit_transform(known)
    except ValueError:  # no word in any of them
        return [0] * len(asked)
    similar = vectorizer.transform(asked) @ rows.T
    return [int(row.toarray().argmax()) for row in similar]
