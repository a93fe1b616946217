"""Multi-query associative recall: 4 key-value pairs among 64 tokens; each key comes again, and its value is asked.

  python -m experiments.run --config=configs/recall.py:full --workdir=runs/recall_full

64 symbols, so that it runs on a CPU. Attention is causal, as published; a bidirectional model ended at 25.6 % after 600
steps of 32 and 26.4 % after 2,500 (one run each, an MLP of 128): it knows the values of an example, one of four being
25 %, and not which belongs to a key. Linformer, and whatever else cannot be causal, is bidirectional.

Measured, one seed each, full attention, test accuracy: 100 % after these 1,500 steps of 16 (validation 26 % after 250,
40 % after 500, 100 % after 750), and 100 % after 500 steps of 64. At 128 tokens and 8 pairs
(--config.task.preset=recall_128_small) the same 1,500 steps of 16 end at 13.3 %, where one of eight is 12.5 %. There a
wider model without an MLP did better: in a plain training loop around this model, with 32 examples a step, width 128
and mlp_dim 0, accuracy was 99.5 to 99.9 % within 310 steps (three runs: twice with rotary positions, once with learned
ones that start smaller); with an MLP of 128 it was 13.8 % after 500 (one run). Through this config, whose gradients
are clipped, the same gave 13.7 % after 500 steps with learned positions and 16.0 % after 400 with rotary ones (one run
each). Without clipping, with rotary positions alone, accuracy was 99.95 % after 600 steps of 32 (validation 13.5 %
after 200, 99.8 % after 400; one run), and 100 % with a constant rate of 2e-3 and no weight decay (one run):
--config=recall:rotary --config.optimizer.clip_norm=None --config.model.width=128 --config.model.mlp_dim=0
--config.model.position_embedding=none --config.train.batch_size=32 --config.train.num_steps=600
--config.task.preset=recall_128_small. Learned positions at 256 tokens and 4 pairs: 24.6 % after as many (one run).
recall_128_4_pairs and recall_256_4_pairs differ from recall_64_small in length only.

The four settings of Arora et al. 2024, figure 2 (8,192 symbols, 100,000 examples): --config.task.preset=recall_64 (4
pairs), recall_128 (8), recall_256 (16) and recall_512 (64). Longer ones, which were not published: recall_1k, recall_2k
and recall_4k (256 pairs). Theirs has no MLP. The argument is an attention variant, as in configs/listops.py.
Smoke size: --config.train.num_steps=10 --config.task.preset=recall_64_small --config.task.num_train=200
--config.task.num_validation=50 --config.task.num_test=50.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets


def attention(variant: str) -> dict[str, Any]:
    """The attention section of a variant: causal, unless its op refuses that."""
    return presets.causal(
        presets.attention(variant, bigbird={"num_random_blocks": 1}, linformer={"projection": "conv"})
    )


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"recall_{arg}",
        attention=attention(arg),
        task={"name": "recall", "preset": "recall_64_small", "num_validation": 500, "num_test": 1_000},
        model={
            "name": "token_classifier",
            "num_layers": 2,
            "width": 64,
            "num_heads": 1,
            "mlp_dim": 64,
            "position_embedding": "learned",
        },
        optimizer={"learning_rate": 3e-3, "warmup_steps": 50},
        train={"num_steps": 1_500, "batch_size": 16, "eval_every": 250, "checkpoint_every": 500, "log_every": 50},
    )
