"""Sentiment of whole IMDb reviews, 1,024 subword tokens each, on a model for CPUs.

  python -m experiments.run --config=configs/imdb.py:full --workdir=runs/imdb_full

The vocabulary has 1,024 byte-level BPE tokens learnt from the training split: small enough that reviews stay long.
Linformer projects by convolution (section 4 of its paper) into as many slots as BigBird has keys for a query: learned
projections of 1,024 tokens would be most of so small a model.
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
        task={"name": "imdb", "max_len": 1024, "vocab": "subword", "vocab_size": 1024},
        model={"num_layers": 2, "width": 64, "num_heads": 2, "mlp_dim": 128},
        optimizer={"learning_rate": 5e-3, "warmup_steps": 30},
        train={"num_steps": 240, "batch_size": 16, "eval_every": 80, "checkpoint_every": 80, "log_every": 10},
    )
