"""The base and the big transformer (Vaswani et al. 2017, table 3) as language models: the decoder, without an encoder.

  python -m experiments.inspect --config=configs/transformer.py:base
  python -m experiments.run --config=configs/transformer.py:base --workdir=runs/transformer_base

The argument is base or big. Sizes, dropout, steps, warmup and Adam are those of table 3 and section 5; norms stand
after each sum, the activation is ReLU, positions are sinusoidal, and input and output share one table (section 3.4).
What the paper counts for both halves (65 and 213 million parameters) is 38 and 113 million here: there is no encoder
and no attention to one. Its 25,000 tokens a side of a batch are 48 rows of 512 here; the learning rate is the peak of
equation 3. Label smoothing and the average of the last checkpoints are left out. Train on texts of your own
(--config.task.path=FOLDER): the plays that are the default are small for it.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2 --config.model.num_layers=2 --config.model.width=32
--config.model.mlp_dim=64 --config.task.max_len=64 --config.task.num_validation=20 --config.task.num_test=20
--config.task.vocab_size=300.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets

# Width, width of the feed-forward layer, heads, dropout, steps.
ROWS = {"base": (512, 2_048, 8, 0.1, 100_000), "big": (1_024, 4_096, 16, 0.3, 300_000)}
WARMUP = 4_000


def get_config(arg: str = "base") -> ConfigDict:
    """The experiment of one row."""
    width, mlp_dim, num_heads, dropout_rate, num_steps = presets.choice(arg, ROWS)
    return presets.experiment(
        f"transformer_{arg}",
        attention=presets.causal(presets.attention("full")),
        task={"name": "language_model", "max_len": 512, "vocab": "subword", "vocab_size": 37_000},
        model={
            "name": "decoder",
            "num_layers": 6,
            "width": width,
            "num_heads": num_heads,
            "mlp_dim": mlp_dim,
            "dropout_rate": dropout_rate,
            "norm": "post",
            "activation": "relu",
        },
        optimizer={
            "name": "adam",
            "learning_rate": (width * WARMUP) ** -0.5,
            "schedule": "rsqrt",
            "warmup_steps": WARMUP,
            "weight_decay": 0.0,
            "clip_norm": None,
            "b1": 0.9,
            "b2": 0.98,
            "eps": 1e-9,
        },
        train={
            "num_steps": num_steps,
            "batch_size": 48,
            "eval_every": 1_000,
            "checkpoint_every": 1_000,
            "log_every": 100,
        },
    )
