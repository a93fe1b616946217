"""Checks the GPU kernels against the reference on the card at hand, then times them beside their peers on that card.

    python benchmarks/gpu_kernels.py --out=gpu_kernels.json          # on a GPU: checks, then times
    python benchmarks/gpu_kernels.py --check_only --tiny             # anywhere: the checks, interpreted, on tiny shapes

Times are medians of batches of calls, compilation left out. Peers: cuDNN through `jax.nn.dot_product_attention`, and
PyTorch's compiled FlexAttention with the same blocks where PyTorch is installed with CUDA. The JSON names the device
and every version. Exit code 1 when a check fails; then nothing is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention import ALiBi, Attention, BigBird, Full, Shape, Window
from xformer.attention.kernels import interpreted

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


def with_gradients(run: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Output and gradients of `run(query, key, value)`, given the cotangent last."""

    def both(*operands: jax.Array) -> Any:
        out, pull = jax.vjp(run, *operands[:-1])
        return out, *pull(operands[-1])

    return jax.jit(both)


def check(case: Case) -> dict[str, Any]:
    """Largest error of output and gradients against the reference in float32, as a share of the largest entry."""
    operands = arrays(2, case.length, 4, case.num_kv_heads, case.head_dim, case.dtype)
    mask = None
    if case.real is not None:
        mask = (jnp.arange(case.length) < jnp.asarray(case.real)[:, None])[:, None, None]
    op = dataclasses.replace(case.op, implementation=case.kernel)
    reference = dataclasses.replace(case.op, implementation="reference")
    with interpreted():
        got = with_gradients(lambda q, k, v: op(q, k, v, mask=mask))(*operands)
    exact = [x.astype(jnp.float32) for x in operands]
    with jax.default_matmul_precision("highest"):
        want = with_gradients(lambda q, k, v: reference(q, k, v, mask=mask))(*exact)
    errors = {}
    for name, x, y in zip(("output", "query", "key", "value"), got, want, strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        errors[name] = float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-9)) if np.isfinite(x).all() else float("inf")
    return {"case": str(case), "errors": errors, "passed": max(errors.values()) <= TOLERANCE[case.dtype]}


def milliseconds(run: Callable[[], Any], wait: Callable[[Any], None], batches: int = 7, calls: int = 20) -> float:
    """Median time of a call, over batches of calls waited for at their end."""
    wait(run())
    wait(run())
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(calls):
            out = run()
        wait(out)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times)


def timed(run: Callable[..., jax.Array], operands: list[jax.Array], flops: int) -> dict[str, float]:
    """Times of the forward pass and of forward and backward, and the rate of the forward one."""
    forward, both = jax.jit(run), with_gradients(run)
    forward_ms = milliseconds(lambda: forward(*operands[:-1]), jax.block_until_ready)
    both_ms = milliseconds(lambda: both(*operands), jax.block_until_ready)
    return {"forward_ms": forward_ms, "forward_backward_ms": both_ms, "forward_tflops": flops / forward_ms / 1e9}


def time_full(length: int = 8192, heads: int = 16, head_dim: int = 64) -> dict[str, Any]:
    """Full attention in bfloat16: ours (as chosen, and the Pallas kernel) and cuDNN called by JAX itself."""
    operands = arrays(1, length, heads, heads, head_dim, "bfloat16")
    flops = 4 * length**2 * heads * head_dim
    runs: dict[str, Callable[..., jax.Array]] = {
        "chosen": Full(),
        "pallas": Full(implementation="pallas"),
        "jax.nn cudnn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn"),
    }
    return {name: timed(run, operands, flops) for name, run in runs.items()}


def time_bigbird(length: int = 16384, heads: int = 8, head_dim: int = 64, block: int = 128) -> dict[str, Any]:
    """BigBird in bfloat16: ours (the Pallas kernel, and the engine in plain XLA) and FlexAttention."""
    op = BigBird(block_size=block)
    operands = arrays(1, length, heads, heads, head_dim, "bfloat16")
    result = {}
    for name in ("pallas", "xla"):
        run = dataclasses.replace(op, implementation=name)  # type: ignore[arg-type]
        result[name] = timed(run, operands, run.cost(Shape(1, length, length, heads, head_dim)).flops)
    result["torch flex_attention"] = time_flex(op, length, heads, head_dim, block)
    return result


def time_flex(op: Attention, length: int, heads: int, head_dim: int, block: int) -> dict[str, Any]:
    """The same blocks in PyTorch's FlexAttention, compiled."""
    if importlib.util.find_spec("torch") is None:
        return {"skipped": "PyTorch is not installed"}
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not torch.cuda.is_available():
        return {"skipped": "PyTorch has no CUDA here"}
    pattern = op.pattern(length, length, heads)
    assert pattern is not None
    table = torch.tensor(np.ascontiguousarray(pattern[:, ::block, ::block]), device="cuda")
    allowed = lambda b, h, q, k: table[h, q // block, k // block]
    mask = create_block_mask(allowed, 1, heads, length, length, device="cuda", BLOCK_SIZE=block)
    make = lambda: torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    query, key, value, cotangent = make(), make(), make(), make()
    attend = torch.compile(flex_attention)

    def both() -> Any:
        return torch.autograd.grad(attend(query, key, value, block_mask=mask), (query, key, value), cotangent)

    wait = lambda _: torch.cuda.synchronize()
    with torch.no_grad():
        forward_ms = milliseconds(lambda: attend(query, key, value, block_mask=mask), wait)
    return {"forward_ms": forward_ms, "forward_backward_ms": milliseconds(both, wait)}


def versions() -> dict[str, str]:
    """Versions of what is installed, of what matters here."""
    names = (
        "jax",
        "jaxlib",
        "jax-cuda12-plugin",
        "jax-cuda13-plugin",
        "nvidia-cudnn-cu12",
        "nvidia-cudnn-cu13",
        "torch",
    )
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write the JSON; printed otherwise")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for the interpreter")
    parser.add_argument("--check_only", action="store_true", help="time nothing")
    options = parser.parse_args()
    device = jax.devices()[0]
    result: dict[str, Any] = {"device": device.device_kind, "platform": device.platform, "versions": versions()}
    result["checks"] = []
    for case in cases(options.tiny):
        result["checks"].append(check(case))
        print(json.dumps(result["checks"][-1]), file=sys.stderr, flush=True)
    passed = all(one["passed"] for one in result["checks"])
    if passed and not options.check_only:
        if device.platform != "gpu":
            parser.error("times mean something on a GPU only; give --check_only elsewhere")
        result["full bfloat16 8192 x 64"] = time_full()
        result["bigbird bfloat16 16384 x 64, block 128"] = time_bigbird()
    text = json.dumps(result, indent=2)
    print(text) if options.out is None else options.out.write_text(text + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
