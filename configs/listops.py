"""ListOps up to 512 tokens on a model for CPUs: nested list operations, ten classes.

  python -m experiments.run --config=configs/listops.py:bigbird --workdir=runs/listops_bigbird

The argument is an attention variant: an op of xformer.attention.ATTENTIONS (full, window, bigbird, linformer, ...), a
position of POSITIONS with full attention (shaw, music, t5, alibi, rotary), or op+position such as bigbird+shaw. What is
not set here is chosen for the length of the inputs when the experiment is built: `inspect --keys` shows it.
Smoke size: --config.train.num_steps=10 --config.task.preset=listops_128.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets


def attention(variant: str) -> dict[str, Any]:
    """The attention section of a variant."""
    return presets.attention(variant, linformer={"projection": "conv"})


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"listops_{arg}",
        attention=attention(arg),
        task={"name": "listops", "preset": "listops_512"},
        model={"num_layers": 2, "width": 128, "num_heads": 4, "mlp_dim": 256},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 100},
        train={"num_steps": 1000, "batch_size": 16, "eval_every": 250, "checkpoint_every": 250, "log_every": 25},
    )
