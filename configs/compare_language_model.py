"""Four causal variants on Shakespeare's plays, read 1,024 and 4,096 bytes at a time, three seeds.

  python -m experiments.compare --config=configs/compare_language_model.py --workdir=runs/compare_language_model
  python -m experiments.compare --config=configs/compare_language_model.py:context_1024 --workdir=runs/plays_1024

The argument is context_1024, context_4096 or both with + between them. Depth, width, bytes a step, steps, learning rate
and rotary positions are the same for all, and no variant was tuned; 600 steps of 8,192 bytes read 4.5 MB of plays about
once, so there is no dropout. Test and validation ask every byte once, from at least half a context before it.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets

VARIANTS = ("full", "window", "bigbird", "linear")
CONTEXTS = {"context_1024": 1024, "context_4096": 4096}
BYTES_A_STEP = 8_192


def get_config(arg: str = "context_1024+context_4096") -> ConfigDict:
    """The comparison of one context or both."""
    language_model = presets.sibling(__file__, "language_model")
    tasks = {name: language_model.get_config() for name in CONTEXTS if name in arg.split("+")}
    if wrong := [name for name in arg.split("+") if name not in CONTEXTS]:
        raise ValueError(f"got {wrong[0]!r}, takes {', '.join(CONTEXTS)}, or both with + between them")
    for name, config in tasks.items():
        batch_size = BYTES_A_STEP // CONTEXTS[name]
        config.task.update(max_len=CONTEXTS[name], num_validation=16 * batch_size)
        config.model.update(num_layers=2, position_embedding="none", dropout_rate=0.0)
        # On one device: two rows a step are too few for more.
        config.train.update(
            mesh={"data": 1}, num_steps=600, batch_size=batch_size, eval_every=200, checkpoint_every=200
        )
    attentions = {name: presets.causal(presets.attention(f"{name}+rotary")) for name in VARIANTS}
    report = {"cost_lengths": (1024, 4096, 16384), "measure_up_to": 4096}
    first = next(iter(tasks.values()))
    whole = tasks if len(tasks) > 1 else None
    return presets.comparison("language_model", first, attentions, seeds=(0, 1, 2), report=report, tasks=whole)
