"""Translation: texts in one language from those in another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, get_args

from xformer.tasks import checks, pairs, parallel_packages, translation_scores
from xformer.tasks.location import data_root
from xformer.tasks.origin import Origin
from xformer.tasks.outputs import Scores
from xformer.tasks.parallel_texts import FILES, ParallelTexts
from xformer.tasks.text import Source

SourceName = Literal["manpages", "libreoffice", "files"]
Languages = Literal["en-de", "en-fr", "de-en", "fr-en"]
_LICENCE = "several free ones, as the packages say"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation(ParallelTexts):
    """A translation of each text, judged by BLEU and chrF (`sacrebleu`).

    Left out, and counted in the data's info: targets that are nearly their sources (unless `keep_copies`), pairs that
    were there before, and pairs of which one side is more than three times as long as the other. No text is in two
    parts: a page is in one, and what stands on pages of two parts is in the later alone (validation after training,
    test after both).

    source: "manpages", paragraphs of manual pages, or "libreoffice", of the help of LibreOffice, from Debian packages
    that are extracted, not installed; "files", the user's own. With a `path` it is "files" unless another is given.

    languages: of those packages, from one to the other.

    path and what follows: see `ParallelTexts`.
    """

    name: ClassVar[str] = "translation"

    SOURCES: ClassVar[tuple[str, ...]] = get_args(SourceName)
    RATIO: ClassVar[float | None] = pairs.RATIO

    source: SourceName | None = None
    languages: Languages = "en-de"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice(self.name, "languages", self.languages, get_args(Languages))

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
        if self.chosen == FILES:
            return self._files()
        given = Path(self.path).expanduser() if self.path else data_root(data_dir) / self.name
        backward = self.languages.endswith("-en")
        language = self.languages.replace("en", "").strip("-")
        return parallel_packages.source(self.chosen, given, language, backward, self.shares, self.keep_copies)
