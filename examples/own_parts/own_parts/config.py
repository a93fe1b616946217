"""An experiment of parts from outside: xformer run --config=own_parts/config.py --workdir=runs/own."""

from typing import Any


def get_config() -> dict[str, Any]:
    """The config."""
    return {
        "name": "own",
        "attention": {"name": "own_parts.attention:FirstAndNear", "reach": 4},
        "model": {"num_layers": 1, "width": 16, "num_heads": 2, "mlp_dim": 16},
        "task": {"name": "own_parts.task:FirstToken"},
        "optimizer": {"name": "optax:adabelief", "learning_rate": 0.01},
        "train": {
            "num_steps": 20,
            "batch_size": 16,
            "eval_every": 10,
            "mesh": {"data": 1},
            "callbacks": ({"name": "own_parts.callbacks:Notes"}, {"name": "ema", "decay": 0.9}),
        },
    }
