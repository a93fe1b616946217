"""Sentiment of whole IMDb reviews, 512 subword tokens each, on a model for CPUs.

  python -m experiments.run --config=configs/imdb.py:full --workdir=runs/imdb_full

The vocabulary has 8,192 byte-level BPE tokens learnt from the training split. Measured for these settings, three seeds,
20 % of 24,904 reviews for test: full 87.0 +- 1.6 %, where TF-IDF with logistic regression, which every run computes on
the tokens that it reads itself, scores 88.3 % (compare_imdb.py has more variants).
Linformer projects by convolution (section 4 of its paper) into as many slots as BigBird has keys for a query: learned
projections of so many tokens would be most of so small a model.
Bytes, as in the Long Range Arena: --config.task.vocab=bytes --config.task.vocab_size=None. The argument is an attention
variant, as in configs/listops.py. Smoke size: --config.train.num_steps=10 --config.train.batch_size=2.
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
        f"imdb_{arg}",
        attention=attention(arg),
        task={"name": "imdb", "max_len": 512, "vocab": "subword", "vocab_size": 8192},
        model={"num_layers": 1, "width": 64, "num_heads": 2, "mlp_dim": 128, "dropout_rate": 0.3},
        optimizer={"learning_rate": 2e-3, "warmup_steps": 50, "weight_decay": 0.1},
        train={"num_steps": 1400, "batch_size": 32, "eval_every": 200, "checkpoint_every": 200, "log_every": 20},
    )
