"""Attention variants and a convolutional network on Fashion-MNIST: quality against FLOPs, three seeds.

  python -m experiments.compare --config=configs/compare_images.py --workdir=runs/compare_images

The runs are those of configs/images.py. `convnet` has no attention and about the FLOPs of `full`: the comparison is of
quality for compute, as that of Dosovitskiy et al. 2021, figure 5, and not of its size. 44 TFLOP, 24 minutes on two
cores beside other work; what it found is in docs/results.md.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=4 --config.seeds=0.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets

VARIANTS = ("full", "shaw_2d", "shaw", "window", "bigbird", "linformer", "performer")


def get_config() -> ConfigDict:
    """The comparison."""
    images = presets.sibling(__file__, "images")
    attentions = {variant: images.attention(variant) for variant in VARIANTS}
    report = {"cost_lengths": (64, 256, 1024), "measure_up_to": 1024}
    comparison = presets.comparison("images", images.get_config(), attentions, seeds=(0, 1, 2), report=report)
    comparison.variants.convnet = ConfigDict({"attention": {"name": "none"}, "model": images.CONVNET})
    return comparison
