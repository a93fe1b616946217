"""Which part of the Linux kernel's documentation is a document from? Long texts that a Debian package brings."""

from __future__ import annotations

import dataclasses
import gzip
import re
from pathlib import Path
from typing import ClassVar

from xformer.tasks import released
from xformer.tasks.location import DataMissing, data_root
from xformer.tasks.origin import Origin
from xformer.tasks.text import Source, Texts, TextTask, digest

CLASS_NAMES = [
    "admin-guide", "arm", "core-api", "driver-api", "filesystems", "gpu", "hwmon", "i2c", "mm", "networking", "process",
    "scsi", "sound", "trace", "userspace-api", "virt", "x86",
]  # fmt: skip
"""The top folders with 40 documents or more in Linux 6.1, without `translations`: a language is no subject."""

FETCH = "apt-get download linux-doc-6.1 && dpkg-deb -x linux-doc-6.1_*.deb {folder}"
_SHARES = {"validation": 0.1, "test": 0.2}
_READING = "1"  # what the same files are read as; another number where that changes
# Lines that many documents share and that say nothing of the subject.
_HEADER = re.compile(r"^.*(SPDX-License-Identifier|\bcopyright\b|©).*\n?", re.M | re.I)


@dataclasses.dataclass(frozen=True)
class LinuxDocs(TextTask):
    """Documents `FOLDER/**/*.rst.gz` with the top folder as their class: 17 classes, 2,150 documents in Linux 6.1.

    Lines with a licence identifier or a copyright are left out, as are folders of fewer than 40 documents and
    `translations`. Median 3,400 bytes, a tenth above 17,000: `max_len` is 16,384 bytes unless it is given. A fifth is
    for test and a tenth for validation, of each class, by a hash of the text.

    path: the folder into which the Debian package `linux-doc-6.1` is extracted, or its `Documentation`. "": the folder
    `linux_docs` of the data directory.
    """

    name: ClassVar[str] = "linux_docs"

    max_len: int = 16_384
    path: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.path, str):
            raise ValueError(f"{self.name}: path must be a string, got {self.path!r}")

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        source, licence = "Debian's linux-doc-6.1", "GPL-2, as the package says"
        return (Origin(source, licence, "2,150 documents", fetch=FETCH.format(folder="{data_dir}/linux_docs")),)

    @property
    def known_classes(self) -> list[str]:
        return CLASS_NAMES

    def _source(self, data_dir: str | Path | None) -> Source:
        given = Path(self.path).expanduser() if self.path else data_root(data_dir) / self.name
        folder, found = files(given)
        parts = (part for some in found.values() for file in some
                 for part in (file.relative_to(folder).as_posix(), file.read_bytes()))  # fmt: skip
        return Source(f"linux-doc, {folder}", digest(_READING, str(_SHARES), *parts), lambda: read(found))


def files(given: Path) -> tuple[Path, dict[str, list[Path]]]:
    """`Documentation` and the documents of each class in it, from the folder that the package is extracted into.

    Raises DataMissing if they are not there; the message says how to get them.
    """
    folder = next((found for found in _places(given) if _files(found, CLASS_NAMES[0])), None)
    if folder is None:
        raise DataMissing(f"linux_docs: no documentation in {given}; on Debian or Ubuntu: {FETCH.format(folder=given)}")
    found = {name: _files(folder, name) for name in CLASS_NAMES}
    if absent := [name for name, some in found.items() if len(some) < len(_SHARES) + 1]:
        raise DataMissing(f"linux_docs: {folder} is not that of Linux 6.1: no documents in {', '.join(absent)}")
    return folder, found


def _places(given: Path) -> list[Path]:
    return [given, given / "Documentation", *sorted(given.glob("usr/share/doc/linux-doc-*/Documentation"))]


def _files(folder: Path, name: str) -> list[Path]:
    return sorted((folder / name).rglob("*.rst.gz"))


def read(files: dict[str, list[Path]]) -> Texts:
    """The documents of `files` in their splits, with their classes. Raises DataMissing for a damaged file."""
    documents = ((text(file), label) for label, found in enumerate(files.values()) for file in found)
    return released.split_rows(((document, label) for document, label in documents if document), CLASS_NAMES, _SHARES)


def text(file: Path) -> str:
    """A document without licence and copyright. Raises DataMissing if the file is damaged."""
    try:
        content = gzip.decompress(file.read_bytes())
    except (OSError, EOFError) as error:
        raise DataMissing(f"linux_docs: {file} is damaged ({error}); extract the package again") from error
    return _HEADER.sub("", content.decode("utf-8", errors="replace")).strip()
