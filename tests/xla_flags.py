"""XLA's flags of the tests and of the processes that they start. Imports no JAX: it reads the flags when it starts."""

from __future__ import annotations

import importlib.metadata
import os

# Tests compile much and compute little: without LLVM's optimizations, with one LLVM module for each program, and with
# XLA's older and shorter code for fusions, they take a fraction of the time. jaxlib 0.11 lacks the last, and stops
# at a flag that it does not know. A quarter of `make test-full` sets a level itself, and so runs what users run.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK += " --xla_cpu_use_fusion_emitters=false"


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
