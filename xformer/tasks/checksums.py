"""Checksums of the files of prepared data: what was changed, cut or lost since it was written is found by them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

FILE = "checksums.json"


def write(folder: Path) -> None:
    """Stores the SHA-256 of every file in a folder, at any depth, in the folder's `checksums.json`."""
    found = {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def differences(folder: Path, suffix: str = "") -> list[str] | None:
    """What is not as it was written, such as "train.tokens.npy changed since"; None where no checksums were stored.

    Args:
      folder: what `write` was given.
      suffix: only files with this ending are read.
    """
    try:
        stored = json.loads((folder / FILE).read_text(encoding="utf-8"))
        names = [name for name in stored if name.endswith(suffix)]
    except FileNotFoundError:  # made by an older version
        return None
    except (ValueError, TypeError, AttributeError):
        return [f"{FILE} can't be read"]
    found = []
    for name in names:
        try:
            same = _digest(folder / name) == stored[name]
        except FileNotFoundError:
            found.append(f"{name} is missing")
            continue
        if not same:
            found.append(f"{name} changed since")
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
