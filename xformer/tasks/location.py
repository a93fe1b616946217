"""Where prepared data lies, and what is said when it isn't there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

Progress = Callable[[str], None] | None
"""Receives one line of text at a time, or None for silence."""


class DataMissing(RuntimeError):
    """The data of a task isn't there and can't be made here; the message is one line that says how to get it."""


def default_data_dir() -> Path:
    """Where prepared data lies: `$XFORMER_DATA`, else `~/.cache/xformer`."""
    return Path(os.environ.get("XFORMER_DATA") or Path.home() / ".cache" / "xformer")


def data_root(data_dir: str | Path | None) -> Path:
    """The folder of all data sets: the one given, or the default."""
    return default_data_dir() if data_dir is None else Path(data_dir).expanduser()


def tfds_command(name: str) -> str:
    """The command that makes what `prepared_tfds` finds, `{data_dir}` standing for the root of all data."""
    return f"tfds build {name} --file_format=array_record --data_dir={{data_dir}}"


def debian_command(packages: Sequence[str], folder: str) -> str:
    """The command that brings Debian packages and extracts them into a folder, without installing them."""
    files = " ".join(f"{package}_*.deb" for package in packages)
    return f"apt-get download {' '.join(packages)} && for deb in {files}; do dpkg-deb -x $deb {folder}; done"


def prepared_tfds(root: Path, name: str) -> Path | None:
    """The newest version of a TFDS data set `name` or `name/config` in `root` that can be read without TensorFlow."""
    for info in sorted((root / name).glob("**/dataset_info.json"), reverse=True):
        unfinished = info.parent.name.startswith("incomplete")
        if not unfinished and json.loads(info.read_text(encoding="utf-8")).get("fileFormat") == "array_record":
            return info.parent
    return None
