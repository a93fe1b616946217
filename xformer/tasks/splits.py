"""Train, validation and test by a hash of the text: the same in every process, whatever the order of the examples."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence


def hash_split(texts: Sequence[str], labels: Sequence[str], shares: Mapping[str, float]) -> dict[str, list[int]]:
    """Indices of the examples in each split of `shares` and in `train`, which is the rest, in the order of their hash.

    Every class gives each split its share, rounded, and at least one text if it has enough. Copies of a text stay
    together, in the class of the first, so no text is in two splits; `normal` says what a copy is.
    """
    copies: dict[str, list[int]] = defaultdict(list)
    for index, text in enumerate(texts):
        copies[normal(text)].append(index)
    classes: dict[str, list[tuple[bytes, list[int]]]] = defaultdict(list)
    for indices in copies.values():
        classes[labels[indices[0]]].append((min(_digest(texts[index]) for index in indices), indices))

    ranked: dict[str, list[tuple[bytes, list[int]]]] = {"train": [], **{split: [] for split in shares}}
    for groups in classes.values():
        groups.sort()
        start = 0
        for split, share in shares.items():
            left_for_others = len(groups) - start - 1
            stop = start + min(max(round(share * len(groups)), 1), left_for_others)
            ranked[split] += groups[start:stop]
            start = stop
        ranked["train"] += groups[start:]
    return {split: [index for _, indices in sorted(groups) for index in indices] for split, groups in ranked.items()}


def normal(text: str) -> str:
    """What copies of a text have in common: it without white space at its ends, any other as one space."""
    return " ".join(text.split())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()
