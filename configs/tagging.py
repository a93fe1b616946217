"""Token classification: the operator that each token of a ListOps expression of up to 128 tokens belongs to.

  python -m experiments.run --config=configs/tagging.py:full --workdir=runs/tagging_full

The innermost bracket that is open decides, so a token alone does not tell, and neither does a bag of tokens. Measured,
full, one seed, on a CPU: 76.8 % of 2,000 test expressions' tokens are right; the commonest class is 25.2 %. The
argument is an attention variant, as in configs/listops.py. Smoke size: --config.train.num_steps=10
--config.task.num_train=200 --config.task.num_validation=50 --config.task.num_test=50.
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
        f"tagging_{arg}",
        attention=attention(arg),
        task={"name": "tagging", "num_train": 20_000, "num_validation": 1_000},
        model={"name": "token_classifier", "num_layers": 2, "width": 64, "num_heads": 4, "mlp_dim": 128},
        optimizer={"learning_rate": 2e-3, "warmup_steps": 50},
        train={"num_steps": 400, "batch_size": 32, "eval_every": 100, "checkpoint_every": 200, "log_every": 20},
    )
