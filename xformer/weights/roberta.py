"""RoBERTa (Liu et al. 2019), and XLM-RoBERTa and CamemBERT, which are the same model."""

from __future__ import annotations

import dataclasses
from typing import Any

from xformer.weights import bert_like
from xformer.weights.family import Architecture, Family, linear
from xformer.weights.keys import Keys
from xformer.weights.layout import Entry


def read(keys: Keys, model: str) -> Architecture:
    """The architecture of a `RobertaConfig`: positions are counted from the id of the padding plus one."""
    offset = keys.integer("pad_token_id", 1, at_least=0) + 1
    return with_exact_gelu(bert_like.read_encoder(keys, model, position_offset=offset))


def with_exact_gelu(architecture: Architecture) -> Architecture:
    """The head that names tokens has a GELU there whatever the activation of the layers."""
    if architecture.model != "masked_lm":
        return architecture
    return dataclasses.replace(architecture, options={**architecture.options, "head_activation": "gelu_exact"})


def entries(architecture: Architecture, prefix: str = "roberta.") -> list[Entry]:
    """Trunk and head."""
    found = bert_like.encoder_entries(architecture, prefix)
    if architecture.model == "masked_lm":
        names = {"dense": "lm_head.dense", "layer_norm": "lm_head.layer_norm", "output": "lm_head"}
        return found + bert_like.masked_lm_entries(architecture, **names)
    if architecture.model == "classifier":
        return found + linear("dense", "classifier.dense") + linear("classify", "classifier.out_proj")
    return found + linear("classify", "classifier")


def write(architecture: Architecture) -> dict[str, Any]:
    """The keys that `read` reads."""
    offset = architecture.options.get("position_offset", 0)
    return bert_like.write_encoder(architecture) | {"pad_token_id": max(offset - 1, 0)}


ROBERTA = Family(
    names={"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"},
    prefix="roberta.",
    models=("masked_lm", "classifier", "token_classifier"),
    read=read,
    entries=entries,
    write=write,
)
