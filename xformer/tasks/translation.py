"""Translation: texts in one language from those in another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, get_args

from xformer.tasks import checks, parallel_files, parallel_packages, translation_scores
from xformer.tasks.location import data_root
from xformer.tasks.origin import Origin
from xformer.tasks.outputs import Scores
from xformer.tasks.sequence_to_sequence import SequenceToSequence
from xformer.tasks.text import Source

SourceName = Literal["manpages", "libreoffice", "files"]
Languages = Literal["en-de", "en-fr", "de-en", "fr-en"]
_LICENCE = "several free ones, as the packages say"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation(SequenceToSequence):
    """A translation of each text, judged by BLEU and chrF (`sacrebleu`).

    Left out, and counted in the data's info: targets that are nearly their sources, pairs that were there before, and
    pairs of which one side is more than three times as long as the other. No text is in two parts: a page is in one,
    and what stands on pages of two parts is in the later alone (validation after training, test after both).

    source: "manpages", paragraphs of manual pages, or "libreoffice", of the help of LibreOffice, from Debian packages
    that are extracted, not installed; "files", the user's own. With a `path` it is "files" unless another is given.

    languages: of those packages, from one to the other.

    path: of "files" a table, `.tsv`, `.csv` or `.jsonl`, with a `source_field` and a `target_field`; or, with a
    `target_path`, a file of sources, whose lines are translated by the lines of that. Else the folder that the packages
    are extracted into; "": the folder `translation` of the data directory.

    validation_path, test_path, validation_target_path, test_target_path: own files of those splits likewise, which are
    read as they are. A split without is cut off `path`, `validation_share` and `test_share` of its pairs by a hash,
    those that share a text together.
    """

    name: ClassVar[str] = "translation"

    source: SourceName | None = None
    languages: Languages = "en-de"
    path: str = ""
    target_path: str | None = None
    validation_path: str | None = None
    validation_target_path: str | None = None
    test_path: str | None = None
    test_target_path: str | None = None
    source_field: str = "source"
    target_field: str = "target"
    validation_share: float = 0.05
    test_share: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is not None:
            checks.choice(self.name, "source", self.source, get_args(SourceName))
        checks.choice(self.name, "languages", self.languages, get_args(Languages))
        checks.shares(self.name, validation_share=self.validation_share, test_share=self.test_share)
        for key in ("source_field", "target_field"):
            if not isinstance(getattr(self, key), str) or not getattr(self, key):
                raise ValueError(f"{self.name}: {key} must be a non-empty string, got {getattr(self, key)!r}")
        own = ("target_path", "validation_path", "validation_target_path", "test_path", "test_target_path")
        for key in own:
            value = getattr(self, key)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{self.name}: {key} must be a non-empty string, or None, got {value!r}")
            if value is not None and self.chosen != "files":
                raise ValueError(f"{self.name}: {key} is for one's own files, got {value!r}")
        if not isinstance(self.path, str):
            raise ValueError(f"{self.name}: path must be a string, got {self.path!r}")
        if self.chosen == "files" and not self.path:
            raise ValueError(f"{self.name}: source='files' needs a path, got ''")
        for split in ("validation", "test"):
            if getattr(self, f"{split}_target_path") is not None and getattr(self, f"{split}_path") is None:
                raise ValueError(f"{self.name}: {split}_target_path must be None where there is no {split}_path")

    @property
    def chosen(self) -> str:
        """The source, by its name."""
        return self.source or ("files" if self.path else "manpages")

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        found = []
        sizes = {
            ("manpages", "de"): "10,002 pairs", ("manpages", "fr"): "19,833 pairs",
            ("libreoffice", "de"): "34,345 pairs", ("libreoffice", "fr"): "32,809 pairs",
        }  # fmt: skip
        for (name, language), size in sizes.items():
            what = "manual pages" if name == "manpages" else "the help of LibreOffice"
            options = {"source": name, "languages": f"en-{language}"}
            fetch = parallel_packages.fetch(name, language, "{data_dir}/translation")
            found.append(Origin(f"Debian's {what}, English and {language!r}", _LICENCE, size, options, fetch=fetch))
        own = Origin("your own pairs of texts", "yours", "as many as you have", given={"path": "FILE"})
        return (*found, own)

    def score(self, predictions: Sequence[str], references: Sequence[str]) -> Scores:
        """`bleu` and `chrf`, see `translation_scores.scores`."""
        return translation_scores.scores(predictions, references)

    def _source(self, data_dir: str | Path | None) -> Source:
        shares = {"validation": self.validation_share, "test": self.test_share}
        if self.chosen != "files":
            given = Path(self.path).expanduser() if self.path else data_root(data_dir) / self.name
            backward = self.languages.endswith("-en")
            language = self.languages.replace("en", "").strip("-")
            return parallel_packages.source(self.chosen, given, language, backward, shares)
        named = {
            "train": (self.path, self.target_path),
            "validation": (self.validation_path, self.validation_target_path),
            "test": (self.test_path, self.test_target_path),
        }
        expand = lambda path: None if path is None else Path(path).expanduser()
        files = {
            split: parallel_files.Files(Path(path).expanduser(), expand(target))
            for split, (path, target) in named.items()
            if path
        }
        return parallel_files.source(files, (self.source_field, self.target_field), shares)
