"""Measuring calls side by side: times in turn, memory one by one, and what the machine at hand can do at most.

All contenders of a measurement run in one process and take turns, so that whatever else the machine does meets all of
them alike. Compilation and first calls are never timed.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from xformer.train import memory

Key = TypeVar("Key", bound=Hashable)
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "flax",
    "optax", "numpy", "torch", "transformers",
)  # fmt: skip
ENVIRONMENT = ("GLIBC_TUNABLES", "XLA_FLAGS", "OMP_NUM_THREADS")  # variables that decide how fast a program is


@dataclasses.dataclass(frozen=True)
class Call:
    """Something to measure: `launch` starts it, `wait` returns when what `launch` gave is ready.

    `memory` gives the bytes that one call takes on an accelerator; on a CPU the process's own high-water mark says it.
    `planned` are bytes that the call takes for certain, as a compiler planned them.
    """

    launch: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    memory: Callable[[], float] | None = None
    planned: float = 0.0

    def __call__(self) -> Any:
        return self.wait(self.launch())


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How often calls take turns: at least `least` times, then up to `most` while that takes less than `seconds`.

    A turn repeats a short call for `turn_seconds` and counts as one measurement; before it comes a pause of
    `pause_seconds`, in which the threads of whoever ran before, which spin for a while after their work, go to sleep.
    """

    least: int = 5
    most: int = 15
    seconds: float = 20.0
    turn_seconds: float = 0.03
    pause_seconds: float = 0.02


def in_turn(calls: Mapping[Key, Call], rounds: Rounds) -> dict[Key, list[float]]:
    """Seconds a call, measured once a round for each; every call was run before."""
    repeats = {key: max(1, math.ceil(rounds.turn_seconds / _seconds(call, 1))) for key, call in calls.items()}
    times: dict[Key, list[float]] = {key: [] for key in calls}
    started = time.perf_counter()
    for turn in range(rounds.most):
        if turn >= rounds.least and time.perf_counter() - started > rounds.seconds:
            break
        for key, call in calls.items():
            time.sleep(rounds.pause_seconds)
            times[key].append(_seconds(call, repeats[key]))
    return times


def _seconds(call: Call, repeats: int) -> float:
    # An accelerator runs what it is given one by one, so one wait is enough; on a CPU calls would overlap.
    overlapping = jax.default_backend() == "cpu"
    started = time.perf_counter()
    for _ in range(repeats):
        out = call.launch()
        if overlapping:
            call.wait(out)
    call.wait(out)
    return (time.perf_counter() - started) / repeats


def quartiles(seconds: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high


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


def gemm(dtype: str = "float32") -> tuple[Call, int]:
    """A square matrix product in JAX and its FLOPs: what calls are set against. 2,048 wide, 8,192 on an accelerator."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    left, right = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    multiply = jax.jit(jnp.matmul)
    return Call(lambda: multiply(left, right)), 2 * size**3


def gemm_rate(dtype: str = "float32") -> float:
    """FLOP/s of that product, the best of a few turns."""
    call, flops = gemm(dtype)
    call()
    return flops / min(in_turn({"gemm": call}, Rounds(turn_seconds=0.2))["gemm"])


def machine() -> dict[str, Any]:
    """What numbers depend on besides the code: device, processor, cores, environment, versions, commit."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "python": platform.python_version(),
        "versions": versions(),
        "commit": _commit(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that matter here, of those installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """The commit of this code, with `+` where files differ from it; None outside a repository."""
    root = Path(__file__).parent.parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
