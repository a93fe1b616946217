"""The study: quality at equal training FLOPs, attention variant by position, each variant tuned.

  make study                                      all parts, one after the other, into runs/study/PART
  python -m experiments.compare --config=configs/study.py:needle --workdir=runs/study/needle

The argument is a part. Probes: needle (127 symbols), order (31) and recall (64, causal but for Linformer); six variants
with each position that they take, five seeds. Texts: reviews (films, 512 subwords), documents (the Linux kernel's,
1,024 subwords) and documents_pretrained, where every run starts from a masked language model of its own; four variants,
three seeds. Within a part each run takes the steps that the same training FLOPs pay for, those of pretraining among
them. Of four learning rates each variant has the one that is best on validation, with a seed of its own. All variants
of a part have the same depth, width, data and batch size. Without a position term probes and reviews have absolute
positions, documents none; Shaw's and rotary positions stand alone. Measured so far: needle in an hour, order in 17
minutes, both on two CPU cores beside other work (docs/results.md).
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets

PROBE_VARIANTS = (
    "full", "full+shaw", "full+rotary", "window", "window+shaw", "window+rotary", "bigbird", "bigbird+shaw",
    "bigbird+rotary", "longformer", "longformer+shaw", "longformer+rotary", "linformer", "linear", "linear+rotary",
)  # fmt: skip
SIZES = {
    "needle": {"max_len": 127, "reach": 16, "block_size": 8, "rank": 32},
    "order": {"max_len": 31, "reach": 3, "block_size": 2, "rank": 8},
}  # in symbols: of the text, of patterns to each side, of BigBird's blocks, and Linformer's rank
PROBES = (*SIZES, "recall")
TEXTS = ("reviews", "documents", "documents_pretrained")
TEXT_VARIANTS = ("full", "window", "linformer", "bigbird")
TRAIN_FLOPS = {"needle": 2e11, "order": 1e11, "recall": 8e11, "reviews": 3e12, "documents": 4e12,
               "documents_pretrained": 4e12}  # fmt: skip
PRETRAIN_FLOPS = 1.5e12  # of those of a run, where it is pretrained
LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
HIGHER_RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)  # of documents, whose shipped experiment has 1e-2


def get_config(arg: str = "needle") -> ConfigDict:
    """One part of the study."""
    make = presets.choice(arg, dict.fromkeys(PROBES, probe) | dict.fromkeys(TEXTS, texts))
    comparison: ConfigDict = make(arg)
    before = comparison.get("pretrain", {}).get("train_flops", 0.0)
    comparison.budget = ConfigDict({"train_flops": TRAIN_FLOPS[arg] - before})
    rates = HIGHER_RATES if arg.startswith("documents") else LEARNING_RATES
    comparison.tune = ConfigDict({"optimizer": {"learning_rate": rates}})
    return comparison


def probe(name: str) -> ConfigDict:
    """A probe, six variants with each position that they take, five seeds; recall is causal where a variant can be."""
    if name == "recall":
        base = presets.sibling(__file__, "compare_recall").get_config().base  # of 64 symbols
        base.model.position_embedding = "learned"
    else:
        base = presets.sibling(__file__, name).get_config()
        base.task = {"name": name, "max_len": SIZES[name]["max_len"], "num_validation": 500, "num_test": 1_000}
        base.train.update(num_steps=150, eval_batch_size=250)
    base.train.update(eval_every=base.train.num_steps // 3, checkpoint_every=base.train.num_steps)
    comparison = presets.comparison(f"study_{name}", base, {}, seeds=range(5), report={"measure_up_to": 0})
    for variant in PROBE_VARIANTS:
        changes: dict[str, Any] = {"attention": attention(name, variant)}
        if "+" in variant:
            changes["model"] = {"position_embedding": "none"}
        comparison.variants[variant] = ConfigDict(changes)
    return comparison


def attention(probe: str, variant: str) -> dict[str, Any]:
    """The attention section of a variant on a probe: patterns reach a few symbols to each side."""
    if probe == "recall":
        return presets.sibling(__file__, "recall").attention(variant)
    sizes = SIZES[probe]
    return presets.attention(
        variant,
        window={"left": sizes["reach"], "right": sizes["reach"]},
        longformer={"window": 2 * sizes["reach"]},
        bigbird={"block_size": sizes["block_size"], "num_random_blocks": 1},
        linformer={"rank": sizes["rank"], "projection": "conv"},
        shaw={"max_distance": 4},
    )


def texts(name: str) -> ConfigDict:
    """Film reviews or kernel documents, four variants, three seeds."""
    experiment = presets.sibling(__file__, "imdb" if name == "reviews" else "linux_docs")
    base = experiment.get_config()
    base.train.update(num_steps=300, batch_size=16, eval_every=75, checkpoint_every=75, length_buckets=4)
    attentions = {variant: experiment.attention(variant) for variant in TEXT_VARIANTS}
    comparison = presets.comparison(f"study_{name}", base, attentions, seeds=range(3), report={"measure_up_to": 0})
    if name == "documents_pretrained":
        comparison.pretrain = ConfigDict({"train_flops": PRETRAIN_FLOPS, "learning_rate": 4e-3, "dropout_rate": 0.1})
    return comparison
