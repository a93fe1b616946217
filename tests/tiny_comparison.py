"""A comparison of two variants on a small needle task, as a config file: tests of tuning and budgets share it."""

import pprint

BASE = {
    "name": "base",
    "attention": {"name": "full"},
    "model": {"num_layers": 1, "width": 8, "num_heads": 2, "mlp_dim": 8, "pooling": "cls"},
    "task": {"name": "needle", "max_len": 16, "num_train": 40, "num_validation": 8, "num_test": 8},
    "optimizer": {"name": "adamw", "learning_rate": 0.01},
    "train": {
        "num_steps": 4,
        "batch_size": 4,
        "eval_every": 2,
        "checkpoint_every": 2,
        "log_every": 1,
        "mesh": {"data": 1},
    },
}
VARIANTS = {"full": {}, "window": {"attention": {"name": "window", "left": 4, "right": 4}}}


def write(path, *, base=None, variants=None, **keys):
    """Writes the config file `path` and gives it back; `base` changes keys of sections, `variants` adds some."""
    sections = {name: {**BASE[name], **changes} for name, changes in (base or {}).items()}
    config = {
        "name": "tiny",
        "base": BASE | sections,
        "variants": VARIANTS | (variants or {}),
        "seeds": (0, 1),
        "report": {"cost_lengths": (16,), "measure_up_to": 0},
        **keys,
    }
    path.write_text(f"def get_config():\n    return {pprint.pformat(config, sort_dicts=False)}\n")
    return path
