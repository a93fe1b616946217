"""Pathfinder, 32 x 32 pixels, of the Long Range Arena (Tay et al. 2021, section 2.2.5): made for an accelerator.

  python -m experiments.run --config=configs/lra/pathfinder.py:full --workdir=runs/lra_pathfinder_full

200,000 images are drawn first, on the CPUs. They are our own, from the published parameters (docs/guides/arena.md), so
published numbers are a guide and no more. On a CPU: --config.task.preset=pathfinder_16. The argument is an attention
variant, as in configs/listops.py.

Published test accuracy in percent (the arena's readme): Transformer 71.40, Linformer 76.34, BigBird 74.87, Local 66.63.
Hyperparameters are those of the repository's Transformer; for Performer its authors name 8 heads instead of 4
(google-research/long-range-arena, issue 37).
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2 --config.task.preset=pathfinder_16
--config.task.num_train=100 --config.task.num_validation=20 --config.task.num_test=20.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets

STEPS_PER_EPOCH = 160_000 // 512


def attention(variant: str) -> dict[str, Any]:
    """The attention section of a variant."""
    return presets.attention(variant)


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"lra_pathfinder_{arg}",
        attention=attention(arg),
        task={"name": "pathfinder", "preset": "pathfinder_32"},
        model={
            "num_layers": 1,
            "width": 128,
            "num_heads": 4,
            "head_dim": 16,
            "mlp_dim": 128,
            "dropout_rate": 0.2,
            "attention_dropout_rate": 0.1,
            "pooling": "mean",
        },
        optimizer={
            "learning_rate": 1e-3,
            "warmup_steps": STEPS_PER_EPOCH,
            "weight_decay": 0.0,
            "b2": 0.98,
            "eps": 1e-9,
            "clip_norm": None,
        },
        train={
            "num_steps": 200 * STEPS_PER_EPOCH,
            "batch_size": 512,
            "eval_every": STEPS_PER_EPOCH,
            "checkpoint_every": STEPS_PER_EPOCH,
            "log_every": 50,
        },
    )
