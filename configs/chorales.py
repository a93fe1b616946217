"""Bach's chorales, four voices in turns: the Music Transformer (Huang et al. 2018), or any other causal attention.

  python -m experiments.run --config=configs/chorales.py:music --workdir=runs/chorales
  python -m experiments.chorales --workdir=runs/chorales --out=runs/chorales/music

364 pieces in four parts of the PyPI package music21 (pip install --no-deps music21), of which 3 are copies; the second
command continues some of the test pieces, as MIDI and as pictures (pip install 'xformer-jax[music]'). The argument is
an attention variant, as in configs/listops.py, made causal: music is that of the paper, shaw that of Shaw et al. 2018;
variants with positions of their own
(music, shaw, rotary, alibi, t5) have no position embeddings, all others learnt ones.

Measured, one seed, music with 2 layers, rows of 512 and 300 steps of 8 (--config.model.num_layers=2
--config.task.max_len=512 --config.train.num_steps=300), 7.8 TFLOP: 0.878 nats a token on test, 77.3 % of the tokens
named right. Who knows how often each token is sung has 3.395 nats, who expects each voice to hold its pitch 1.318 and
77.0 %. What is above was not run to its end yet; a comparison of this size was (compare_chorales.py).
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2 --config.task.max_len=64.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config(arg: str = "music") -> ConfigDict:
    """The experiment of one attention variant."""
    attention = presets.causal(presets.attention(arg))
    relative = attention["position"]["name"] != "none"
    return presets.experiment(
        f"chorales_{arg}",
        attention=attention,
        task={"name": "chorales"},
        model={
            "name": "decoder",
            "num_layers": 4,
            "width": 128,
            "num_heads": 4,
            "mlp_dim": 512,
            "dropout_rate": 0.1,
            "position_embedding": "none" if relative else "learned",
        },
        optimizer={"learning_rate": 2e-3, "warmup_steps": 50},
        train={"num_steps": 1_000, "batch_size": 8, "eval_every": 100, "checkpoint_every": 100, "log_every": 20},
    )
