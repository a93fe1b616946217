"""The eight models of GPT-3 (Brown et al. 2020, table 2.1), as printed: sizes to inspect, or to train on many devices.

  python -m experiments.inspect --config=configs/gpt3.py:xl --mesh='{"fsdp": 8}'
  python -m experiments.run --config=configs/gpt3.py:small --workdir=runs/gpt3_small

The argument is a row: small, medium, large, xl, 2.7b, 6.7b, 13b or 175b. Inspecting needs no memory to speak of: arrays
are abstract. Section 2.1: context 2,048; the feed-forward layer is 4 times as wide as the model; dense and locally
banded layers take turns, as in the Sparse Transformer (Child et al. 2019). How wide the band is it does not say: 256
tokens here. The vocabulary is that of GPT-2 in size, 50,257; it is learnt from the texts of the task, so a small corpus
has fewer.

What does not add up in the table, and is built as printed, as `head_dim` need not divide the width:
- xl: 24 heads of 128 are 3,072 features in a width of 2,048; that makes 1.52 billion parameters where the table says
  1.3. With 16 heads they are 1.32 (--config.model.num_heads=16).
- 13b: 40 heads of 128 are 5,120, the width is 5,140: 12.94 billion parameters; with a width of 5,120 12.85.
- 175b: batches of 3.2 million tokens are no whole number of rows: 1,600 rows, 3.28 million. The other batches are the
  powers of two next to those printed.
Appendix B: Adam with 0.9, 0.95 and 1e-8, gradients clipped at 1, weight decay 0.1, warmup over 375 million tokens,
300 billion tokens in all. Cosine decay to a tenth ends with the training here, theirs after 260 billion; their smaller
batches at the beginning are left out.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2 --config.model.num_layers=2 --config.model.width=32
--config.model.num_heads=2 --config.model.head_dim=16 --config.model.mlp_dim=64 --config.task.max_len=64
--config.task.num_validation=20 --config.task.num_test=20 --config.task.vocab_size=300.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets

# Layers, width, heads, features of a head, rows of a batch, learning rate.
ROWS = {
    "small": (12, 768, 12, 64, 256, 6e-4),
    "medium": (24, 1_024, 16, 64, 256, 3e-4),
    "large": (24, 1_536, 16, 96, 256, 2.5e-4),
    "xl": (24, 2_048, 24, 128, 512, 2e-4),
    "2.7b": (32, 2_560, 32, 80, 512, 1.6e-4),
    "6.7b": (32, 4_096, 32, 128, 1_024, 1.2e-4),
    "13b": (40, 5_140, 40, 128, 1_024, 1e-4),
    "175b": (96, 12_288, 96, 128, 1_600, 0.6e-4),
}
CONTEXT, BAND = 2_048, 256


def get_config(arg: str = "small") -> ConfigDict:
    """The experiment of one row."""
    num_layers, width, num_heads, head_dim, batch_size, learning_rate = presets.choice(arg, ROWS)
    dense = presets.causal(presets.attention("full"))
    banded = presets.causal(presets.attention("window", window={"left": BAND - 1, "right": 0}))
    tokens = batch_size * CONTEXT
    return presets.experiment(
        f"gpt3_{arg}",
        attention={"name": "layers", "layers": (dense, banded)},
        task={"name": "language_model", "max_len": CONTEXT, "vocab": "subword", "vocab_size": 50_257},
        model={
            "name": "decoder",
            "num_layers": num_layers,
            "width": width,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "mlp_dim": 4 * width,
            "norm_epsilon": 1e-5,
            "position_embedding": "learned",
            "scan_layers": True,
            "remat": True,
        },
        optimizer={
            "learning_rate": learning_rate,
            "warmup_steps": round(375e6 / tokens),
            "end_factor": 0.1,
            "weight_decay": 0.1,
            "b1": 0.9,
            "b2": 0.95,
            "eps": 1e-8,
        },
        train={
            "num_steps": round(300e9 / tokens),
            "batch_size": batch_size,
            "dtype": "bfloat16",
            "eval_every": 1_000,
            "checkpoint_every": 1_000,
            "log_every": 100,
        },
    )
