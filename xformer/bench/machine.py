"""What figures depend on besides the code: the machine, its versions, and how fast it multiplies matrices."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xformer.bench.timing import Call, Rounds, in_turn

PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "flax",
    "optax", "numpy", "torch", "transformers",
)  # fmt: skip
ENVIRONMENT = ("GLIBC_TUNABLES", "XLA_FLAGS", "OMP_NUM_THREADS")  # variables that decide how fast a program is


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


def describe() -> dict[str, Any]:
    """Device, processor, cores, environment, versions and commit, as they stand in result files."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
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


def cpu() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory() -> int | None:
    """Bytes of memory of this machine; None where the system doesn't say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


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
