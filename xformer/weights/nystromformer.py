"""Nystromformer (Xiong et al. 2021): BERT with Nystrom attention and a convolution of the values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xformer.attention import Nystrom
from xformer.weights import bert_like
from xformer.weights.family import Architecture, Family, linear
from xformer.weights.keys import Keys
from xformer.weights.layout import DEPTHWISE, Entry, Layout
from xformer.weights.released_nystrom import ReleasedNystrom

AS_RELEASED = "xformer.weights.released_nystrom:ReleasedNystrom"
UNUSED_ROWS = 2  # of the table of positions, before that of the first: no position there has them
SEQUENCE = "segment_means_seq_len"


def read(keys: Keys, model: str) -> Architecture:
    """The architecture of a `NystromformerConfig`, with the paper's attention; see `released`."""
    keys.only(inv_coeff_init_option=False)
    sizes = {"num_landmarks": keys.integer("num_landmarks", 64), "conv_size": keys.integer("conv_kernel_size", 65)}
    given = {"hidden_act": "gelu_new", "max_position_embeddings": 510, "vocab_size": 30000, **keys.config}
    found = bert_like.read_encoder(Keys(given, keys.path), model, attention={"name": "nystrom", **sizes}, epsilon=1e-5)
    options = dict(found.options)
    if model == "classifier":
        options |= {"head": options["activation"], "head_dropout_rate": options["dropout_rate"]}
    return dataclasses.replace(found, options=options)


def released(keys: Keys, attention: Mapping[str, Any]) -> dict[str, Any]:
    """The attention as their code computes it."""
    return {**attention, "name": AS_RELEASED, "segment_means_len": keys.integer(SEQUENCE, 64)}


def entries(architecture: Architecture) -> list[Entry]:
    """Trunk, the convolutions where the op has them, and head."""
    found = bert_like.encoder_entries(architecture, "nystromformer.", Layout(skip=UNUSED_ROWS))
    op = architecture.op
    if isinstance(op, Nystrom) and op.conv_size:
        for index in range(architecture.options["num_layers"]):
            there = f"nystromformer.encoder.layer.{index}.attention.self.conv.weight"
            found.append(Entry(f"blocks/{index}/attention/attention_fn/params/conv", (there,), DEPTHWISE))
    if architecture.model == "masked_lm":
        names = {"dense": "cls.predictions.transform.dense", "layer_norm": "cls.predictions.transform.LayerNorm"}
        return found + bert_like.masked_lm_entries(architecture, **names, output="cls.predictions")
    if architecture.model == "classifier":
        return found + linear("dense", "classifier.dense") + linear("classify", "classifier.out_proj")
    return found + linear("classify", "classifier")


def write(architecture: Architecture) -> dict[str, Any]:
    """The keys that `read` and `released` read."""
    op, written = architecture.op, bert_like.write_encoder(architecture)
    written.pop("classifier_dropout", None)
    if isinstance(op, Nystrom):
        written |= {"num_landmarks": op.num_landmarks, "conv_kernel_size": op.conv_size or 0}
        written[SEQUENCE] = op.segment_means_len if isinstance(op, ReleasedNystrom) else op.num_landmarks
    return written


NYSTROMFORMER = Family(
    names={"nystromformer": "Nystromformer"},
    prefix="nystromformer.",
    models=("masked_lm", "classifier", "token_classifier"),
    read=read,
    entries=entries,
    write=write,
    released=released,
    equal_as_released_only=True,
)
