"""Positions in the sequence, in the dependency tree, and both: tags of Turkish words, three seeds.

  python -m experiments.compare --config=configs/compare_treebank.py --workdir=runs/compare_treebank

The runs are those of configs/treebank.py, which says what the positions are; `no_positions` has neither. All else is
the same: depth, width, data order and steps. Beside them stand the commonest tag and the commonest tag of each word.
The trees are those of the annotators. Measured: sequential 90.1 +- 0.4 %, tree 92.7 +- 0.1 %, both 93.0 +- 0.4 %, no
positions 84.0 +- 0.7 % of the test words (docs/results.md), in 20 minutes on two slow CPU cores beside other work.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=4 --config.task.max_len=32 --config.seeds=0.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets

VARIANTS = {"sequential": "sequential", "tree": "tree", "both": "both", "no_positions": "none"}


def get_config() -> ConfigDict:
    """The comparison."""
    treebank = presets.sibling(__file__, "treebank")
    attentions = {variant: treebank.attention(positions) for variant, positions in VARIANTS.items()}
    report = {"cost_lengths": (64, 128, 256), "measure_up_to": 256}
    base = treebank.get_config("sequential")
    comparison = presets.comparison("treebank", base, attentions, seeds=(0, 1, 2), report=report)
    comparison.baseline = "sequential"
    return comparison
