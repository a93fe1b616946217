"""XLA's flags of the tests and of the processes that they start. Imports no JAX: it reads the flags when it starts."""

from __future__ import annotations

import importlib.metadata
import os

# Tests compile much and compute little: without LLVM's optimizations, with one LLVM module for each program, and with
# XLA's older and shorter code for fusions, they take a fraction of the time. jaxlib 0.11 lacks the last, and stops
# at a flag that it does not know. An eighth of `make test-full` sets a level itself, and so runs what users run.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
# XLA aborts the process where one device waits 40 s for the others. Eight of them share two cores here, and in a run of
# two processes one waits for the other to compile.
PATIENT = ""
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK += " --xla_cpu_use_fusion_emitters=false"
    PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def xla_flags(num_devices: int) -> str:
    """The given flags with so many simulated CPU devices, and quick compilation unless a level is given."""
    given = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count") and flag != PATIENT
    ]
    if not any(flag.startswith("--xla_backend_optimization_level") for flag in given):
        given.append(QUICK)
    return " ".join([*given, *PATIENT.split(), f"--xla_force_host_platform_device_count={num_devices}"])
