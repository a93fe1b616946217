"""Times the GPU kernels beside their peers on the card at hand, after checking them against the reference there.

    python -m benchmarks.gpu_kernels --out=gpu_kernels.json          # on a GPU: checks, then times

`xformer check-device` chooses between what this package has; this sets it beside others. Times are medians of turns
that the contenders take, compilation left out. Peers: those of `xformer.bench.peers`, cuDNN through
`jax.nn.dot_product_attention` and, where PyTorch is installed with CUDA, its SDPA and its compiled FlexAttention with
the same blocks. The JSON names the device and every version. Exit code 1 when a check fails; then nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from xformer.attention import Attention, BigBird, Full, Linear, Shape
from xformer.attention.kernels import tables
from xformer.bench import benchmark, contender, device_check, machine, timing
from xformer.bench.jax_contenders import ours
from xformer.bench.peers import peers


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
    options = parser.parse_args()
    if jax.devices()[0].platform != "gpu":
        parser.error("times mean something on a GPU only; xformer check-device --interpret checks elsewhere")
    say = lambda line: print(line, file=sys.stderr, flush=True)
    table = device_check.check_all(["pallas", tables.STATE, "cudnn"], say)
    result: dict[str, Any] = {"machine": machine.describe(), "passed": sorted(table.passed), "failed": table.failed}
    if not table.failed:
        result["full bfloat16 8192 x 64"] = timed(Full(), 8192, 16, ["pallas", "cudnn"])
        bigbird = BigBird(block_size=128)
        result["bigbird bfloat16 16384 x 64, block 128"] = timed(bigbird, 16384, 8, ["pallas", "xla"])
        result["linear causal bfloat16 16384 x 64"] = timed(Linear(causal=True), 16384, 8, ["pallas", "xla"])
    text = json.dumps(result, indent=2)
    print(text) if options.out is None else options.out.write_text(text + "\n")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
