"""Does one paper cite the other? The retrieval task of the Long Range Arena (section 2.2.3): made for an accelerator.

  python -m experiments.run --config=configs/lra/retrieval.py:full --workdir=runs/lra_retrieval_full \\
    --config.task.path=lra_release/tsv_data

The folder holds the release's new_aan_pairs.train.tsv, .eval.tsv and .test.tsv (texts of the ACL Anthology Network,
which are not ours to ship). Without a path it reads generated pairs of up to 64 letters: another task, for a smoke run.
The argument is an attention variant, as in configs/listops.py.

Published test accuracy in percent (the arena's readme): Transformer 57.46, Linformer 52.27, BigBird 59.29, Local 53.39.
Hyperparameters are those of the repository's config: its warmup of 8,000 steps is longer than its 5,000 steps of
training. Clipping gradients at norm 1 is ours.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2 --config.task.max_len=64
--config.task.num_train=200 --config.task.num_validation=50 --config.task.num_test=50.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets

WARMUP_STEPS = 8000


def attention(variant: str) -> dict[str, Any]:
    """The attention section of a variant."""
    return presets.attention(variant)


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"lra_retrieval_{arg}",
        attention=attention(arg),
        task={"name": "retrieval", "max_len": 4000},
        model={
            "name": "two_tower",
            "num_layers": 4,
            "width": 128,
            "num_heads": 4,
            "mlp_dim": 512,
            "dropout_rate": 0.1,
            "attention_dropout_rate": 0.1,
            "pooling": "cls",
        },
        optimizer={
            "learning_rate": 0.05 / WARMUP_STEPS**0.5,  # the arena's code has 0.05 / sqrt(step) from there on
            "schedule": "rsqrt",
            "warmup_steps": WARMUP_STEPS,
            "weight_decay": 0.1,
            "b2": 0.98,
            "eps": 1e-9,
        },
        train={"num_steps": 5000, "batch_size": 32, "eval_every": 500, "checkpoint_every": 500, "log_every": 50},
    )
