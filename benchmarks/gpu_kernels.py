"""Checks the GPU kernels against the reference on the card at hand, then times them beside their peers on that card.

    python -m benchmarks.gpu_kernels --out=gpu_kernels.json          # on a GPU: checks, then times
    python -m benchmarks.gpu_kernels --check_only --tiny             # anywhere: the checks, interpreted, on tiny shapes

Times are medians of turns that the contenders take, compilation left out. Peers: those of `xformer.bench.peers`,
cuDNN through `jax.nn.dot_product_attention` and, where PyTorch is installed with CUDA, its SDPA and its compiled
FlexAttention with the same blocks. The JSON names the device and every version. Exit code 1 when a check fails; then
nothing is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention import ALiBi, Attention, BigBird, Full, Shape, Window
from xformer.attention.kernels import interpreted
from xformer.bench import benchmark, contender, machine, timing
from xformer.bench.jax_contenders import ours, with_gradients
from xformer.bench.peers import peers

TOLERANCE = {"float32": 5e-3, "bfloat16": 3e-2}  # of the largest entry; float32 products may run in TF32 on a GPU


@dataclasses.dataclass(frozen=True)
class Case:
    """One check: an op, the kernel that must do it, the call's sizes and dtype, and how many keys are real."""

    op: Attention
    kernel: Literal["pallas", "cudnn"]
    length: int
    dtype: str = "bfloat16"
    head_dim: int = 64
    num_kv_heads: int = 4
    real: tuple[int, ...] | None = None

    def __str__(self) -> str:
        name = f"{type(self.op).__name__.lower()}{'-causal' if self.op.causal else ''}"
        return f"{self.kernel}-{name}-{self.length}x{self.head_dim}-{self.dtype}{'-padded' if self.real else ''}"


def cases(tiny: bool) -> list[Case]:
    """The checks; tiny ones for the interpreter."""
    n, block = (80, 16) if tiny else (2000, 128)
    bigbird = BigBird(block_size=block, num_random_blocks=2 - tiny)
    found = [
        Case(bigbird, "pallas", n, real=(n, 0)),
        Case(dataclasses.replace(bigbird, causal=True), "pallas", n, "float32", num_kv_heads=2),
        Case(Full(causal=True, position=ALiBi()), "pallas", n // 2, head_dim=80),
        Case(Window(left=n // 8, right=3), "pallas", n, "float32", real=(n // 2, n)),
    ]
    if not tiny:
        found += [
            Case(Full(), "pallas", n, head_dim=128),
            Case(Full(), "cudnn", n, real=(n, n // 3)),
            Case(Full(), "cudnn", n, real=(n, 0)),
            Case(Full(causal=True), "cudnn", n),
            Case(Window(left=n // 8, right=0, causal=True), "cudnn", n),
        ]
    return found


def arrays(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> list[jax.Array]:
    """Query, key, value and a cotangent for the output."""
    rngs = jax.random.split(jax.random.key(0), 4)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [jax.random.normal(rng, (batch, length, n, head_dim), dtype) for rng, n in zip(rngs, sizes, strict=True)]


def check(case: Case) -> dict[str, Any]:
    """Largest error of output and gradients against the reference in float32, as a share of the largest entry."""
    operands = arrays(2, case.length, 4, case.num_kv_heads, case.head_dim, case.dtype)
    mask = None
    if case.real is not None:
        mask = (jnp.arange(case.length) < jnp.asarray(case.real)[:, None])[:, None, None]
    op = dataclasses.replace(case.op, implementation=case.kernel)
    reference = dataclasses.replace(case.op, implementation="reference")
    with interpreted():
        got = jax.jit(with_gradients(lambda q, k, v: op(q, k, v, mask=mask)))(*operands)
    exact = [x.astype(jnp.float32) for x in operands]
    with jax.default_matmul_precision("highest"):
        want = jax.jit(with_gradients(lambda q, k, v: reference(q, k, v, mask=mask)))(*exact)
    errors = {}
    for name, x, y in zip(("output", "query", "key", "value"), got, want, strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        errors[name] = float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-9)) if np.isfinite(x).all() else float("inf")
    return {"case": str(case), "errors": errors, "passed": max(errors.values()) <= TOLERANCE[case.dtype]}


def timed(op: Attention, length: int, heads: int, kernels: Sequence[str]) -> dict[str, Any]:
    """An op in bfloat16 with heads of 64, by every contender there is, in turn: figures, or why there are none."""
    result: dict[str, Any] = {}
    rate = machine.gemm_rate("bfloat16")
    for backward in (False, True):
        case = contender.Case(op, Shape(1, length, length, heads, 64), "bfloat16", backward)
        named = [ours(f"xformer {kernel}", kernel) for kernel in kernels]
        ready, skipped = benchmark.prepare([ours(), *named, *peers(case)], case)
        result["forward_backward" if backward else "forward"] = {
            **benchmark.measure(ready, timing.Rounds(turn_seconds=0.1), rate),
            **{name: {"skipped": reason} for name, reason in skipped.items()},
        }
    return result


def main() -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs room too
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write the JSON; printed otherwise")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for the interpreter")
    parser.add_argument("--check_only", action="store_true", help="time nothing")
    options = parser.parse_args()
    device = jax.devices()[0]
    result: dict[str, Any] = {"machine": machine.describe()}
    result["checks"] = []
    for case in cases(options.tiny):
        result["checks"].append(check(case))
        print(json.dumps(result["checks"][-1]), file=sys.stderr, flush=True)
    passed = all(one["passed"] for one in result["checks"])
    if passed and not options.check_only:
        if device.platform != "gpu":
            parser.error("times mean something on a GPU only; give --check_only elsewhere")
        result["full bfloat16 8192 x 64"] = timed(Full(), 8192, 16, ["pallas", "cudnn"])
        bigbird = BigBird(block_size=128)
        result["bigbird bfloat16 16384 x 64, block 128"] = timed(bigbird, 16384, 8, ["pallas", "xla"])
    text = json.dumps(result, indent=2)
    print(text) if options.out is None else options.out.write_text(text + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
