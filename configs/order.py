"""Order: four of eight symbols stand among 31, and the one right after a cue is asked for.

  python -m experiments.run --config=configs/order.py:shaw --workdir=runs/order_shaw

Which symbols there are tells no more than one guess in four; which comes after the cue is told by relative positions.
The argument is an attention variant, as in configs/listops.py; attention, model and training are those of
configs/needle.py. Smoke size: --config.train.num_steps=10 --config.task.num_train=200 --config.task.num_validation=50
--config.task.num_test=50.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    config = presets.sibling(__file__, "needle").get_config(arg)
    config.name = f"order_{arg}"
    config.task = {"name": "order", "max_len": 31}
    if config.attention.name == "linformer":
        config.attention.rank = 16  # half of the 32 positions
    return config
