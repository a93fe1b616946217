"""XLA's flags of the tests and of the processes that they start. Imports no JAX: it reads the flags when it starts."""

from __future__ import annotations

import os

# Tests compile much and compute little: without LLVM's optimizations they take about half the time. `make test-full`
# sets a level itself, and so runs what users run.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def xla_flags(num_devices: int) -> str:
    """The given flags with so many simulated CPU devices, and quick compilation unless a level is given."""
    given = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count")
    ]
    if not any(flag.startswith("--xla_backend_optimization_level") for flag in given):
        given.append(QUICK)
    return " ".join([*given, f"--xla_force_host_platform_device_count={num_devices}"])
