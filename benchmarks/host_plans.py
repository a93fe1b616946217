"""Time and memory that the host needs to plan long sequences, each case in a process of its own.

    python -m benchmarks.host_plans                     # all cases; writes benchmarks/results/host_plans.json
    python -m benchmarks.host_plans --case=bigbird_1m   # one, printed

Seconds are wall-clock and processor time of making the plan, after the import; bytes are how far the process's peak
memory rises above that after the import. The load of the machine before and after is written beside them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xformer.attention import BigBird, Full, Shape, Window

OUT = Path(__file__).parent / "results" / "host_plans.json"
HEADS = 8
K = 1024


def one_layer(op: Any, length: int) -> Callable[[], Any]:
    """Makes the plan of a call."""
    return lambda: op.tile_plan(length, length, HEADS)


def layers(op: Any, length: int, num_layers: int) -> Callable[[], Any]:
    """Makes the plans of all layers of a model."""
    return lambda: op.plans(Shape(1, length, length, HEADS, 64), num_layers).tiles


CASES: dict[str, Callable[[], Any]] = {
    "bigbird_64k": one_layer(BigBird(), 64 * K),
    "bigbird_64k_12_layers": layers(BigBird(), 64 * K, 12),
    "bigbird_256k": one_layer(BigBird(), 256 * K),
    "bigbird_256k_12_layers": layers(BigBird(), 256 * K, 12),
    "bigbird_1m": one_layer(BigBird(), 1024 * K),
    "bigbird_1m_12_layers": layers(BigBird(), 1024 * K, 12),
    "bigbird_causal_256k": one_layer(BigBird(causal=True), 256 * K),
    "bigbird_etc_256k": one_layer(BigBird(num_global_tokens=100), 256 * K),
    "bigbird_block_16_64k": one_layer(BigBird(16), 64 * K),
    "bigbird_block_512_256k": one_layer(BigBird(512), 256 * K),
    "bigbird_block_513_256k": one_layer(BigBird(513), 256 * K),
    "window_1m": one_layer(Window(128, 128), 1024 * K),
    "window_causal_1m": one_layer(Window(128, 128, causal=True), 1024 * K),
    "full_256k": one_layer(Full(), 256 * K),
    "full_causal_256k": one_layer(Full(causal=True), 256 * K),
}


def measure(name: str) -> dict[str, Any]:
    """Runs one case in this process, which has made no plan yet."""
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    before, wall, processor = peak(), time.perf_counter(), time.process_time()
    plan = CASES[name]()
    seconds, busy = time.perf_counter() - wall, time.process_time() - processor
    listed = sum(group.key_tiles.size for group in plan.groups)
    return {
        "seconds": round(seconds, 3),
        "processor_seconds": round(busy, 3),
        "peak_bytes_above_import": peak() - before,
        "entries": int(listed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="run this case alone and print what was measured")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case)))
        return
    load = os.getloadavg()[0]
    cases = {}
    for name in CASES:
        command = [sys.executable, "-m", "benchmarks.host_plans", f"--case={name}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        cases[name] = json.loads(done.stdout)
        print(name, cases[name], flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "load_average": {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)},
        "heads": HEADS,
        "cases": cases,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
