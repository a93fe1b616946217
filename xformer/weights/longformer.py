"""Longformer (Beltagy et al. 2020): RoBERTa with windows, and projections of their own for global tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xformer import attention
from xformer.checks import is_integer
from xformer.weights import bert_like, roberta
from xformer.weights.errors import WeightsError
from xformer.weights.family import Architecture, Family
from xformer.weights.keys import Keys
from xformer.weights.layout import Entry


def read(keys: Keys, model: str) -> Architecture:
    """The architecture of a `LongformerConfig`; a classifier's first token is global, as there by default."""
    offset = keys.integer("pad_token_id", 1, at_least=0) + 1
    found = roberta.with_exact_gelu(bert_like.read_encoder(keys, model, position_offset=offset))
    windows = read_windows(keys, found.options["num_layers"])
    num_global_tokens = 1 if model == "classifier" else 0
    sections = [{"name": "longformer", "window": size, "num_global_tokens": num_global_tokens} for size in windows]
    section: Mapping[str, Any] = sections[0]
    if len(set(windows)) > 1:
        section = {"name": "layers", "layers": tuple(sections)}
    options = {**found.options, "global_projections": True}
    if model == "classifier":
        options["head_dropout_rate"] = options["dropout_rate"]
    return dataclasses.replace(found, attention=section, options=options)


def read_windows(keys: Keys, num_layers: int) -> list[int]:
    """The window of each layer."""
    value = keys.config.get("attention_window", 512)
    windows = value if isinstance(value, list) else [value] * num_layers
    if len(windows) != num_layers or not all(is_integer(size) and size >= 2 and size % 2 == 0 for size in windows):
        raise WeightsError(
            f"{keys.path}: attention_window must be an even number of at least 2, or one for each of {num_layers} "
            f"layers, got {value!r:.80}"
        )
    return windows


def entries(architecture: Architecture) -> list[Entry]:
    """As RoBERTa's, with the projections of global tokens."""
    return roberta.entries(architecture, "longformer.")


def write(architecture: Architecture) -> dict[str, Any]:
    """The keys that `read` reads."""
    num_layers, op = architecture.options["num_layers"], architecture.op
    layers = [op.at_layer(index) for index in range(num_layers)]
    windows = [layer.window if isinstance(layer, attention.Longformer) else 512 for layer in layers]
    written = roberta.write(architecture)
    written.pop("classifier_dropout", None)
    return written | {"attention_window": windows}


LONGFORMER = Family(
    names={"longformer": "Longformer"},
    prefix="longformer.",
    models=("masked_lm", "classifier", "token_classifier"),
    read=read,
    entries=entries,
    write=write,
)
