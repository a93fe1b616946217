"""Fine-tune a Hugging Face checkpoint on your own documents, with any attention swapped in.

  python -m experiments.run --config=configs/finetune.py:bigbird --workdir=runs/tuned \
      --config.train.init_from=hf:FOLDER --config.task.path=mine.jsonl

FOLDER, `checkpoint` by default, holds `config.json`, `model.safetensors` and the files of a tokenizer; the sizes of the
model are the folder's (docs/guides/finetune.md). Documents are cut at 1,024 tokens; --config.task.max_len=4096 reads
more, and learned positions are then repeated. The learning rate of each layer is 0.9 of that of the layer above;
--config.optimizer.freeze="('embed', 'token_types')" keeps parameters as they are. Without a path it reads
examples/documents.jsonl, which shows the format. The argument is an attention variant, as in configs/listops.py. No
pretrained checkpoint could be had where this was written: what it reaches has not been measured.
Smoke size: --config.train.num_steps=10 --config.train.batch_size=2.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from xformer import presets

EXAMPLE = Path(__file__).parent.parent / "examples" / "documents.jsonl"


def get_config(arg: str = "bigbird") -> ConfigDict:
    """The experiment of one attention variant."""
    train = {"num_steps": 2000, "num_epochs": 4.0, "batch_size": 8, "eval_every": 100, "init_from": "hf:checkpoint"}
    return presets.experiment(
        f"finetune_{arg}",
        attention=presets.attention(arg),
        task={"name": "documents", "path": str(EXAMPLE), "max_len": 1024, "vocab": "tokenizer"},
        model={"name": "classifier"},
        optimizer={"learning_rate": 3e-5, "warmup_steps": 100, "layer_decay": 0.9},
        train={**train, "checkpoint_every": 200, "log_every": 10},
    )
