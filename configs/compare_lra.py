"""A column of the Long Range Arena (Tay et al. 2021, table 1) at its published size, three seeds: for an accelerator.

  make lra-listops    (python -m experiments.compare --config=configs/compare_lra.py:listops --workdir=runs/lra_listops)

The argument is one of configs/lra: listops, text, retrieval, image, pathfinder, pathx; each docstring has the published
numbers. More variants: --config.variants=full,window,bigbird+shaw.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config(arg: str = "listops") -> ConfigDict:
    """The comparison of one task."""
    task = presets.sibling(__file__, f"lra/{arg}")
    attentions = {variant: task.attention(variant) for variant in ("full", "linformer", "bigbird", "shaw")}
    return presets.comparison(f"lra_{arg}", task.get_config(), attentions, seeds=(0, 1, 2))
