"""Memory: what one call takes, and what there is."""

from __future__ import annotations

import gc
import math
import statistics
import time
from pathlib import Path

import jax

from xformer.bench.timing import Call
from xformer.train import memory

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def extra_memory(call: Call) -> float:
    """Bytes that one call takes above what the process held before it, its results included; NaN where unknown.

    On Linux the process's high-water mark is set back before the call and read after it. Memory that an allocator kept
    from earlier calls hides some of what the call takes, so the figure is no less than what was planned; of a short
    call it is the median of three tries.
    """
    if call.memory is not None:
        return call.memory()
    try:
        started = time.perf_counter()
        tries = [_high_water(call)]
        if time.perf_counter() - started < 1:
            tries += [_high_water(call), _high_water(call)]
        return max(statistics.median(tries), call.planned)
    except (OSError, AttributeError):
        return math.nan


def peak() -> int:
    """Bytes of main memory that this process has taken at most since it began. Raises OSError off Linux.

    Not `resource.ru_maxrss`, which begins with that of the process that started this one.
    """
    return int(_status("VmHWM"))


def _high_water(call: Call) -> float:
    gc.collect()
    time.sleep(0.1)  # JAX frees in the background
    memory.release()
    CLEAR.write_text("5")
    before = _status("VmRSS")
    call()
    return max(_status("VmHWM") - before, 0.0)


def _status(field: str) -> float:
    """A field of this process's memory statistics, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return float(line.split()[1]) * 1024


def available_memory() -> float:
    """Bytes that a process can still take: of the device where that is known, else of the machine; NaN if unknown."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats["bytes_in_use"])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.nan
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
