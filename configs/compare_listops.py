"""Attention variants on ListOps up to 512 tokens, three seeds, on a CPU.

python -m experiments.compare --config=configs/compare_listops.py --workdir=runs/compare_listops
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config() -> ConfigDict:
    """The comparison."""
    listops = presets.sibling(__file__, "listops")
    variants = ("full", "window", "linformer", "bigbird", "shaw", "rotary")
    attentions = {variant: listops.attention(variant) for variant in variants}
    return presets.comparison("compare_listops", listops.get_config(), attentions, seeds=(0, 1, 2))
