"""Memory: of the process that trains, of its machine, and of its devices."""

from __future__ import annotations

import ctypes
import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

from xformer.train.errors import OutOfMemory

logger = logging.getLogger(__name__)

CGROUPS = (  # (limit, use) of this process's control group, version 2 and version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Plan(NamedTuple):
    """Bytes that a compiled function needs on one device: its arguments, and what comes beside them."""

    arguments: int
    beside: int

    @property
    def total(self) -> int:
        """Arguments, results and temporaries."""
        return self.arguments + self.beside

    @classmethod
    def of(cls, compiled: Any) -> Plan | None:
        """As the compiler planned it; None if it does not say."""
        plan = compiled.memory_analysis()
        if plan is None:
            return None
        beside = plan.output_size_in_bytes + plan.temp_size_in_bytes - plan.alias_size_in_bytes
        return cls(int(plan.argument_size_in_bytes), int(beside))


def check(name: str, plan: Plan) -> None:
    """Looks, before a step runs for the first time, whether there is memory for it.

    On a GPU or TPU, whose limit JAX knows, a step that can't fit is refused before it has taken anything. A CPU shares
    its memory with whatever else runs, which comes and goes, so that there it is a warning.

    Raises:
      OutOfMemory: the plan is larger than what JAX may take on a device; the message says what needs less.
    """
    per_device = [device.memory_stats() or {} for device in jax.local_devices()]
    limits = [stats["bytes_limit"] for stats in per_device if stats.get("bytes_limit")]
    if limits:
        if plan.total > min(limits):
            kind = jax.local_devices()[0].device_kind
            raise OutOfMemory(_line(name, plan.total, f"each device, and JAX may take {_gib(min(limits))} on {kind}"))
        return
    needed, free = plan.beside * len(jax.local_devices()), available()
    if free is not None and needed > free:
        logger.warning(_line(name, needed, f"this machine, which has {_gib(free)} left: it may swap or be killed"))


def _line(name: str, needed: int, where: str) -> str:
    ways = ["train.eval_batch_size"]
    if not name.startswith("evaluation"):
        ways = ["train.batch_size", "a larger train.accumulate", "model.remat=True", "train.dtype=bfloat16"]
        ways += ["fsdp in train.mesh"] if jax.device_count() > 1 else []
    spelt = " or ".join([", ".join(ways[:-1]), ways[-1]] if ways[1:] else ways)
    return f"the {name} needs {_gib(needed)} of {where}; with a smaller {spelt} it needs less"


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.3g} GiB"


def available() -> int | None:
    """Bytes of main memory that new processes may take, this process's control group regarded; None if unknown."""
    found = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for limit, used in CGROUPS:
        texts = _read(limit).strip(), _read(used).strip()
        if all(text.isdigit() for text in texts):
            found.append(int(texts[0]) - int(texts[1]))
    return min(found, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def release() -> None:
    """Gives the system memory that the C allocator keeps free, much of it the compiler's (Linux with glibc)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)
