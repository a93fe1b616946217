"""Manual pages and their one-line descriptions, from folders of pages such as Debian packages bring."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from xformer.tasks import pairs, roff
from xformer.tasks.location import DataMissing, debian_command
from xformer.tasks.pairs import Pair, tells
from xformer.tasks.text import Source, Texts, digest

PACKAGES = ("manpages", "manpages-dev")
_READING = "1"  # what the same files are read as; another number where that changes
_ALIAS = re.compile(r"\s*\.so\s")
_DESCRIBED = re.compile(r"(?P<names>.+?)\s+[-–—]+\s+(?P<description>.+)")
_NO_TEXT = ("LIBRARY", "SYNOPSIS")  # declarations


def source(given: Path, shares: Mapping[str, float], keep_copies: bool = False) -> Source:
    """The text of each page with the description that its NAME section gives.

    A page counts once, whatever aliases it has: links, and pages that only name another (`.so`), are left out. Pages
    with the same description, or the same text, are in the same part.

    Args:
      given: a folder of `man1` and so on, or one with `usr/share/man` in it.
      shares: of validation and test. keep_copies: see `pairs.cleaned`.

    Raises DataMissing where no page is there; the message says how to get some.
    """
    found = files(given)
    if not found:
        command = debian_command(PACKAGES, str(given))
        raise DataMissing(f"summarization: no manual pages in {given}; on Debian or Ubuntu: {command}")
    parts = (part for name, file in found.items() for part in (name, file.read_bytes()))
    key = digest(_READING, str(shares), *parts, *pairs.options(keep_copies))
    return Source(f"manual pages, {given}", key, lambda: _read(found, shares, keep_copies))


def files(given: Path) -> dict[str, Path]:
    """The pages of a folder by name, such as `man2/mkdir.2.gz`; links are aliases, and left out."""
    folder = own if (own := given / "usr/share/man").is_dir() else given
    pages = (file for file in sorted(folder.glob("man[1-9]*/*")) if file.is_file() and not file.is_symlink())
    return {file.relative_to(folder).as_posix(): file for file in pages}


def _read(found: Mapping[str, Path], shares: Mapping[str, float], keep_copies: bool) -> Texts:
    counts = {"pages": len(found), "not_described_left_out": 0, "paragraphs_that_tell_left_out": 0}
    described = []
    for name, file in found.items():
        if (page := described_page(roff.read(file), name, counts)) is None:
            counts["not_described_left_out"] += 1
        else:
            described.append(page)
    kept = pairs.grouped(pairs.cleaned(described, counts, None, keep_copies))
    return pairs.as_texts(pairs.by_group(kept, shares, counts), counts)


def described_page(page: str, name: str, counts: dict[str, int]) -> Pair | None:
    """The text of a page and its description; None of an alias, and where either is missing.

    The text is what stands in paragraphs, without the sections NAME, LIBRARY and SYNOPSIS. A paragraph that holds the
    description word for word is left out, and counted: it would tell the answer.
    """
    if _ALIAS.match(page):
        return None
    described, paragraphs = None, []
    for section in roff.sections(page):
        heading = section.heading.upper()
        if heading == "NAME":
            described = _DESCRIBED.fullmatch(" ".join(section.paragraphs))
        elif heading not in _NO_TEXT:
            paragraphs += section.paragraphs
    if described is None:
        return None
    target = described["description"]
    kept = [paragraph for paragraph in paragraphs if not tells(paragraph, target)]
    counts["paragraphs_that_tell_left_out"] += len(paragraphs) - len(kept)
    return Pair(" ".join(kept), target, name) if kept else None
