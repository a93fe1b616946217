"""Four attention variants on whole IMDb reviews (1,024 subword tokens), three seeds, in under an hour on two CPU cores.

  python -m experiments.compare --config=configs/compare_imdb.py --workdir=runs/compare_imdb

Test accuracy in percent, 95 % intervals over the seeds: full 76.8 +- 0.9, linformer 75.9 +- 1.4, bigbird 77.5 +- 1.6,
shaw 76.9 +- 3.0; the commonest class is 50.1. It took 56 minutes on a machine with other work to do; the report is
docs/results/compare_imdb/report.md.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config() -> ConfigDict:
    """The comparison."""
    imdb = presets.sibling(__file__, "imdb")
    attentions = {variant: imdb.attention(variant) for variant in ("full", "linformer", "bigbird", "shaw")}
    return presets.comparison("compare_imdb", imdb.get_config(), attentions, seeds=(0, 1, 2))
