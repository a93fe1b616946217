"""Which attention remembers? Four key-value pairs among 64, 128 and 256 tokens; eight causal variants, three seeds.

  python -m experiments.compare --config=configs/compare_recall.py --workdir=runs/compare_recall

Multi-query associative recall in symbols (configs/recall.py): each key comes again, and its value is asked. The three
tasks differ in length only. Depth, width, data, steps, learning rate and rotary positions are the same for all, and no
variant was tuned. As in Arora et al. 2024 there is no MLP; gradients are not clipped, since with clipping full
attention did not learn 8 pairs at 128 tokens (configs/recall.py).

Measured, test accuracy in percent at 64, 128 and 256 tokens, means over seeds (intervals: docs/results.md): full and
bigbird 100, 100, 100; topk_blocks 99.6, 99.6, 98.7; sparse 42.8, 76.8, 62.4; linear 98.9, 83.7, 38.0; window 47.7,
25.1, 14.8; retention 26.8, 26.4, 19.4; performer 25.0, 25.2, 25.4; a guess among the values of an example is 25. It
took 55 minutes on two CPU cores that did other work too.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets

VARIANTS = ("full", "window", "bigbird", "sparse", "topk_blocks", "linear", "performer", "retention")
LENGTHS = {64: "recall_64_small", 128: "recall_128_4_pairs", 256: "recall_256_4_pairs"}


def get_config() -> ConfigDict:
    """The comparison."""
    recall = presets.sibling(__file__, "recall")
    tasks = {}
    for length, preset in LENGTHS.items():
        config = tasks[f"tokens_{length}"] = recall.get_config()
        config.task.preset = preset
        config.model.update(width=128, mlp_dim=0, position_embedding="none")
        config.optimizer.clip_norm = None
        config.train.update(num_steps=400, batch_size=32, eval_every=100, checkpoint_every=400)
    attentions = {variant: recall.attention(f"{variant}+rotary") for variant in VARIANTS}
    report = {"cost_lengths": (1024, 4096, 16384), "measure_up_to": 0}
    return presets.comparison("recall", tasks["tokens_64"], attentions, seeds=(0, 1, 2), report=report, tasks=tasks)
