"""A comparison's workdir as the trainer leaves it, made of numbers instead of runs."""

import json
import math
from pathlib import Path

import numpy as np

from xformer.report import CostRow, Pattern
from xformer.tasks import Classification

ATTENTION = {
    "full": {"name": "full", "position": {"name": "none"}},
    "linformer": {"name": "linformer", "rank": 64, "position": {"name": "none"}},
    "bigbird": {"name": "bigbird", "block_size": 64, "position": {"name": "none"}},
    "full+shaw": {"name": "full", "position": {"name": "shaw", "max_distance": 16}},
}
FLOPS = {"full": 3.1e9, "linformer": 1.3e9, "bigbird": 1.9e9, "full+shaw": 3.9e9}
BEST = {"full": 0.84, "linformer": 0.79, "bigbird": 0.835, "full+shaw": 0.845}


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def result(variant, seed, num_steps, accuracy, **changes):
    step = FLOPS.get(variant, 1e9)
    return {
        "name": f"fake-{variant}", "attention": variant, "seed": seed, "num_params": 412_000, "flops_per_step": step,
        "train_flops": step * num_steps, "step_time_ms": step / 4e7, "peak_memory_bytes": int(step / 8),
        "eval": {"accuracy": accuracy + 0.01, "loss": 1 - accuracy, "examples": 2000, "tokens": 1_000_000},
        "test": {"accuracy": accuracy, "loss": 1 - accuracy, "examples": 2000, "tokens": 1_000_000},
        "best_step": num_steps, "versions": {"jax": "0.10.2", "xformer": "0.1.0"}, "device": "cpu", "batch_size": 16,
        "tokens_per_step": 16384, "input_wait_share": 0.013,
        "info": {"majority_accuracy": {"train": 0.5, "validation": 0.51, "test": 0.503}},
        **changes,
    }  # fmt: skip


def make(workdir, *, variants=tuple(ATTENTION), seeds=(0, 1, 2), num_steps=1000, **changes):
    """Writes a finished comparison; `changes` override result keys of every run."""
    workdir = Path(workdir)
    base = {"model": {"width": 64, "num_layers": 2}, "train": {"num_steps": num_steps}}
    ops = {name: ATTENTION.get(name, {"name": "window", "left": 8}) for name in variants}
    config = {"name": "fake: which attention?", "base": base | {"attention": ops[variants[0]]}, "seeds": list(seeds),
              "variants": {name: {"attention": op} for name, op in ops.items()}}  # fmt: skip
    write_json(workdir / "config.json", config)
    for number, variant in enumerate(variants):
        for seed in seeds:
            rng = np.random.default_rng([number, seed])
            folder = workdir / "runs" / f"{variant}-{seed}"
            curve = []
            for step in range(num_steps // 10, num_steps + 1, num_steps // 10):
                top = BEST.get(variant, 0.7)
                accuracy = 0.5 + (top - 0.5) * (1 - math.exp(-4 * step / num_steps)) + rng.normal(0, 0.006)
                curve.append({"step": step, "split": "train", "loss": 1 - accuracy, "train_flops": step})
                curve.append({"step": step, "split": "validation", "loss": 1 - accuracy, "accuracy": accuracy,
                              "train_flops": step * FLOPS.get(variant, 1e9), "seconds": step / 10})  # fmt: skip
            write_json(folder / "config.json", base | {"name": variant, "seed": seed, "attention": ops[variant]})
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))
            write_json(folder / "result.json", result(variant, seed, num_steps, curve[-1]["accuracy"], **changes))
    return workdir


def keep_examples(workdir, variants, seeds=(0, 1, 2), reach=8, furthest=32, each=20):
    """Keeps test examples of every distance from a CLS vector; a "window" is right up to `reach`, others always."""
    distance = np.tile(np.arange(1, furthest + 1), each)
    for variant in variants:
        right = (distance <= reach) if variant == "window" else np.ones_like(distance, bool)
        for seed in seeds:
            folder = Path(workdir) / "runs" / f"{variant}-{seed}"
            config = json.loads((folder / "config.json").read_text())
            write_json(folder / "config.json", config | {"model": config["model"] | {"pooling": "cls"}})
            np.savez(
                folder / "test_examples.npz",
                accuracy=np.stack([right, np.ones_like(right)]).astype(np.float32), distance=distance,
            )  # fmt: skip


def edit(workdir, variant, seed, **changes):
    """Changes keys of one run's result."""
    path = Path(workdir) / "runs" / f"{variant}-{seed}" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cost_rows(variants=tuple(ATTENTION), measured_up_to=4096):
    rows = []
    for variant in variants:
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            full = 4 * length * length * 256
            flops = {"full": full, "full+shaw": 1.5 * full, "linformer": 2 * length * 64 * 256 * 4}.get(
                variant, 4 * length * 640 * 256
            )
            overhead = 1.0 if variant.startswith("full") else 3.0
            time = overhead * flops / 5e10 * 1e3 + 0.2 if length <= measured_up_to else math.nan
            memory = flops / 256 if length <= measured_up_to else math.nan
            rows.append(CostRow(variant, length, flops, 3 * flops, time, 2.6 * time, memory))
    return rows


def patterns():
    distance = np.arange(512)[:, None] // 32 - np.arange(512)[None] // 32
    window = (abs(distance) <= 1)[None]
    block = np.arange(512) // 32
    edge = (block == 0) | (block == 15)
    everywhere = (edge[:, None] | edge[None])[None]
    rng = np.random.default_rng(0)
    random = np.kron(rng.random((16, 16)) < 0.15, np.ones((32, 32))).astype(bool)[None]
    parts = {"random": random, "window": window, "global": everywhere}
    return {
        "full": Pattern(np.ones((1, 512, 512), bool)),
        "linformer": Pattern(None, note="no pairs of tokens:\nkeys and values pooled\ninto 64 slots"),
        "bigbird": Pattern(random | window | everywhere, parts),
        "full+shaw": Pattern(np.ones((1, 512, 512), bool), note="shaw positions"),
    }


def keep_classes(workdir, variants, names, seeds=(0, 1, 2), wrong=3):
    """Test details of ten examples a class, of which seed s takes `wrong + s` of the first for the last."""
    for variant in variants:
        for seed in seeds:
            confusion = 10 * np.eye(len(names), dtype=int)
            confusion[0, 0] -= wrong + seed
            confusion[0, -1] += wrong + seed
            family = Classification()
            rows, columns = (np.repeat(index.ravel(), confusion.ravel()) for index in np.indices(confusion.shape))
            edit(workdir, variant, seed, test_details=family.details({"targets": rows, "predictions": columns}, names))
