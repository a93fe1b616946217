"""Four attention variants on IMDb reviews (512 subword tokens), three seeds, on two CPU cores.

  python -m experiments.compare --config=configs/compare_imdb.py --workdir=runs/compare_imdb

The report docs/results/compare_imdb/report.md is of an earlier size of configs/imdb.py (1,024 tokens of a vocabulary of
1,024, two layers, 240 steps of 16). Test accuracy in percent, 95 % intervals over the seeds: full 76.8 +- 0.9,
linformer 75.9 +- 1.4, bigbird 77.5 +- 1.6, shaw 76.9 +- 3.0; the commonest class is 50.1.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config() -> ConfigDict:
    """The comparison."""
    imdb = presets.sibling(__file__, "imdb")
    attentions = {variant: imdb.attention(variant) for variant in ("full", "linformer", "bigbird", "shaw")}
    return presets.comparison("compare_imdb", imdb.get_config(), attentions, seeds=(0, 1, 2))
