"""Kills a training process at random moments, again and again, and compares what it ends with to an undisturbed run.

  python tests/train_faults.py [--kills 50] [--out faults.json]

Every second kill waits for a checkpoint being written. Each restart is a new process with the same command. A run that
finishes is compared, bit for bit: every array of the last checkpoint, every row of `metrics.jsonl` but its times, the
result. Exits with 1 if anything differs. Takes about ten seconds a kill on two cores. `where` counts the kills before
the first row was written (`start`), between steps (`steps`) and while a checkpoint was written (`save`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from train_fake import arrays, rows, start_process

from xformer.train.trainer import versions

SETTINGS: dict[str, Any] = {
    "num_steps": 60, "checkpoint_every": 4, "eval_every": 7, "log_every": 3, "accumulate": 2, "dropout_rate": 0.3,
    "pause": 0.05,
}  # fmt: skip
RESULTS = ("eval", "test", "best_step", "train_flops", "tokens_per_step", "num_params")


def kill(process: subprocess.Popen, workdir: Path, in_save: bool, longest: float, draw: random.Random) -> str | None:
    """Kills the process at a random moment; where that was ("start", "steps", "save"), None if it ended before."""
    folder, deadline = workdir / "checkpoints", time.monotonic() + draw.uniform(0, longest)
    while process.poll() is None and (in_save or time.monotonic() < deadline):
        if in_save and any(folder.glob("*.tmp")) and time.monotonic() > deadline:
            time.sleep(draw.uniform(0, 0.1))
            break
        time.sleep(0.001)
    process.kill()
    process.communicate()
    if process.returncode == 0:
        return None
    if any(folder.glob("*.tmp")):
        return "save"
    return "steps" if (workdir / "metrics.jsonl").exists() else "start"


def differences(reference: Path, workdir: Path) -> list[str]:
    """What a finished run has otherwise than the undisturbed one."""
    found = [] if rows(reference) == rows(workdir) else ["metrics.jsonl"]
    last = SETTINGS["num_steps"]
    pairs = zip(arrays(reference, last), arrays(workdir, last), strict=True)
    found += [f"array {i}" for i, (one, other) in enumerate(pairs) if not np.array_equal(one, other)]
    one, other = (json.loads((folder / "result.json").read_text()) for folder in (reference, workdir))
    return found + [key for key in RESULTS if one[key] != other[key]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    report: dict[str, Any] = {"kills": 0, "where": {"start": 0, "steps": 0, "save": 0}, "runs": 0, "differences": []}
    report |= {"settings": SETTINGS, "device": f"CPU, {os.cpu_count()} cores", "versions": versions()}
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "undisturbed"
        begun = time.monotonic()
        process = start_process(reference, "", **SETTINGS)
        output, errors = process.communicate()
        if process.returncode:
            sys.exit(output + errors)
        longest = time.monotonic() - begun
        while report["kills"] < args.kills or report["runs"] == 0:
            workdir = Path(folder) / f"run-{report['runs']}"
            while not (workdir / "result.json").exists():
                process = start_process(workdir, "", **SETTINGS)
                if report["kills"] >= args.kills:
                    output, errors = process.communicate()
                    if process.returncode:
                        sys.exit(output + errors)
                elif (where := kill(process, workdir, report["kills"] % 2 == 1, longest, draw)) is not None:
                    report["kills"] += 1
                    report["where"][where] += 1
                    print(f"kill {report['kills']}: {where}", file=sys.stderr, flush=True)
            report["runs"] += 1
            report["differences"] += differences(reference, workdir)
    print(json.dumps(report))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
