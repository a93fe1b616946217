"""Sentences with a dependency tree, from CoNLL-U files (universaldependencies.org/format); errors name the line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from xformer.tasks import reading

Column = Literal["upos", "xpos", "deprel"]
COLUMNS = 10
_UNKNOWN = "_"


class Word(NamedTuple):
    """A syntactic word.

    Attributes:
      form: as it is written.
      upos, xpos, deprel: its universal and its own tag and its relation to the parent; "" where that is unknown.
      parent: index of the word that it depends on in its sentence, -1 at a root.
      space: whether one stands after it.
    """

    form: str
    upos: str
    xpos: str
    deprel: str
    parent: int
    space: bool


Sentence = list[Word]


def files(path: Path) -> list[Path]:
    """The file, or those of a folder at any depth whose names end in .conllu, in order; hidden ones are left aside.

    Raises ValueError where there is none.
    """
    if path.is_file():
        return [path]
    inside = sorted(path.rglob("*")) if path.is_dir() else []
    hidden = lambda file: any(part.startswith(".") for part in file.relative_to(path).parts)
    found = [file for file in inside if file.suffix.lower() == ".conllu" and file.is_file() and not hidden(file)]
    if not found:
        raise ValueError(f"path: got {str(path)!r}, takes a CoNLL-U file, or a folder with files *.conllu")
    return found


def read(path: Path) -> list[Sentence]:
    """The sentences of a file.

    Words are the syntactic ones: of a token that is several (`3-4`, such as "du" for "de le") its words are read, with
    spaces between; empty nodes (`5.1`) are left out, which no word of the basic tree depends on. A sentence may have
    several roots, each the root of a tree of its own.

    Raises:
      ValueError: a line without ten columns, ids out of order, tokens that share a word, a sentence without one, a head
        that is no word of the sentence, or words that depend on themselves; one line with the place.
    """
    return [_sentence(path, lines) for lines in _blocks(reading.decode(path))]


def text_of(sentence: Sentence) -> str:
    """The sentence as it is written."""
    return "".join(word.form + " " * word.space for word in sentence).strip()


def _blocks(text: str) -> Iterator[list[tuple[int, str]]]:
    """The numbered lines of each sentence, comments left out."""
    block: list[tuple[int, str]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if line.strip() and not line.startswith("#"):
            block.append((number, line))
        elif not line.strip() and block:
            yield block
            block = []
    if block:
        yield block


def _sentence(path: Path, lines: Sequence[tuple[int, str]]) -> Sentence:
    rows: list[tuple[str, list[str]]] = []  # of each word its place, for messages, and its columns
    range_end, range_space = 0, True
    for number, line in lines:
        place, columns = f"treebank: {path} line {number}", line.split("\t")
        if len(columns) != COLUMNS:
            raise ValueError(f"{place}: takes {COLUMNS} columns with a tab between, got {len(columns)}")
        own, spaced = columns[0], "SpaceAfter=No" not in columns[9].split("|")
        first, dash, last = own.partition("-")
        if dash and first == str(len(rows) + 1) and last.isdecimal() and int(last) > len(rows):
            if len(rows) < range_end:
                raise ValueError(
                    f"{place}: takes a token that begins after word {range_end}, the last of one, got {own!r}"
                )
            range_end, range_space = int(last), spaced
            continue
        if own.replace(".", "", 1).isdecimal() and own.partition(".")[0] == str(len(rows)) and "." in own:
            continue
        if own != str(len(rows) + 1):
            raise ValueError(f"{place}: takes the id {len(rows) + 1}, got {own!r}")
        if not columns[1].strip():
            raise ValueError(f"{place}: the word is empty")
        if len(rows) < range_end:
            spaced = range_space if len(rows) + 1 == range_end else True
        rows.append((place, [*columns[:9], "" if spaced else _UNKNOWN]))
    if range_end > len(rows):
        raise ValueError(
            f"treebank: {path} line {lines[-1][0]}: a token is of words up to {range_end}, got {len(rows)}"
        )
    if not rows:
        raise ValueError(f"treebank: {path} line {lines[0][0]}: the sentence has no word")
    words = [_word(place, columns, len(rows)) for place, columns in rows]
    _check_tree([place for place, _ in rows], [word.parent for word in words])
    return words


def _word(place: str, columns: Sequence[str], count: int) -> Word:
    known = lambda value: "" if value == _UNKNOWN else value
    head = columns[6]
    if not head.isdecimal() or int(head) > count:
        raise ValueError(f"{place}: the head must be 0 or the id of a word, 1 to {count}, got {head!r}")
    upos, xpos, deprel = (known(columns[index]) for index in (3, 4, 7))
    return Word(columns[1], upos, xpos, deprel, int(head) - 1, not columns[9])


def _check_tree(places: Sequence[str], parents: Sequence[int]) -> None:
    """Raises ValueError where a word is above itself."""
    safe: set[int] = set()
    for index in range(len(parents)):
        chain: dict[int, None] = {}  # in order
        here = index
        while here >= 0 and here not in safe:
            if here in chain:
                loop = " -> ".join(str(node + 1) for node in [*list(chain)[list(chain).index(here) :], here])
                raise ValueError(f"{places[here]}: the word depends on itself, by {loop}")
            chain[here] = None
            here = parents[here]
        safe.update(chain)
