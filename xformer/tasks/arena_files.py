"""The files of the Long Range Arena's release, where the user has them: ListOps and pairs of papers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xformer.tasks import listops_trees, vocab
from xformer.tasks.ragged import Ragged
from xformer.tasks.text import Texts

LISTOPS = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
PAPERS = {
    "train": "new_aan_pairs.train.tsv",
    "validation": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}


def is_release(folder: Path) -> bool:
    """Whether it is a folder that holds at least one of the files of pairs of papers."""
    return any((folder / name).is_file() for name in PAPERS.values())


def paths(folder: Path, names: dict[str, str]) -> dict[str, Path]:
    """The files by split. Raises ValueError where one is missing."""
    found = {split: folder / name for split, name in names.items()}
    missing = [path.name for path in found.values() if not path.is_file()]
    if missing:
        raise ValueError(f"path: {folder} has no {', '.join(missing)}; takes a folder with {', '.join(names.values())}")
    return found


def listops(files: dict[str, Path]) -> dict[str, Ragged]:
    """The splits of ListOps: after a line of headings, an expression and its value a line.

    Parentheses, which the arena's tokeniser drops too, are left out. Raises ValueError that names file and line.
    """
    symbols, splits = vocab.Symbols(listops_trees.SYMBOLS), {}
    for split, path in files.items():
        ids, labels = [], []
        for place, (source, value) in _rows(path, 2, headings=True):
            try:
                ids.append(symbols.encode(source.replace("(", " ").replace(")", " ")))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            labels.append(_label(place, value, 10))
        splits[split] = Ragged.from_lists(ids, labels, np.uint8)
    return splits


def papers(files: dict[str, Path]) -> Texts:
    """Pairs of papers: label, two names and two texts a line. Raises ValueError that names file and line."""
    splits, second = {}, {}
    for split, path in files.items():
        rows = [(_label(place, row[0], 2), row[3], row[4]) for place, row in _rows(path, 5)]
        splits[split] = ([first for _, first, _ in rows], [label for label, _, _ in rows])
        second[split] = [other for _, _, other in rows]
    return Texts(splits, ["no citation", "citation"], {}, second)


def _rows(path: Path, num_fields: int, *, headings: bool = False) -> Iterator[tuple[str, list[str]]]:
    """(file and line, fields) of each line; tabs only, quotes mean nothing here, as in the arena's own reader."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            fields = line.rstrip("\r\n").split("\t")
            if len(fields) != num_fields:
                raise ValueError(
                    f"{path} line {number}: has {len(fields)} fields, takes {num_fields} with tabs between"
                )
            if not (headings and number == 1):
                yield f"{path} line {number}", fields


def _label(place: str, text: str, num_classes: int) -> int:
    """A class from "3" or "3.0", as the release writes them."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value not in range(num_classes):
        raise ValueError(f"{place}: a label must be from 0 to {num_classes - 1}, got {text!r}")
    return int(value)
