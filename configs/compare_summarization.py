"""Who tells what a manual page is about? The rows of the WikiSum table (Liu et al. 2018, table 3), three seeds each.

  python -m experiments.compare --config=configs/compare_summarization.py --workdir=runs/compare_summarization
  python -m experiments.compare --config=configs/compare_summarization.py:experts --workdir=runs/summarization_experts

T-ED, T-D and T-DMCA as in configs/summarization.py; with `experts` each feed-forward layer is 4, of which a token takes
one. Depth, width, data, steps and learning rate are the same for all; T-ED has its layers twice, for text and summary.
Each result holds ROUGE with its interval (`test`, `test_details`), what a lead and a nearest-neighbour copy score
(`baseline`), and the summaries themselves (`test_outputs.jsonl`). 142 TFLOP (--dry_run), 28 minutes on two cores beside
other work; what it found is in docs/results.md. 824 pages to train on are few: what models of this size can't learn
from them, the comparison can't show. `experts` was not run in whole yet.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config(arg: str = "dense") -> ConfigDict:
    """The comparison, `dense` or with `experts`."""
    num_experts = presets.choice(arg, {"dense": 1, "experts": 4})
    summarization = presets.sibling(__file__, "summarization")
    rows = {name: summarization.get_config(name) for name in summarization.ROWS}
    for row in rows.values():
        row.model.num_experts = num_experts
    attentions = {name: row.attention.to_dict() for name, row in rows.items()}
    report = {"measure_up_to": 0}
    comparison = presets.comparison(f"summarization_{arg}", rows["t_ed"], attentions, seeds=(0, 1, 2), report=report)
    for name, row in rows.items():
        comparison.variants[name]["model"] = row.model
    return comparison
