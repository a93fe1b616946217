"""Four attention variants on your own documents, three seeds.

  python -m experiments.compare --config=configs/compare_documents.py --workdir=runs/compare_documents
    --config.base.task.path=mine.jsonl

Without a path it reads examples/documents.jsonl. Sizes and lengths: configs/documents.py. Each run may start from a
masked language model of its own, trained on the same documents first: --config.pretrain.num_steps=1400.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config() -> ConfigDict:
    """The comparison."""
    documents = presets.sibling(__file__, "documents")
    attentions = {variant: documents.attention(variant) for variant in ("full", "linformer", "bigbird", "shaw")}
    return presets.comparison("compare_documents", documents.get_config(), attentions, seeds=(0, 1, 2))
