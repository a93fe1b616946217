"""Translations that Debian packages bring: manual pages, and the help of LibreOffice. Read without installing them."""

from __future__ import annotations

import html.parser
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from xformer.tasks import pairs, roff
from xformer.tasks.location import DataMissing, debian_command
from xformer.tasks.pairs import Pair
from xformer.tasks.text import Source, Texts, digest

_READING = "1"  # what the same files are read as; another number where that changes
MANUALS = ("manpages", "manpages-dev", "manpages-{language}", "manpages-{language}-dev")
HELP = ("libreoffice-help-en-us", "libreoffice-help-{language}")
PACKAGES = {"manpages": MANUALS, "libreoffice": HELP}


def fetch(name: str, language: str, folder: str) -> str:
    """The command that brings the packages and extracts them into a folder."""
    return debian_command([package.format(language=language) for package in PACKAGES[name]], folder)


def source(
    name: str, given: Path, language: str, backward: bool, shares: Mapping[str, float], keep_copies: bool = False
) -> Source:
    """The pairs of English and another language.

    Args:
      name: of `PACKAGES`.
      given: the folder that the packages are extracted into.
      language: "de" or "fr".
      backward: English is the target.
      shares: of validation and test; whole pages are in one part.
      keep_copies: see `pairs.cleaned`.

    Raises DataMissing where the packages are not there; the message says how to get them.
    """
    files = list(_FILES[name](given, language))
    if not files:
        command = fetch(name, language, str(given))
        raise DataMissing(
            f"translation: no {name} in English and {language!r} in {given}; on Debian or Ubuntu: {command}"
        )
    parts = (part for page, one, two in files for part in (page, one.read_bytes(), two.read_bytes()))

    def read() -> Texts:
        counts: dict[str, int] = {"pages": len(files)}
        found = (pair for page, one, two in files for pair in _READERS[name](page, one, two))
        turned = (Pair(pair.target, pair.source, pair.group) if backward else pair for pair in found)
        kept = pairs.cleaned(turned, counts, pairs.RATIO, keep_copies)
        return pairs.as_texts(pairs.by_group(kept, shares, counts), counts)

    key = digest(_READING, language, str(backward), str(shares), *parts, *pairs.options(keep_copies))
    return Source(f"{name}, {given}", key, read)


Files = Iterator[tuple[str, Path, Path]]
"""Name, English file and translated file of each page."""


def _manual_files(given: Path, language: str) -> Files:
    folder = next((own for own in (given / "usr/share/man", given) if (own / language).is_dir()), given)
    for english in sorted(folder.glob("man[1-8]/*.gz")):
        if (other := folder / language / english.relative_to(folder)).is_file():
            yield english.relative_to(folder).as_posix(), english, other


def _help_files(given: Path, language: str) -> Files:
    folder = next((own for own in (given / "usr/share/libreoffice/help", given) if (own / language).is_dir()), given)
    for english in sorted((folder / "en-US" / "text").rglob("*.html")):
        place = english.relative_to(folder / "en-US")
        if (other := folder / language / place).is_file():
            yield place.as_posix(), english, other


def _manual_pairs(page: str, english: Path, other: Path) -> Iterator[Pair]:
    """Paragraphs of the sections that have as many in both languages; translators add a last section of their own."""
    ours, theirs = (roff.sections(roff.read(file)) for file in (english, other))
    if not 0 <= len(theirs) - len(ours) <= 1:
        return
    for one, two in zip(ours, theirs, strict=False):
        if len(one.paragraphs) == len(two.paragraphs):
            yield from (Pair(*pair, page) for pair in zip(one.paragraphs, two.paragraphs, strict=True))


def _help_pairs(page: str, english: Path, other: Path) -> Iterator[Pair]:
    """Paragraphs of one identifier."""
    ours, theirs = (paragraphs(file.read_text(encoding="utf-8", errors="replace")) for file in (english, other))
    yield from (Pair(text, theirs[name], page) for name, text in ours.items() if name in theirs)


def paragraphs(page: str) -> dict[str, str]:
    """The text of each paragraph and heading of a page of help, by its identifier; of two of one name the first."""
    reader = _Paragraphs()
    reader.feed(page)
    reader.close()
    return {name: " ".join(text.split()) for name, text in reader.found.items() if text.strip()}


class _Paragraphs(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: dict[str, str] = {}
        self._name: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("p", "h1", "h2", "h3", "h4", "h5", "h6"):
            name = dict(attrs).get("id") or ""
            self._name = name if re.match(r"(par|hd)_id", name) and name not in self.found else None
            if self._name is not None:
                self.found[self._name] = ""
        elif tag == "br" and self._name is not None:
            self.found[self._name] += " "

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "h1", "h2", "h3", "h4", "h5", "h6"):
            self._name = None

    def handle_data(self, data: str) -> None:
        if self._name is not None:
            self.found[self._name] += data


_FILES: Mapping[str, Callable[[Path, str], Files]] = {"manpages": _manual_files, "libreoffice": _help_files}
_READERS: Mapping[str, Callable[[str, Path, Path], Iterator[Pair]]] = {
    "manpages": _manual_pairs,
    "libreoffice": _help_pairs,
}
