"""What opened data is like: the numbers and examples that `xformer data --describe` shows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from xformer.tasks.dataset import TaskData
from xformer.tasks.family import Family

NUM_EXAMPLES = 10
MAX_SHOWN = 160  # characters of an example


def longer_than(data: TaskData, lengths: Sequence[int]) -> dict[str, list[float]]:
    """Which share of the texts of each split has more tokens than each length; of two texts the longer counts.

    Of what is stored, not cut: rows for a model may hold several texts, or parts of one.
    """
    found = {split: data.examples(split).lengths for split in data.splits}
    share = lambda longer: float(longer.mean()) if longer.size else math.nan
    return {split: [share(own > most) for most in lengths] for split, own in found.items()}


def repeated(data: TaskData) -> dict[str, int]:
    """How many examples of each split but `train` are, token for token, training examples."""
    known = set(_digests(data, "train"))
    return {split: sum(own in known for own in _digests(data, split)) for split in data.splits if split != "train"}


def _digests(data: TaskData, split: str) -> Iterator[bytes]:
    examples = data.examples(split)
    for index in range(len(examples)):
        total = hashlib.blake2b(examples[index].tobytes(), digest_size=16)
        if examples.tokens2 is not None and examples.offsets2 is not None:
            total.update(b"|" + examples.tokens2[examples.offsets2[index] : examples.offsets2[index + 1]].tobytes())
        yield total.digest()


def examples(family: Family, data: TaskData, split: str = "train", count: int = NUM_EXAMPLES) -> list[tuple[str, str]]:
    """(label, text) of some examples, evenly spaced in their split, decoded from their tokens and shortened.

    Of two texts both, with ` || ` between. What a terminal would take as a command is left out.
    """
    stored = data.examples(split)
    chosen = np.unique(np.linspace(0, len(stored) - 1, min(len(stored), count)).round().astype(int))
    found = []
    for index in chosen.tolist():
        texts = [stored[index]]
        if stored.tokens2 is not None and stored.offsets2 is not None:
            texts.append(stored.tokens2[stored.offsets2[index] : stored.offsets2[index + 1]])
        most = MAX_SHOWN // len(texts)
        decoded = [short(data.vocabulary.decode(text[: 4 * most]), most, cut=len(text) > 4 * most) for text in texts]
        found.append((short(family.spell(stored.label(index), data.class_names), 40), " || ".join(decoded)))
    return found


def short(text: str, most: int, *, cut: bool = False) -> str:
    """The beginning of a text in one line of printable characters; an ellipsis at its end where more follows."""
    line = " ".join("".join(mark if mark.isprintable() else " " for mark in text).split())
    return line if len(line) <= most and not cut else f"{line[: most - 1]}…"
