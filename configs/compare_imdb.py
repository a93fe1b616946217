"""Four attention variants on whole IMDb reviews (1,024 subword tokens), three seeds, in under an hour on two CPU cores.

python -m experiments.compare --config=configs/compare_imdb.py --workdir=runs/compare_imdb
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import common, imdb


def get_config() -> ConfigDict:
    """The comparison."""
    attentions = {variant: imdb.attention(variant) for variant in ("full", "linformer", "bigbird", "shaw")}
    return common.comparison("compare_imdb", imdb.get_config(), attentions, seeds=(0, 1, 2))
