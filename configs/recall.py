"""Multi-query associative recall: 8 key-value pairs among 128 tokens; each key comes again, and its value is asked.

  python -m experiments.run --config=configs/recall.py:full --workdir=runs/recall_full

128 symbols, so that it runs on a CPU; no setting has been found yet that learns it there. At 64 tokens and 4 pairs
(recall_64_small, one seed) full attention had 25.6 % of the test set after these 600 steps and 26.4 % after 2,500 at a
learning rate of 1e-3, Shaw's positions 25.6 % after 600: they tell the four values of an example from other symbols
(one of four is 25 %), and not which belongs to the key.

The four settings of Arora et al. 2024, figure 2 (8,192 symbols, 100,000 examples): --config.task.preset=recall_64 (4
pairs), recall_128 (8), recall_256 (16) and recall_512 (64). Longer ones, which were not published: recall_1k, recall_2k
and recall_4k (256 pairs). Theirs has no MLP and a causal decoder; this is the bidirectional encoder of a token
classifier. The argument is an attention variant, as in configs/listops.py.
Smoke size: --config.train.num_steps=10 --config.task.preset=recall_64_small --config.task.num_train=200
--config.task.num_validation=50 --config.task.num_test=50.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets


def attention(variant: str) -> dict[str, Any]:
    """The attention section of a variant."""
    return presets.attention(variant, bigbird={"num_random_blocks": 1}, linformer={"projection": "conv"})


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"recall_{arg}",
        attention=attention(arg),
        task={"name": "recall", "preset": "recall_128_small", "num_validation": 500, "num_test": 1_000},
        model={"name": "token_classifier", "num_layers": 2, "width": 64, "num_heads": 1, "mlp_dim": 128},
        optimizer={"learning_rate": 3e-3, "warmup_steps": 50},
        train={"num_steps": 600, "batch_size": 32, "eval_every": 200, "checkpoint_every": 200, "log_every": 25},
    )
