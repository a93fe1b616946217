"""BERT (Devlin et al. 2019)."""

from __future__ import annotations

from xformer.weights import bert_like
from xformer.weights.family import Architecture, Family, linear
from xformer.weights.keys import Keys
from xformer.weights.layout import Entry


def read(keys: Keys, model: str) -> Architecture:
    """The architecture of a `BertConfig`."""
    return bert_like.read_encoder(keys, model)


def entries(architecture: Architecture) -> list[Entry]:
    """Trunk, and head: the pooler is the first layer of the classification head."""
    found = bert_like.encoder_entries(architecture, "bert.")
    if architecture.model == "masked_lm":
        names = {"dense": "cls.predictions.transform.dense", "layer_norm": "cls.predictions.transform.LayerNorm"}
        return found + bert_like.masked_lm_entries(architecture, **names, output="cls.predictions")
    if architecture.model == "classifier":
        found += linear("dense", "bert.pooler.dense")
    return found + linear("classify", "classifier")


BERT = Family(
    names={"bert": "Bert"},
    prefix="bert.",
    models=("masked_lm", "classifier", "token_classifier"),
    read=read,
    entries=entries,
    write=bert_like.write_encoder,
)
