"""BigBird (Zaheer et al. 2020), the bidirectional model with two global blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xformer import attention
from xformer.weights import bert_like
from xformer.weights.family import Architecture, Family, linear
from xformer.weights.keys import Keys
from xformer.weights.layout import Entry

AS_RELEASED = "xformer.weights.released_bigbird:ReleasedBigBird"
TYPES = {"block_sparse": "block_sparse", "original_full": "original_full"}


def read(keys: Keys, model: str) -> Architecture:
    """The architecture of a `BigBirdConfig`. Random blocks are drawn here, other ones than there; see the guide."""
    keys.only(use_bias=True, rescale_embeddings=False)
    section: Mapping[str, Any] = bert_like.FULL
    if keys.choice("attention_type", TYPES, "block_sparse") == "block_sparse":
        sizes = {"block_size": keys.integer("block_size", 64)}
        sizes["num_random_blocks"] = keys.integer("num_random_blocks", 3, at_least=0)
        section = {"name": "bigbird", **sizes}
    given = {"hidden_act": "gelu_new", "max_position_embeddings": 4096, "vocab_size": 50358, **keys.config}
    found = bert_like.read_encoder(Keys(given, keys.path), model, attention=section)
    options = dict(found.options)
    if model == "classifier":
        options["head"] = options["activation"]
    return dataclasses.replace(found, options=options)


def released(keys: Keys, attention: Mapping[str, Any]) -> dict[str, Any]:
    """The attention as their code computes it in evaluation."""
    return {**attention, "name": AS_RELEASED} if attention["name"] == "bigbird" else dict(attention)


def entries(architecture: Architecture) -> list[Entry]:
    """Trunk and head."""
    found = bert_like.encoder_entries(architecture, "bert.")
    if architecture.model == "masked_lm":
        names = {"dense": "cls.predictions.transform.dense", "layer_norm": "cls.predictions.transform.LayerNorm"}
        return found + bert_like.masked_lm_entries(architecture, **names, output="cls.predictions")
    if architecture.model == "classifier":
        return found + linear("dense", "classifier.dense") + linear("classify", "classifier.out_proj")
    return found + linear("classify", "classifier")


def write(architecture: Architecture) -> dict[str, Any]:
    """The keys that `read` reads."""
    op, kind = architecture.op, {"attention_type": "original_full"}
    if isinstance(op, attention.BigBird):
        sizes = {"block_size": op.block_size, "num_random_blocks": op.num_random_blocks}
        return bert_like.write_encoder(architecture) | {"attention_type": "block_sparse", **sizes}
    return bert_like.write_encoder(architecture) | kind


BIG_BIRD = Family(
    names={"big_bird": "BigBird"},
    prefix="bert.",
    models=("masked_lm", "classifier", "token_classifier"),
    read=read,
    entries=entries,
    write=write,
    released=released,
)
