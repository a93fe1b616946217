"""The Long Range Arena (Tay et al. 2021, table 1) at its published sizes, three seeds: for an accelerator.

  make lra               (python -m experiments.compare --config=configs/compare_lra.py --workdir=runs/lra)
  make lra-listops       (--config=configs/compare_lra.py:listops --workdir=runs/lra_listops)

The argument is `all` or names of configs/lra with + between them: listops, text, retrieval, image, pathfinder, pathx;
each docstring has the published numbers. Variants: the eleven of the table and `shaw`; --config.variants=full,bigbird
trains fewer. Of several tasks there is one table, a row a variant and a column a task, as the arena prints it. Another
variant: --config.variants.window.attention.name=window. What one task changes: --config.tasks.text.train.num_steps=10.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets

TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
# Those of the paper's table, and relative positions.
VARIANTS = (
    "full", "local", "sparse", "longformer", "linformer", "reformer", "sinkhorn", "synthesizer", "bigbird", "linear",
    "performer", "shaw",
)  # fmt: skip


def get_config(arg: str = "all") -> ConfigDict:
    """The comparison of one task or several."""
    names = TASKS if arg == "all" else tuple(arg.split("+"))
    if wrong := [name for name in names if name not in TASKS]:
        raise ValueError(f"got {wrong[0]!r}, takes all, or names with + between them: {', '.join(TASKS)}")
    found = {name: presets.sibling(__file__, f"lra/{name}") for name in names}
    first = found[names[0]]
    attentions = {variant: first.attention(variant) for variant in VARIANTS}
    if len(names) == 1:
        return presets.comparison(f"lra_{arg}", first.get_config(), attentions, seeds=(0, 1, 2))
    tasks = {name: task.get_config() for name, task in found.items()}
    config = presets.comparison("lra", tasks[names[0]], attentions, seeds=(0, 1, 2), tasks=tasks)
    for name, task in found.items():  # the published attention of a task may have sizes of its own
        own = {variant: {"attention": task.attention(variant)} for variant in VARIANTS}
        own = {variant: changes for variant, changes in own.items() if changes["attention"] != attentions[variant]}
        config.tasks[name].variants = ConfigDict(own)
    return config
