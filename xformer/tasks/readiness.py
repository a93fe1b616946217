"""Is the data of a task ready, and what lies prepared in a folder? Every file is read, so that damage is found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xformer.tasks import checksums, store
from xformer.tasks.interface import Task
from xformer.tasks.location import DataMissing, data_root

READY, NOT_PREPARED, NO_SOURCE, DAMAGED = "ready", "not prepared", "source not there", "damaged"


@dataclasses.dataclass(frozen=True)
class Readiness:
    """One of the states above; `why` says more where it isn't ready; `folder` holds the data, or will."""

    state: str
    why: str = ""
    folder: Path | None = None


def of(task: Task, data_dir: str | Path | None) -> Readiness:
    """What `task.open(data_dir)` would find. Raises ValueError if the user's own files are at fault."""
    try:
        folder = task.folder(data_dir)
    except DataMissing as error:
        return Readiness(NO_SOURCE, str(error))
    try:
        if folder is None:
            task.open(data_dir)
        elif folder.exists():
            store.check(folder)
        else:
            return Readiness(NOT_PREPARED, "", folder)
    except DataMissing as error:
        return Readiness(DAMAGED if folder is not None else NOT_PREPARED, str(error), folder)
    return Readiness(READY, "", folder)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A folder of prepared data; `damage` says what is wrong with it, "" where nothing is."""

    folder: Path
    num_bytes: int
    source: str
    damage: str


def prepared(data_dir: str | Path | None) -> Iterator[Prepared]:
    """Whatever was prepared in a data directory, by any task with any options."""
    for version in sorted(data_root(data_dir).glob(f"*/*/{store.VERSION}")):
        if not any((version / name).exists() for name in (store.FACTS, checksums.FILE)):
            continue  # another program's, such as TFDS's own
        try:
            store.check(version)
            damage = ""
        except DataMissing as error:
            damage = str(error)
        yield Prepared(version, num_bytes(version), _source(version), damage)


def leftovers(data_dir: str | Path | None) -> list[Path]:
    """Folders that a process left half made that was killed; the next one that prepares the same removes them."""
    return sorted(data_root(data_dir).glob(f"*/*/{store.INCOMPLETE}*"))


def num_bytes(folder: Path) -> int:
    """The size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _source(folder: Path) -> str:
    try:
        facts: Any = json.loads((folder / store.FACTS).read_text(encoding="utf-8"))["facts"]
        return str(facts["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
