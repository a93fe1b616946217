"""The ListOps column of the Long Range Arena (Tay et al. 2021, table 1) at its published size: made for an accelerator.

make lra-listops    (python -m experiments.compare --config=configs/compare_lra_listops.py --workdir=runs/lra_listops)
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config() -> ConfigDict:
    """The comparison."""
    lra_listops = presets.sibling(__file__, "lra_listops")
    attentions = {variant: lra_listops.attention(variant) for variant in ("full", "linformer", "bigbird", "shaw")}
    return presets.comparison("lra_listops", lra_listops.get_config(), attentions, seeds=(0, 1, 2))
