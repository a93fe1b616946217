"""`make demo`: four attention variants on ListOps up to 128 tokens, one seed, in minutes on two CPU cores.

  python -m experiments.compare --config=configs/compare_demo.py --workdir=runs/demo

It took 2 min 34 s on two cores. Test accuracy in percent, one seed: full 36.2, linformer 34.4, bigbird 36.4, shaw 35.4.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config() -> ConfigDict:
    """The comparison."""
    demo = presets.sibling(__file__, "demo")
    attentions = {variant: demo.attention(variant) for variant in ("full", "linformer", "bigbird", "shaw")}
    report = {"measure_up_to": 2048, "measure_seconds": 30.0}
    return presets.comparison("demo", demo.get_config(), attentions, seeds=(0,), report=report)
