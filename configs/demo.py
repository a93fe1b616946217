"""ListOps up to 128 tokens on a tiny model: the smallest experiment that comes with xformer.

  python -m experiments.run --config=configs/demo.py:full --workdir=runs/demo_full

The argument is an attention variant, as in configs/listops.py. Smoke size: --config.train.num_steps=10.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets


def attention(variant: str) -> dict[str, Any]:
    """The attention section of a variant."""
    return presets.attention(variant, bigbird={"num_random_blocks": 1}, linformer={"rank": 16})


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"demo_{arg}",
        attention=attention(arg),
        task={"name": "listops", "preset": "listops_128", "num_train": 20_000, "num_validation": 1_000},
        model={"num_layers": 2, "width": 64, "num_heads": 4, "mlp_dim": 128},
        optimizer={"learning_rate": 2e-3, "warmup_steps": 50},
        train={"num_steps": 400, "batch_size": 32, "eval_every": 50, "checkpoint_every": 200, "log_every": 20},
    )
