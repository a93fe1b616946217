"""Translation of manual pages from English into German, by attention variant: perplexity, BLEU and chrF.

  python -m experiments.run --config=configs/translation.py:full --workdir=runs/translation_full
  python -m experiments.generate --workdir=runs/translation_full --input=sentences.txt --out=translated.txt

The data is 10,002 paragraphs of Debian packages; `xformer data translation --list` shows how to get them, and others:
--config.task.languages=en-fr, --config.task.source=libreoffice. Texts of one's own, two files whose lines belong
together: --config.task.path=train.en --config.task.target_path=train.de; or a table with the fields source and target:
--config.task.path=pairs.tsv. The argument is an attention variant, as in configs/listops.py, which is that of the
encoder; --config.model.decoder_attention.name and --config.model.cross_attention.name set the other two. Variants that
take no segments have a row for each pair of texts. BLEU and chrF need sacrebleu (the extra `translation`).
`base` and `big` are the models of Vaswani et al. 2017 with their training: table 3, sections 3.4, 5.3 and 5.4; their
25,000 tokens a side of a batch are 98 rows of 256. The average of the last checkpoints is left out.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2 --config.model.num_layers=1 --config.model.width=32
--config.model.mlp_dim=64 --config.task.max_len=48 --config.task.num_validation=20 --config.task.num_test=20
--config.task.vocab_size=400.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant, or of one of the paper's models."""
    if arg in ("base", "big"):
        return _paper(arg)
    section = presets.attention(arg, "base", "big")
    return presets.experiment(
        f"translation_{arg}",
        attention=section,
        task={
            "name": "translation",
            "max_len": 128,
            "vocab_size": 8_000,
            "packing": presets.takes(section, "segment_ids"),
            "label_smoothing": 0.1,
        },
        model={
            "name": "encoder_decoder",
            "num_layers": 3,
            "width": 256,
            "num_heads": 4,
            "mlp_dim": 1_024,
            "dropout_rate": 0.1,
            "decoder_attention": presets.attention("full"),
            "cross_attention": presets.attention("full"),
        },
        optimizer={"learning_rate": 1e-3, "warmup_steps": 200, "schedule": "rsqrt", "b2": 0.98},
        train={"num_steps": 2_000, "batch_size": 16, "eval_every": 250, "checkpoint_every": 250, "log_every": 20},
    )


def _paper(arg: str) -> ConfigDict:
    """A row of table 3, its training that of configs/transformer.py."""
    decoder = presets.sibling(__file__, "transformer").get_config(arg).to_dict()
    return presets.experiment(
        f"translation_{arg}",
        attention=presets.attention("full"),
        task={"name": "translation", "max_len": 256, "vocab_size": 37_000, "label_smoothing": 0.1},
        model={
            **decoder["model"],
            "name": "encoder_decoder",
            "decoder_attention": presets.attention("full"),
            "cross_attention": presets.attention("full"),
        },
        optimizer=decoder["optimizer"],
        train={**decoder["train"], "batch_size": 98},
    )
