"""Where prepared data lies, and what is said when it isn't there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str], None] | None
"""Receives one line of text at a time, or None for silence."""


class DataMissing(RuntimeError):
    """The data of a task isn't there and can't be made here; the message is one line that says how to get it."""


def default_data_dir() -> Path:
    """Where prepared data lies: `$XFORMER_DATA`, else `~/.cache/xformer`."""
    return Path(os.environ.get("XFORMER_DATA") or Path.home() / ".cache" / "xformer")
