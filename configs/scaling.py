"""Six sizes of a byte language model, full and windowed attention, at one budget of training FLOPs: for scaling laws.

  for budget in 4e11 1.6e12 6.4e12; do
    python -m experiments.compare --config=configs/scaling.py:$budget --workdir=runs/scaling/$budget
  done
  python -m experiments.scaling --workdir=runs/scaling

The argument is the training FLOPs of each run (4e11 where there is none); every size takes the steps that it affords,
and its schedule ends with them. Shakespeare's plays, 256 bytes at a time, rotary positions; parameters from 7 thousand
to 1.2 million, embeddings included. The learning rate falls with the square root of width, and nothing was tuned. Runs
to hold the laws against: --config.variants=full_128x6,window_128x6 at a larger budget. The plays have 4.5 MB, so small
models at a large budget read them more than once. One seed; more: --config.seeds=0,1,2. What 1e11 to 8e11 showed is in
docs/results.md.
Smoke size: --config.variants=full_16x1 --config.base.task.num_test=20 --config.base.train.batch_size=2.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets

ATTENTIONS = ("full", "window")
SIZES = {"16x1": (16, 1), "24x2": (24, 2), "32x3": (32, 3), "48x4": (48, 4), "80x5": (80, 5), "128x6": (128, 6)}


def get_config(arg: str = "4e11") -> ConfigDict:
    """The comparison at one budget of training FLOPs."""
    budget = float(arg)
    base = presets.sibling(__file__, "language_model").get_config()
    base.task.update(max_len=256, num_validation=64)
    base.model.update(position_embedding="none", dropout_rate=0.0)
    base.train.update(num_steps=1000, batch_size=8, eval_every=1000, checkpoint_every=1000, log_every=100)
    attentions, sizes = {}, {}
    for attention in ATTENTIONS:
        for size, (width, num_layers) in SIZES.items():
            name = f"{attention}_{size}"
            attentions[name] = presets.causal(presets.attention(f"{attention}+rotary", window={"left": 32}))
            sizes[name] = {"width": width, "num_layers": num_layers, "num_heads": width // 8, "mlp_dim": 4 * width}
    report = {"cost_lengths": (256,), "measure_up_to": 0}
    comparison = presets.comparison("scaling", base, attentions, seeds=(0,), report=report)
    for name, model in sizes.items():
        comparison.variants[name].model = ConfigDict({**comparison.variants[name].get("model", {}), **model})
        comparison.variants[name].optimizer = ConfigDict({"learning_rate": 4e-3 * (16 / model["width"]) ** 0.5})
    comparison.budget = ConfigDict({"train_flops": budget})
    return comparison
