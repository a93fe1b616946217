"""An experiment of parts from outside: xformer run --config=own_parts/config.py --workdir=runs/own.

It takes seconds and shows how parts are named; what it learns in 20 steps is no result.
"""

from typing import Any


def get_config() -> dict[str, Any]:
    """The config."""
    position = {"name": "own_parts.position:DistanceBias", "reach": 8}
    return {
        "name": "own",
        "attention": {"name": "own_parts.attention:FirstAndNear", "reach": 4, "position": position},
        "model": {"name": "own_parts.model:OneLayer"},
        "task": {"name": "own_parts.task:FirstToken"},
        "optimizer": {"name": "own_parts.optimizer:signum", "learning_rate": 0.01},
        "train": {
            "num_steps": 20,
            "batch_size": 16,
            "eval_every": 10,
            "mesh": {"data": 1},
            "metrics": ({"name": "own_parts.metric:Near", "k": 2},),
            "select_metric": "top2",
            "callbacks": ({"name": "own_parts.callbacks:Notes"}, {"name": "ema", "decay": 0.9}),
        },
    }
