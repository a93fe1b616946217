"""`make demo`"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config() -> ConfigDict:
    """The comparison."""
    needle, order = (presets.sibling(__file__, name) for name in ("needle", "order"))
    small = {"block_size": 4, "num_random_blocks": 1}
    attentions = {
        "full": needle.attention("full"),
        "window": needle.attention("window", window={"left": 4, "right": 4}),
        "bigbird": needle.attention("bigbird", bigbird=small),
        "linformer-8": needle.attention("linformer", linformer={"rank": 8, "projection": "conv"}),
        "linformer-32": needle.attention("linformer", linformer={"rank": 32, "projection": "conv"}),
        "shaw": needle.attention("shaw"),
    }
    tasks = {"needle": needle.get_config(), "order": order.get_config()}
    for name, config in tasks.items():
        config.task = {"name": name, "max_len": 63, "num_validation": 500, "num_test": 1_000}
    report = {"cost_lengths": (64, 256, 1024, 2048), "measure_up_to": 1024, "measure_seconds": 8.0}
    return presets.comparison("demo", tasks["needle"], attentions, seeds=(0, 1, 2), report=report, tasks=tasks)
