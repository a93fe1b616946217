"""The configs that come with xformer, found by name from any folder."""

from __future__ import annotations

import re
from pathlib import Path


def folder() -> Path:
    """Where the shipped configs lie: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def names() -> list[str]:
    """Names of the shipped configs, sorted: `compare_demo`, `demo`, ..., `lra/image`, ..."""
    files = (path.relative_to(folder()) for path in folder().rglob("*.py") if path.stem != "__init__")
    return sorted(path.with_suffix("").as_posix() for path in files)


def locate(spec: str) -> str:
    """`NAME` or `NAME:ARGUMENT` of a shipped config with the path of its file for its name; any other spec as it is.

    A file of that name in the current folder wins.
    """
    match = re.fullmatch(r"([\w/]+)(:.*)?", spec, re.S)
    if match is None or match[1] not in names() or Path(match[1]).is_file():
        return spec
    return f"{folder() / match[1]}.py{match[2] or ''}"
