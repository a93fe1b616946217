"""A needle in a haystack: one of eight symbols stands somewhere among 255 others; which?

  python -m experiments.run --config=configs/needle.py:bigbird --workdir=runs/needle_bigbird

The answer is read from a CLS vector in front, so what counts is how far attention carries. Guessing is right in one
example of eight. The argument is an attention variant, as in configs/listops.py. Linformer projects by convolution:
learned projections learnt slower in one run each (100 steps, 63 symbols).
Smoke size: --config.train.num_steps=10 --config.task.num_train=200 --config.task.num_validation=50
--config.task.num_test=50.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets


def attention(variant: str) -> dict[str, Any]:
    """The attention section of a variant."""
    return presets.attention(
        variant,
        window={"left": 8, "right": 8},
        bigbird={"block_size": 8, "num_random_blocks": 1},
        linformer={"rank": 32, "projection": "conv"},
        shaw={"max_distance": 4},
    )


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"needle_{arg}",
        attention=attention(arg),
        task={"name": "needle", "max_len": 255},
        model={"pooling": "cls", "num_layers": 2, "width": 64, "num_heads": 2, "mlp_dim": 64},
        optimizer={"learning_rate": 4e-3, "schedule": "constant", "warmup_steps": 20},
        train={"num_steps": 300, "batch_size": 32, "eval_every": 100, "checkpoint_every": 300, "log_every": 25},
    )
