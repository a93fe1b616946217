"""Pairs of texts from files and pages: which are kept, and in which part they are."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from xformer.tasks.splits import hash_split, normal
from xformer.tasks.text import Texts

logger = logging.getLogger(__name__)

SHARED = 0.8  # of the different words of both sides: from there on a target says again what its source says
RATIO = 3.0  # a side so many times as long as the other is no translation of it
SHORT = 40  # characters of the longer side, up to which that is not asked
_REASONS = {
    "copies_left_out": "whose target is its source again or nearly so",
    "repeated_left_out": "that stand there already",
    "unequal_left_out": "of which one side is many times as long as the other",
}
_WORD = re.compile(r"\w+")


class Pair(NamedTuple):
    """A source and its target; `group` names the page or file, whose pairs are all in one part of the data."""

    source: str
    target: str
    group: str = ""


def is_copy(source: str, target: str) -> bool:
    """Whether a target is its source again, but for case, marks and digits, or nearly so: nothing was translated."""
    words = [set(_WORD.findall(re.sub(r"\d", "", text).casefold())) for text in (source, target)]
    either, both = len(words[0] | words[1]), len(words[0] & words[1])
    return both >= SHARED * either


def tells(text: str, target: str) -> bool:
    """Whether a text holds a target word for word, but for case, marks and white space: it would tell the answer."""
    words = [" ".join(_WORD.findall(part.casefold())) for part in (text, target)]
    return f" {words[1]} " in f" {words[0]} "


def cleaned(
    pairs: Iterable[Pair], counts: dict[str, int], ratio: float | None = RATIO, keep_copies: bool = False
) -> list[Pair]:
    """Distinct pairs whose target is not its source again, in their order.

    Args:
      counts: gets how many were left out, by the reason.
      ratio: a pair of which one side is more than so many times as long as the other is left out; None: whatever they
        are.
      keep_copies: pairs whose target is its source again, or nearly so, stay; `counts` gets their number too.

    Raises:
      ValueError: there are pairs, and all are left out.
    """
    found: dict[tuple[str, str], Pair] = {}
    copies = "copies_kept" if keep_copies else "copies_left_out"
    counts |= dict.fromkeys((copies, "repeated_left_out"), 0)
    if ratio is not None:
        counts["unequal_left_out"] = 0
    for pair in pairs:
        lengths = sorted((len(pair.source), len(pair.target)))
        key = normal(pair.source).casefold(), normal(pair.target).casefold()
        if (copy := is_copy(pair.source, pair.target)) and not keep_copies:
            counts[copies] += 1
        elif ratio is not None and lengths[1] > SHORT and lengths[1] > ratio * lengths[0]:
            counts["unequal_left_out"] += 1
        elif key in found:
            counts["repeated_left_out"] += 1
        else:
            found[key] = pair
            counts[copies] += copy
    if left := {why: count for why, count in counts.items() if why in _REASONS and count}:
        spelt = ", ".join(f"{count:,} {_REASONS[why]}" for why, count in left.items())
        if not found:
            raise ValueError(f"path: all pairs were left out: {spelt}")
        logger.info("%s pairs are kept; left out: %s", f"{len(found):,}", spelt)
    return list(found.values())


def options(keep_copies: bool) -> list[str]:
    """What decides the pairs besides their files, for a digest: nothing by default, as data made before has nothing."""
    return ["keep_copies"] if keep_copies else []


def by_group(pairs: Sequence[Pair], shares: Mapping[str, float], counts: dict[str, int]) -> dict[str, list[Pair]]:
    """The pairs by part, whole groups together by a hash of their names.

    No text is in two parts: of training and validation what stands in a later part too, on its side, is left out, and
    counted.
    """
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.group, []).append(pair)
    names = list(groups)
    parts = hash_split(names, [""] * len(names), shares)
    split = {part: [pair for index in chosen for pair in groups[names[index]]] for part, chosen in parts.items()}
    counts["in_other_parts_left_out"] = 0
    seen: tuple[set[str], set[str]] = (set(), set())
    for part in reversed(list(split)):  # test first, training last
        texts = [(normal(pair.source).casefold(), normal(pair.target).casefold()) for pair in split[part]]
        kept = [
            pair for pair, (one, two) in zip(split[part], texts, strict=True) if not (one in seen[0] or two in seen[1])
        ]
        counts["in_other_parts_left_out"] += len(split[part]) - len(kept)
        split[part] = kept
        for one, two in texts:
            seen[0].add(one)
            seen[1].add(two)
    return split


def grouped(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs, those in one group that share a source or a target, or are linked by others that do."""
    first: dict[tuple[int, str], int] = {}
    above = list(range(len(pairs)))

    def root(index: int) -> int:
        while above[index] != index:
            above[index] = above[above[index]]
            index = above[index]
        return index

    for index, pair in enumerate(pairs):
        for side, text in enumerate((pair.source, pair.target)):
            other = first.setdefault((side, normal(text).casefold()), index)
            above[root(index)] = root(other)
    return [pair._replace(group=normal(pairs[root(index)].source)) for index, pair in enumerate(pairs)]


def as_texts(split: Mapping[str, Sequence[Pair]], facts: Mapping[str, object]) -> Texts:
    """The parts as texts and second texts, without labels. ValueError for a part without a pair."""
    for part, pairs in split.items():
        if not pairs:
            kept, groups = len(split["train"]), len({pair.group for pair in split["train"]})
            why = f" in {groups} group{'s' * (groups != 1)}, each for one part alone," if groups < kept else ""
            raise ValueError(f"path: {kept} pairs{why} are too few to cut off {part}")
    order = ("train", "validation", "test")
    first = {part: ([pair.source for pair in split[part]], [0] * len(split[part])) for part in order}
    return Texts(first, ["pair"], dict(facts), {part: [pair.target for pair in split[part]] for part in order})
