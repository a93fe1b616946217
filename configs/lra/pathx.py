"""Path-X: Pathfinder at 128 x 128 pixels, of the Long Range Arena (Tay et al. 2021, section 2.2.6), for an accelerator.

  python -m experiments.run --config=configs/lra/pathx.py:bigbird --workdir=runs/lra_pathx_bigbird

200,000 images of 16,384 pixels, 3.3 GB, are drawn first, on the CPUs. They are our own, from the published parameters
(docs/guides/arena.md). The argument is an attention variant, as in configs/listops.py.

Published: every model failed, at chance (50 %). Hyperparameters are those of the repository's config.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2 --config.task.preset=pathfinder_16
--config.task.num_train=100 --config.task.num_validation=20 --config.task.num_test=20.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets

STEPS_PER_EPOCH = 160_000 // 64


def attention(variant: str) -> dict[str, Any]:
    """The attention section of a variant."""
    return presets.attention(variant)


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"lra_pathx_{arg}",
        attention=attention(arg),
        task={"name": "pathfinder", "preset": "pathx"},
        model={
            "num_layers": 1,
            "width": 32,
            "num_heads": 2,
            "head_dim": 8,
            "mlp_dim": 32,
            "dropout_rate": 0.1,
            "attention_dropout_rate": 0.1,
            "pooling": "mean",
            "position_embedding": "learned",
        },
        optimizer={
            "learning_rate": 1e-3,
            "warmup_steps": STEPS_PER_EPOCH,
            "weight_decay": 0.0,
            "b2": 0.98,
            "eps": 1e-9,
            "clip_norm": 1.0,
        },
        train={
            "num_steps": 200 * STEPS_PER_EPOCH,
            "batch_size": 64,
            "eval_every": STEPS_PER_EPOCH,
            "checkpoint_every": STEPS_PER_EPOCH,
            "log_every": 50,
        },
    )
