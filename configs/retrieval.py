"""Do two documents have the same topic? Generated pairs of letter sequences, read by one encoder each.

  python -m experiments.run --config=configs/retrieval.py:full --workdir=runs/retrieval_full

Your own pairs, a JSONL, CSV or TSV file with the fields text, text2 and label:
--config.task.path=pairs.csv --config.task.max_len=1024. Measured, full, one seed, on a CPU: 99.0 % of 1,000 generated
test pairs are right; half of them have the same topic. The argument is an attention variant, as in configs/listops.py.
Smoke size: --config.train.num_steps=10 --config.task.num_train=200 --config.task.num_validation=50
--config.task.num_test=50.
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
        f"retrieval_{arg}",
        attention=attention(arg),
        task={"name": "retrieval", "max_len": 64},
        model={"name": "two_tower", "num_layers": 1, "width": 64, "num_heads": 4, "mlp_dim": 128},
        optimizer={"learning_rate": 2e-3, "warmup_steps": 50},
        train={"num_steps": 600, "batch_size": 32, "eval_every": 100, "checkpoint_every": 200, "log_every": 20},
    )
