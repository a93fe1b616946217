"""Clothes in Fashion-MNIST, 28 x 28 grey pixels in patches of 4: a Vision Transformer for CPUs, or a convolutional net.

  python -m experiments.run --config=configs/images.py:full --workdir=runs/images_full

The images are those of the Debian package dataset-fashion-mnist, which need not be installed; the error of a run
without them has the command. The argument is an attention variant, as in configs/listops.py: 49 patches in row-major
order are what it attends to; `shaw_2d` has relative positions by row and by column. Or it is `convnet`, a residual
network of about the same FLOPs. Other images: --config.task.source=cifar10, or --config.task.source=folder with
--config.task.path. Images of another size go on from a run by --config.task.size and --config.train.init_from.
Measured, full, one seed, on two cores of a busy machine: 82.2 % of 10,000 test images after 600 steps of 64 (1.8 TFLOP
of training); the commonest class is 10.0 %. Smoke size: --config.train.num_steps=10 --config.train.batch_size=4.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets

CONVNET = {"name": "convnet", "widths": (12, 24, 48), "num_blocks": 1}


def attention(variant: str) -> dict[str, Any]:
    """The attention section of a variant."""
    own = {"bigbird": {"block_size": 7, "num_random_blocks": 1}, "linformer": {"rank": 16}}
    return presets.attention(variant, "convnet", **own, window={"left": 7, "right": 7})


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant, or of the convolutional network."""
    vision = {"name": "vision", "patch_size": 4, "num_layers": 4, "width": 64, "num_heads": 4, "mlp_dim": 128}
    return presets.experiment(
        f"images_{arg}",
        attention={"name": "none"} if arg == "convnet" else attention(arg),
        task={"name": "images"},
        model=CONVNET if arg == "convnet" else vision,
        optimizer={"learning_rate": 2e-3, "warmup_steps": 50, "weight_decay": 0.05},
        train={"num_steps": 600, "batch_size": 64, "eval_every": 200, "checkpoint_every": 200, "log_every": 20},
    )
