"""Masked language modelling on IMDb reviews: bits per character, and an encoder that imdb.py can start from.

  python -m experiments.run --config=configs/masked_lm.py:full --workdir=runs/masked_lm_full
  python -m experiments.run --config=configs/imdb.py:full --workdir=runs/imdb_full
    --config.train.init_from=runs/masked_lm_full

15 % of the tokens are hidden. Model, texts and vocabulary are those of imdb.py. Other texts, with their own lengths and
vocabulary: --config.task.source.name=linux_docs --config.task.source.max_len=1024, and --config.task.mask_share=0.3
hides more. Pretraining and fine-tuning of all variants of a comparison in one command: see compare_documents.py, or
docs/guides/pretrain.md. The argument is an attention variant, as in configs/listops.py. Measured, full, one seed, 200
steps of a run of 400, on validation: 2.43 bits per character and a loss of 6.78, where the shares of the tokens give
2.51 and 7.00. The whole size has not been measured.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    imdb = presets.sibling(__file__, "imdb").get_config(arg).to_dict()
    return presets.experiment(
        f"masked_lm_{arg}",
        attention=imdb["attention"],
        task={"name": "masked_lm", "source": imdb["task"]},
        model={"name": "masked_lm", **imdb["model"], "dropout_rate": 0.1},
        optimizer={"learning_rate": 2e-3, "warmup_steps": 50},
        train={"num_steps": 1400, "batch_size": 32, "eval_every": 200, "checkpoint_every": 200, "log_every": 20},
    )
