"""`make demo`: four attention variants on ListOps up to 128 tokens, one seed, in minutes on two CPU cores.

python -m experiments.compare --config=configs/compare_demo.py --workdir=runs/demo
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import common, demo


def get_config() -> ConfigDict:
    """The comparison."""
    attentions = {variant: demo.attention(variant) for variant in ("full", "linformer", "bigbird", "shaw")}
    report = {"measure_up_to": 2048, "measure_seconds": 30.0}
    return common.comparison("demo", demo.get_config(), attentions, seeds=(0,), report=report)
