"""Classify your own documents: JSONL or CSV with the fields `text` and `label`, or a folder LABEL/*.txt.

  python -m experiments.run --config=configs/documents.py:bigbird --workdir=runs/mine --config.task.path=mine.jsonl

Without a path it reads examples/documents.jsonl, which shows the format. The argument is an attention variant, as in
configs/listops.py. Other lengths: --config.task.max_len=4096; what attention needs for it follows.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from xformer import presets

EXAMPLE = Path(__file__).parent.parent / "examples" / "documents.jsonl"


def get_config(arg: str = "bigbird") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"documents_{arg}",
        attention=presets.attention(arg, linformer={"projection": "conv"}),
        task={"name": "documents", "path": str(EXAMPLE), "max_len": 1024},
        model={"num_layers": 2, "width": 64, "num_heads": 2, "mlp_dim": 128, "dropout_rate": 0.1},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 50},
        train={"num_steps": 500, "batch_size": 16, "eval_every": 100, "checkpoint_every": 100, "log_every": 10},
    )
