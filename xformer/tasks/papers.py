"""Papers of the ACL Anthology and their abstracts, as the PyPI package aclsum holds them: a JSON file a paper."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from xformer.tasks import pairs
from xformer.tasks.location import DataMissing
from xformer.tasks.pairs import Pair, tells
from xformer.tasks.text import Source, Texts, digest

INSTALL = "pip install --no-deps aclsum"
LICENCE = "MIT, as the package says"
_READING = "1"  # what the same files are read as; another number where that changes
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
LONG = 40  # characters of a sentence that tells; shorter ones, such as "Our code is public.", may stand anywhere


def source(path: str, shares: Mapping[str, float], keep_copies: bool = False) -> Source:
    """The body of each paper with its abstract.

    Args:
      path: a folder of the JSON files of papers at any depth; "": that of the installed package.
      shares: of validation and test. keep_copies: see `pairs.cleaned`.

    Raises DataMissing where no paper is there; the message says how to get them.
    """
    folders = [Path(path).expanduser()] if path else _installed()
    found = sorted(file for folder in folders for file in folder.rglob("*.json"))
    if not found:
        where = f"in {path}" if path else "installed"
        raise DataMissing(f"summarization: no papers {where}; install the package ({INSTALL})")
    parts = (file.read_bytes() for file in found)
    key = digest(_READING, str(shares), *parts, *pairs.options(keep_copies))
    return Source("papers of aclsum", key, lambda: _read(found, shares, keep_copies))


def _read(found: Sequence[Path], shares: Mapping[str, float], keep_copies: bool) -> Texts:
    counts = {"papers": len(found), "without_both_left_out": 0, "paragraphs_that_tell_left_out": 0}
    papers = []
    for file in found:
        if (paper := summarised_paper(json.loads(file.read_text(encoding="utf-8")), file.stem, counts)) is None:
            counts["without_both_left_out"] += 1
        else:
            papers.append(paper)
    kept = pairs.grouped(pairs.cleaned(papers, counts, None, keep_copies))
    return pairs.as_texts(pairs.by_group(kept, shares, counts), counts)


def summarised_paper(paper: Mapping, name: str, counts: dict[str, int]) -> Pair | None:
    """The paragraphs of a paper's body and its abstract; None where either is missing.

    A paragraph that holds a sentence of the abstract word for word is left out, and counted.
    """
    abstract = " ".join((paper.get("abstract") or "").split())
    body = [" ".join(part["text"].split()) for part in paper.get("pdf_parse", {}).get("body_text", ())]
    sentences = [sentence for sentence in _SENTENCE.split(abstract) if len(sentence) >= LONG]
    kept = [text for text in body if not any(tells(text, sentence) for sentence in sentences)]
    counts["paragraphs_that_tell_left_out"] += len(body) - len(kept)
    text = " ".join(filter(None, kept))
    return Pair(text, abstract, name) if text and abstract else None


def _installed() -> list[Path]:
    spec = importlib.util.find_spec("aclsum")
    return [Path(folder, "dataset", "paper_jsons") for folder in (spec and spec.submodule_search_locations) or ()]
