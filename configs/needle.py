"""A needle in a haystack: one of eight symbols stands somewhere among 255; which?

python -m experiments.run --config=configs/needle.py:bigbird --workdir=runs/needle_bigbird
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets


def attention(variant: str, **overrides: Any) -> dict[str, Any]:
    """The attention section of a variant."""
    own: dict[str, Any] = {
        "window": {"left": 8, "right": 8},
        "bigbird": {"block_size": 8, "num_random_blocks": 1},
        "linformer": {"rank": 32, "projection": "conv"},
        "shaw": {"max_distance": 4},
    }
    return presets.attention(variant, **own | overrides)


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"needle_{arg}",
        attention=attention(arg),
        task={"name": "needle", "max_len": 255},
        model={"pooling": "cls", "num_layers": 2, "width": 32, "num_heads": 2, "mlp_dim": 64},
        optimizer={"learning_rate": 4e-3, "warmup_steps": 20},
        train={
            "num_steps": 250,
            "batch_size": 32,
            "eval_batch_size": 250,
            "eval_every": 125,
            "checkpoint_every": 250,
            "log_every": 25,
        },
    )
