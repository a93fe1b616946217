"""Batches a second of the loader alone against the steps a second of training, for the smallest shipped config.

  python benchmarks/loader.py [--config=configs/demo.py:linformer] [--out=benchmarks/results/loader.json]

The loader is read as training reads it, whole batches in order, with nothing else going on; training is the run's own
median step. Exits with 1 where the loader delivers less than five times what training consumes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from xformer import config as configs
from xformer import experiment as experiments
from xformer.train.feed import Feed
from xformer.train.trainer import versions

NEEDED = 5  # times what training consumes
STEPS = 60  # of training
BATCHES = 2000  # read in each round
ROUNDS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="configs/demo.py:linformer")
    parser.add_argument("--data_dir")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    experiment = experiments.build(configs.load_config(args.config, [f"train.num_steps={STEPS}"]))
    with tempfile.TemporaryDirectory() as folder:
        trainer = experiment.trainer(folder, args.data_dir)
        result = trainer.fit()
    rates, size = [], experiment.train.batch_size
    batches = trainer.data.batches("train", size, seed=experiment.seed, shuffle=True, epochs=None)
    with Feed(batches) as feed:
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for _ in range(BATCHES):
                next(feed)
            rates.append(BATCHES / (time.perf_counter() - begun))
    delivered, consumed = statistics.median(rates), 1e3 / result["step_time_ms"]
    report = {
        "config": args.config,
        "batch_size": size,
        "loader_batches_per_second": round(delivered, 1),
        "loader_rounds": [round(rate, 1) for rate in rates],
        "training_steps_per_second": round(consumed, 2),
        "times": round(delivered / consumed, 1),
        "input_wait_share": result["input_wait_share"],
        "device": f"{os.cpu_count()} CPU cores; {result['device'].partition(';')[0]}",
        "versions": versions(),
    }
    print(json.dumps(report, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["times"] >= NEEDED else 1


if __name__ == "__main__":
    sys.exit(main())
