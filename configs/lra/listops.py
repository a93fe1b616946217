"""ListOps at the size of the Long Range Arena (Tay et al. 2021, appendix A): made for an accelerator.

  python -m experiments.run --config=configs/lra/listops.py:full --workdir=runs/lra_listops_full

The argument is an attention variant, as in configs/listops.py.
`make lra-listops` trains the variants of configs/compare_lra.py.

Published test accuracy in percent: Transformer 36.37, Linformer 35.70, BigBird 36.05, Local 15.82; the majority class
gives 17.3. Smoke size: --config.train.num_steps=10 --config.train.batch_size=2 --config.task.num_train=100
--config.task.num_validation=20 --config.task.num_test=20.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets

WARMUP_STEPS = 1000


def attention(variant: str) -> dict[str, Any]:
    """The attention section of a variant."""
    return presets.attention(variant, linformer={"rank": 16})


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"lra_listops_{arg}",
        attention=attention(arg),
        task={"name": "listops", "preset": "listops_2k"},
        model={
            "num_layers": 4,
            "width": 512,
            "num_heads": 8,
            "mlp_dim": 1024,
            "dropout_rate": 0.1,
            "attention_dropout_rate": 0.1,
            "pooling": "cls",
        },
        optimizer={
            "learning_rate": 0.05 / WARMUP_STEPS**0.5,  # the paper's code has 0.05 / sqrt(step) from there on
            "schedule": "rsqrt",
            "warmup_steps": WARMUP_STEPS,
            "weight_decay": 0.1,
            "b2": 0.98,
            "eps": 1e-9,
        },
        train={"num_steps": 5000, "batch_size": 32, "eval_every": 500, "checkpoint_every": 500, "log_every": 50},
    )
