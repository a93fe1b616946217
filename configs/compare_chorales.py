"""Who knows how a chorale goes on? Absolute positions, Shaw's and the Music Transformer's, three seeds each.

  python -m experiments.compare --config=configs/compare_chorales.py --workdir=runs/compare_chorales

Huang et al. 2018, table 1, at a size for two slow cores: two layers, rows of 512 tokens and 600 steps. Depth, width,
data, steps and learning rate are the same for all; only absolute has position embeddings, which are learnt. The report
has the loss in nats a token.

Measured, 95 % intervals over seeds, nats a token on test: full 0.722 ± 0.045, shaw 0.779 ± 0.043, music 0.772 ± 0.141;
none is clearly better (docs/results.md).
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config() -> ConfigDict:
    """The comparison."""
    base = presets.sibling(__file__, "chorales").get_config("full")
    base.model.num_layers = 2
    base.task.max_len = 512
    base.train.num_steps = 600
    attentions = {
        "full": presets.causal(presets.attention("full")),
        "shaw": presets.causal(presets.attention("shaw")),
        "music": presets.causal(presets.attention("music")),
    }
    comparison = presets.comparison("chorales", base, attentions, seeds=(0, 1, 2), report={"measure_up_to": 0})
    for variant in ("shaw", "music"):
        comparison.variants[variant]["model"] = ConfigDict({"position_embedding": "none"})
    return comparison
