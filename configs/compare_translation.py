"""The Transformer against the LSTM that it replaced, from English into German, at equal training FLOPs; three seeds.

  python -m experiments.compare --config=configs/compare_translation.py --workdir=runs/compare_translation

Manual pages, as in configs/translation.py, cut at 64 tokens of 4,000 subwords. `seq2seq_lstm` is the model of Bahdanau
et al. 2015. Each run takes the steps that 1.5e13 FLOPs pay for; of three learning rates each model has the one that is
best on validation, with a seed of its own. The best checkpoint by perplexity translates the test pages with beams of 4.
Measured on two slow CPU cores, in an hour and a half beside other work: test perplexity 20.3 +- 0.4, the LSTM's
14.6 +- 0.4; BLEU 14.9 +- 1.5 and 16.8 +- 1.4. Both chose the highest rate. See docs/results.md.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets

LSTM = {"name": "seq2seq_lstm", "num_layers": 1, "width": 128, "hidden_dim": 128, "dropout_rate": 0.1}


def get_config() -> ConfigDict:
    """The comparison."""
    base = presets.sibling(__file__, "translation").get_config("full")
    base.task.update(max_len=64, vocab_size=4_000)
    base.model.update(num_layers=2, width=128, mlp_dim=512)
    comparison = presets.comparison(
        "translation", base, {"transformer": presets.attention("full")}, seeds=(0, 1, 2), report={"measure_up_to": 0}
    )
    comparison.variants.seq2seq_lstm = ConfigDict({"attention": {"name": "none"}, "model": LSTM})
    comparison.budget = ConfigDict({"train_flops": 1.5e13})
    comparison.tune = ConfigDict({"optimizer": {"learning_rate": (1e-3, 2e-3, 4e-3)}})
    return comparison
