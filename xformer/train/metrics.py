"""`metrics.jsonl`, one row an event, and the same numbers as TensorBoard events."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xformer.train import workdir as folder

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends rows to `workdir/metrics.jsonl` and, if tensorboardX is installed, to event files in `workdir`.

    Rows after `step`, where the run goes on, are dropped, and so are damaged ones, such as a half-written last row.
    """

    def __init__(self, workdir: Path, step: int) -> None:
        path = workdir / "metrics.jsonl"
        kept = [row for row in read_rows(path) if row["step"] <= step]
        folder.write_bytes(path, b"".join(_line(row) for row in kept))
        self._file = path.open("ab")
        self._at_step = {(row["step"], row["split"]) for row in kept if row["step"] == step}
        self._events = _event_writer(workdir, step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds a row, once for each `step` and `split`, which are among its keys."""
        event = (row["step"], row["split"])
        if event in self._at_step:
            return
        self._at_step = {other for other in self._at_step if other[0] == event[0]} | {event}
        self._file.write(_line(row))
        self._file.flush()
        if self._events is not None:
            self._events.write(row)

    def sync(self) -> None:
        """Returns when every row is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


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


class _Events:
    """TensorBoard events, written in the caller's thread: tensorboardX's own would block for ever after a full disk."""

    def __init__(self, workdir: Path, step: int) -> None:
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self._scalar, self._event = summary.scalar, event_pb2.Event
        self._writer = event_file_writer.EventsWriter(str(workdir / "events"), f".{step}")
        if step:  # what another process wrote after it is not shown
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.write_event(self._event(wall_time=time.time(), step=step + 1, session_log=start))
        self.flush, self.close = self._writer.flush, self._writer.close

    def write(self, row: Mapping[str, Any]) -> None:
        """A scalar `split/name` for every number of a row."""
        for name, value in row.items():
            if name not in ("step", "split") and value is not None:
                summary = self._scalar(f"{row['split']}/{name}", value)
                self._writer.write_event(self._event(wall_time=time.time(), step=row["step"], summary=summary))


def _event_writer(workdir: Path, step: int) -> _Events | None:
    try:
        return _Events(workdir, step)
    except ImportError:
        logger.warning("no TensorBoard events: pip install 'xformer-jax[tensorboard]' for them")
        return None
