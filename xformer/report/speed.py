"""A benchmark's result file as a table and as a picture of time and memory against length."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

from xformer.report import formatting, style
from xformer.report.costs import CostRow, Panel
from xformer.report.costs import picture as cost_picture

OURS = "xformer"
COLUMNS = ("length", "mode", "variant", "contender", "time", "/ xformer", "/ full", "memory", "FLOP/s", "of GEMM")
_FIELDS = {"forward": ("time_ms", "forward_bytes"), "forward_backward": ("train_time_ms", "memory_bytes")}
_PANELS = (
    Panel("time_ms", "time, forward", formatting.milliseconds, formatting.tick_milliseconds),
    Panel("train_time_ms", "time, forward + backward", formatting.milliseconds, formatting.tick_milliseconds),
    Panel("forward_bytes", "extra memory, forward", formatting.mebibytes, formatting.tick_bytes, base=4),
    Panel("memory_bytes", "extra memory, forward + backward", formatting.mebibytes, formatting.tick_bytes, base=4),
)


def picture(result: Mapping[str, Any], theme: style.Theme = style.LIGHT) -> bytes | None:
    """PNG of time and extra memory against length, peers dashed; None where nothing was measured."""
    measured = [row for row in result["rows"] if "seconds" in row]
    names = line_names(measured)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in measured:
        time, memory = _FIELDS[row["mode"]]
        point = {time: 1e3 * row["seconds"], memory: _memory(row)}
        found.setdefault((names[row["variant"], row["contender"]], row["length"]), {}).update(point)
    rows = [CostRow(who, length, math.nan, **point) for (who, length), point in found.items()]
    ours = [name for (_, contender), name in names.items() if contender == OURS]
    peers = [name for (_, contender), name in names.items() if contender != OURS]
    # The dashes change when the colours are used up: nobody's names fill the first round.
    return cost_picture(rows, [*ours, *[""] * (-len(ours) % len(theme.cycle)), *peers], "", theme, _PANELS)


def line_names(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """What the lines are called: ours by variant, peers by their own name if they are measured for one variant only."""
    pairs = dict.fromkeys((row["variant"], row["contender"]) for row in rows)
    times = collections.Counter(contender for _, contender in pairs)
    return {
        (variant, contender): variant if contender == OURS else contender + f", {variant}" * (times[contender] > 1)
        for variant, contender in pairs
    }


def table(result: Mapping[str, Any]) -> str:
    """Every row as text; ratios are to xformer's figure of the same variant, and to xformer's full attention."""
    seconds = {_key(row, row["variant"]): row for row in result["rows"] if row["contender"] == OURS}
    lines = [COLUMNS]
    skipped = []
    for row in result["rows"]:
        where = (f"{row['length']:,}", row["mode"].replace("_", "+"), row["variant"], row["contender"])
        if "skipped" in row:
            skipped.append(f"skipped: {', '.join(where)}: {row['skipped']}")
            continue
        ratios = [
            formatting.ratio(row["seconds"], seconds.get(_key(row, variant), {}).get("seconds", math.nan))
            for variant in (row["variant"], "full")
        ]
        rate = (formatting.si(row["flops_per_second"]), formatting.percent(row["share_of_gemm"], 0))
        cells = (formatting.milliseconds(1e3 * row["seconds"]), *ratios, formatting.mebibytes(_memory(row)), *rate)
        lines.append((*where, *cells))
    return "\n".join([*_aligned(lines), *skipped])


def _memory(row: Mapping[str, Any]) -> float:
    return math.nan if row["extra_bytes"] is None else row["extra_bytes"]


def _key(row: Mapping[str, Any], variant: str) -> tuple[str, int, str]:
    return variant, row["length"], row["mode"]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = (1, 2, 3)
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
