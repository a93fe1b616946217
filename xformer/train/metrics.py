"""`metrics.jsonl`, one row an event; trackers get the same rows."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xformer.train import workdir as folder
from xformer.train.trackers import Tracker

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends rows to `workdir/metrics.jsonl`, and gives them to a tracker that has started.

    Rows after `step`, where the run goes on, are dropped, and so are damaged ones, such as a half-written last row.
    """

    def __init__(self, workdir: Path, step: int, tracker: Tracker) -> None:
        path = workdir / "metrics.jsonl"
        kept = [row for row in read_rows(path) if row["step"] <= step]
        folder.write_bytes(path, b"".join(_line(row) for row in kept))
        self._file = path.open("ab")
        self._at_step = {(row["step"], row["split"]) for row in kept if row["step"] == step}
        self._tracker = tracker

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds a row, once for each `step` and `split`, which are among its keys."""
        event = (row["step"], row["split"])
        if event in self._at_step:
            return
        self._at_step = {other for other in self._at_step if other[0] == event[0]} | {event}
        self._file.write(_line(row))
        self._file.flush()
        self._tracker.write(row)

    def sync(self) -> None:
        """Returns when every row is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._tracker.flush()

    def close(self) -> None:
        """Closes the files."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; none if there is no file. Damaged ones are left out, which a warning says."""
    rows: list[dict[str, Any]] = []
    damaged = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int and isinstance(row.get("split"), str):
            rows.append(row)
        else:
            damaged.append(number)
    if damaged:
        logger.warning("%s: damaged rows are left out: %s", path, ", ".join(map(str, damaged)))
    return rows


def without_nan(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values with None for each that is not finite, as JSON can hold it; a warning names those."""
    unknown = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    if unknown:
        logger.warning("%s: %s is not finite, written as null", where, ", ".join(unknown))
    return {name: None if name in unknown else value for name, value in values.items()}


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"
