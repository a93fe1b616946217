"""Four attention variants on long kernel documents (17 classes, 4,096 subword tokens), from scratch or pretrained.

  make linux-docs        both, one after the other:
  python -m experiments.compare --config=configs/compare_linux_docs.py:scratch --workdir=runs/linux_docs_scratch
  python -m experiments.compare --config=configs/compare_linux_docs.py:pretrained --workdir=runs/linux_docs_pretrained

With `pretrained` every run starts from a masked language model of its own, of the same texts and with the same
attention. All runs cost 4 TFLOP, pretraining included: each variant takes the steps that these pay for, of 8 documents
of like length. Three seeds. Measured on two CPU cores beside other work (docs/results.md): from scratch, in 52
minutes, window 79.8 %, bigbird 78.3, linformer 65.1, full, which gets 85 steps, 48.4, TF-IDF 84.4; pretrained, in 106
minutes, 75.2, 67.8, 57.1 and 36.8: so little pretraining teaches about how often each token stands, and no more.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets

VARIANTS = ("full", "window", "linformer", "bigbird")
TRAIN_FLOPS, PRETRAIN_FLOPS = 4e12, 1.5e12  # of a run in all, and what of them `pretrained` spends on pretraining


def get_config(arg: str = "scratch") -> ConfigDict:
    """The comparison, `scratch` or `pretrained`."""
    if arg not in ("scratch", "pretrained"):
        raise ValueError(f"got {arg!r}, takes scratch or pretrained")
    linux_docs = presets.sibling(__file__, "linux_docs")
    base = linux_docs.get_config()
    base.task.max_len = 4096
    base.train.update(num_steps=300, batch_size=8, eval_every=100, checkpoint_every=100, length_buckets=4)
    base.optimizer.warmup_steps = 30
    attentions = {variant: linux_docs.attention(variant) for variant in VARIANTS}
    report = {"cost_lengths": (1024, 4096, 16384), "measure_up_to": 4096}
    comparison = presets.comparison(f"linux_docs_{arg}", base, attentions, seeds=(0, 1, 2), report=report)
    comparison.budget = ConfigDict({"train_flops": TRAIN_FLOPS})
    if arg == "pretrained":
        comparison.budget.train_flops -= PRETRAIN_FLOPS
        comparison.pretrain = ConfigDict({"train_flops": PRETRAIN_FLOPS, "learning_rate": 4e-3, "dropout_rate": 0.1})
    return comparison
