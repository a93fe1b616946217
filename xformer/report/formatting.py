"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xformer.report.stats import Estimate

MISSING = "–"
_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def si(value: float, unit: str = "", digits: int = 3) -> str:
    """`1.23 GFLOP` for 1.23e9 and unit `FLOP`; a dash for NaN."""
    if not math.isfinite(value):
        return MISSING
    if 0 < abs(value) < 1:
        return f"{value:.{digits}g} {unit}".rstrip()
    for prefix, size in _PREFIXES:
        if abs(float(f"{value:.{digits}g}")) >= size:
            return f"{_digits(value / size, digits)} {prefix}{unit}"
    text = f"{value:.0f}" if float(value).is_integer() else _digits(value, digits)
    return f"{text} {unit}".rstrip()


def _digits(value: float, digits: int) -> str:
    whole = len(str(int(abs(float(f"{value:.{digits}g}")))))
    return f"{value:.{max(0, digits - whole)}f}"


def mebibytes(value: float) -> str:
    """Bytes in MiB, or GiB from 1,024 MiB."""
    if not math.isfinite(value):
        return MISSING
    mib = value / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.{1 if mib < 10 else 0}f} MiB"


def milliseconds(value: float) -> str:
    if not math.isfinite(value):
        return MISSING
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{_digits(value, 3)} ms"


def seconds(value: float) -> str:
    """`48 s`, `3.2 min`, `1.5 h`; a dash for NaN."""
    if not math.isfinite(value):
        return MISSING
    unit, size = ("s", 1) if value < 100 else ("min", 60) if value < 6000 else ("h", 3600)
    return f"{_digits(value / size, 2)} {unit}"


def tick_flops(value: float) -> str:
    """`500 G`: for axes, where numbers are round."""
    return _tick(value, (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1)))


def tick_milliseconds(value: float) -> str:
    return _tick(value, (("s", 1e3), ("ms", 1), ("µs", 1e-3)))


def tick_bytes(value: float) -> str:
    return _tick(value, (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1)))


def _tick(value: float, units: tuple[tuple[str, float], ...]) -> str:
    unit, size = next(((unit, size) for unit, size in units if value >= size), units[-1])
    return f"{value / size:.4g} {unit}".rstrip()


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %" if math.isfinite(share) else MISSING


def ratio(value: float, reference: float) -> str:
    """`0.62×`, or nothing where either is missing."""
    if not (math.isfinite(value) and math.isfinite(reference)) or reference == 0:
        return ""
    times = value / reference
    return f"{times:.2f}×" if times < 10 else f"{times:.0f}×"


def change(value: float, reference: float) -> str:
    """` (+3.1 %)`, or nothing where either is missing or they are equal."""
    if not (math.isfinite(value) and math.isfinite(reference)) or reference == 0 or value == reference:
        return ""
    return f" ({100 * (value / reference - 1):+.1f} %)"


def metric_value(value: float, metric: str) -> str:
    """One value of a metric: accuracy in percent, others as they are; MISSING where it is not finite."""
    if not math.isfinite(value):
        return MISSING
    return percent(value) if metric == "accuracy" else plain(value, value)


def quality(value: Estimate, metric: str) -> str:
    """`61.3 ± 0.8 %`; without an interval where one seed gives none.

    `74.2 % (24.2 to 99.9)`, the lowest and the highest seed, where the interval would be as wide as the scale.
    """
    if value.count == 0:
        return MISSING
    if metric == "accuracy":
        if value.half_width is not None and value.half_width >= 0.5:
            return f"{100 * value.mean:.1f} % ({100 * value.lowest:.1f} to {100 * value.highest:.1f})"
        half = "" if value.half_width is None else f" ± {100 * value.half_width:.1f}"
        return f"{100 * value.mean:.1f}{half} %"
    half = "" if value.half_width is None else f" ± {plain(value.half_width, value.mean)}"
    return f"{plain(value.mean, value.mean)}{half}"


def plain(value: float, beside: float) -> str:
    """`0.7221`, `20.31`, `566.1`: the value with the `decimals` of what it stands beside."""
    return f"{value:.{decimals(beside)}f}"


def decimals(value: float) -> int:
    """Four below 10, two below 100, one from there on."""
    return 4 if abs(value) < 10 else 2 if abs(value) < 100 else 1


def short(text: str, most: int = 28) -> str:
    """The text on one line, its middle replaced by `…` where it has more than `most` characters."""
    text = " ".join(text.split())
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def length(tokens: int) -> str:
    """`512`, `2k`, `16k`: lengths on an axis."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def lengths(tokens: Sequence[int]) -> str:
    """`512, 1,024 and 2,048 tokens`."""
    return f"{listed([f'{count:,}' for count in tokens])} tokens"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
