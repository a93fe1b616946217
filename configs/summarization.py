"""Manual pages in a line: the rows of the WikiSum table (Liu et al. 2018, table 3), and T-ED by attention variant.

  python -m experiments.run --config=configs/summarization.py:t_dmca --workdir=runs/summarization_t_dmca
  python -m experiments.generate --workdir=runs/summarization_t_dmca --input=texts.txt --out=summaries.txt

The argument is a row: t_ed, encoder and decoder; t_d, a decoder of text, separator and summary in one sequence;
t_dmca, that with local attention (blocks of 64) and memory-compressed attention (stride 3) in turn. Or it is an
attention variant, as in configs/listops.py, which is that of the encoder of t_ed. Experts, as in the paper's last rows:
--config.model.num_experts=8. A summary is found by a beam search, 4 wide, with a length penalty of 0.6 (section 5.3).

The data is 1,099 pages of Debian's packages manpages and manpages-dev; `xformer data summarization --list` shows how to
get them. Texts of one's own, a table with the fields source and target: --config.task.path=FILE.jsonl; or two files
whose lines belong together: --config.task.path=texts.txt --config.task.target_path=summaries.txt. ROUGE needs
rouge-score (pip install 'xformer-jax[summarization]').
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2 --config.model.num_layers=2 --config.model.width=32
--config.model.mlp_dim=64 --config.task.max_len=48 --config.task.num_validation=20 --config.task.num_test=20
--config.task.vocab_size=400.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from xformer import presets

LOCAL, COMPRESSED = {"block_size": 64}, {"stride": 3}
ROWS = ("t_ed", "t_d", "t_dmca")


def get_config(arg: str = "t_ed") -> ConfigDict:
    """The experiment of a row, or of one attention variant."""
    attention, model = row(arg)
    return presets.experiment(
        f"summarization_{arg}",
        attention=attention,
        task={
            "name": "summarization",
            "max_len": 256,
            "target_max_len": 32,
            "vocab_size": 4_000,
            "packing": False,
            "label_smoothing": 0.1,
        },
        model={
            "num_layers": 4,
            "width": 128,
            "num_heads": 4,
            "mlp_dim": 512,
            "dropout_rate": 0.2,
            **model,
        },
        optimizer={"learning_rate": 2e-3, "warmup_steps": 100, "b2": 0.98},
        train={"num_steps": 500, "batch_size": 16, "eval_every": 100, "checkpoint_every": 100, "log_every": 20},
    )


def row(arg: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attention section, and what is the row's own in the model section."""
    if arg == "t_d":
        return presets.causal(presets.attention("full")), {"name": "separator_decoder"}
    if arg == "t_dmca":
        layers = (presets.attention("local", local=LOCAL), presets.attention("compressed", compressed=COMPRESSED))
        return {"name": "layers", "layers": tuple(map(presets.causal, layers))}, {"name": "separator_decoder"}
    slots = dict.fromkeys(("decoder_attention", "cross_attention"), presets.attention("full"))
    return presets.attention("full" if arg == "t_ed" else arg, *ROWS), {"name": "encoder_decoder", **slots}
