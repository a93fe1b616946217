"""Rows of a comparison as CSV: one a run or trial, scalars only, nested keys dotted."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LEFT_OUT = ("info", "versions", "baseline", "test_details", "init_from", "better", "model", "flops_uncounted")


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `results.jsonl` as a table with the columns of all of them; what a row lacks is empty."""
    flat = [dict(_scalars(row)) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if not prefix and key in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}.")
        elif value is not None and not isinstance(value, list):
            yield f"{prefix}{key}", value
