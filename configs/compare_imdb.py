"""Four attention variants on IMDb reviews (512 subword tokens), three seeds, on two CPU cores.

  python -m experiments.compare --config=configs/compare_imdb.py --workdir=runs/compare_imdb

Measured, test accuracy in percent, 95 % intervals over the seeds: full 87.0 +- 1.6, linformer 87.8 +- 0.8, bigbird
86.9 +- 0.7, shaw 87.5 +- 0.8; TF-IDF with logistic regression on the same tokens has 88.3, the commonest class 50.1. It
took 75 minutes on two slow CPU cores that did other work too. See docs/results.md.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config() -> ConfigDict:
    """The comparison."""
    imdb = presets.sibling(__file__, "imdb")
    attentions = {variant: imdb.attention(variant) for variant in ("full", "linformer", "bigbird", "shaw")}
    return presets.comparison("compare_imdb", imdb.get_config(), attentions, seeds=(0, 1, 2))
