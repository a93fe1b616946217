"""What BERT and its relatives share: post-norm encoders whose embeddings are summed and normalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xformer.models.encoder import MAX_LAYERS
from xformer.weights.family import ACTIVATIONS, Architecture, linear, norm, num_labels, theirs
from xformer.weights.keys import Keys
from xformer.weights.layout import OUT, SAME, VECTOR, Entry, Layout

FULL: Mapping[str, Any] = {"name": "full"}


def read_encoder(
    keys: Keys, model: str, *, position_offset: int = 0, attention: Mapping[str, Any] = FULL, epsilon: float = 1e-12
) -> Architecture:
    """The architecture that such a config describes; its head is that of BERT."""
    keys.only(is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    dropout = keys.number("hidden_dropout_prob", 0.1, below=1)
    activation, epsilon = keys.choice("hidden_act", ACTIVATIONS, "gelu"), keys.number("layer_norm_eps", epsilon)
    options: dict[str, Any] = {
        "num_layers": keys.integer("num_hidden_layers", 12, at_most=MAX_LAYERS),
        "width": keys.integer("hidden_size", 768),
        "num_heads": keys.integer("num_attention_heads", 12),
        "mlp_dim": keys.integer("intermediate_size", 3072),
        "dropout_rate": dropout,
        "attention_dropout_rate": keys.number("attention_probs_dropout_prob", 0.1, below=1),
        "hidden_dropout_rate": 0.0,
        "norm": "post",
        "norm_type": "layer",
        "norm_epsilon": epsilon,
        "activation": activation,
        "position_embedding": "learned",
        "position_offset": position_offset,
        "num_token_types": keys.integer("type_vocab_size", 2),
        "scale_embeddings": False,
        "embedding_norm": True,
    }
    if model == "masked_lm":
        tied = keys.flag("tie_word_embeddings", True)
        head = {"head_activation": activation, "head_epsilon": epsilon}
        options |= {"mask_token": "row", "tie_embeddings": tied, "pooling": "mean", **head}
    if model == "classifier":
        rate = keys.number("classifier_dropout", dropout, below=1)
        options |= {"pooling": "first", "head": "tanh", "head_dropout_rate": rate}
    return Architecture(
        model,
        vocab_size=keys.integer("vocab_size", 30522),
        max_len=keys.integer("max_position_embeddings", 512, at_least=position_offset + 1) - position_offset,
        attention=attention,
        options=options,
        num_classes=None if model == "masked_lm" else num_labels(keys),
    )


def write_encoder(architecture: Architecture) -> dict[str, Any]:
    """The keys that `read_encoder` reads."""
    of = architecture.options
    written = {
        "vocab_size": architecture.vocab_size,
        "max_position_embeddings": architecture.max_len + of.get("position_offset", 0),
        "num_hidden_layers": of["num_layers"],
        "hidden_size": of["width"],
        "num_attention_heads": of["num_heads"],
        "intermediate_size": of["mlp_dim"],
        "hidden_dropout_prob": of.get("dropout_rate", 0.0),
        "attention_probs_dropout_prob": of.get("attention_dropout_rate", 0.0),
        "layer_norm_eps": of.get("norm_epsilon", 1e-6),
        "hidden_act": theirs(of.get("activation", "gelu")),
        "type_vocab_size": of.get("num_token_types", 0),
        "tie_word_embeddings": of.get("tie_embeddings", True),
    }
    if architecture.model == "classifier":
        written["classifier_dropout"] = of.get("head_dropout_rate", 0.0)
    return written | labels(architecture)


def labels(architecture: Architecture) -> dict[str, Any]:
    """Names of classes: there the config holds them, and the size of the head is their number."""
    if architecture.num_classes is None:
        return {}
    names = [f"LABEL_{index}" for index in range(architecture.num_classes)]
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def encoder_entries(architecture: Architecture, prefix: str, positions: Layout = SAME) -> list[Entry]:
    """The arrays of the trunk; `positions`: how the table of positions lies there."""
    embeddings = f"{prefix}embeddings"
    entries = [
        Entry("embed/table", (f"{embeddings}.word_embeddings.weight",)),
        Entry("positions/table", (f"{embeddings}.position_embeddings.weight",), positions),
        Entry("token_types/table", (f"{embeddings}.token_type_embeddings.weight",)),
        *norm("embedding_norm", f"{embeddings}.LayerNorm"),
    ]
    for index in range(architecture.options["num_layers"]):
        ours, layer = f"blocks/{index}", f"{prefix}encoder.layer.{index}"
        for name in ("query", "key", "value"):
            entries += linear(f"{ours}/attention/{name}", f"{layer}.attention.self.{name}")
        entries += [
            *global_entries(architecture, ours, layer),
            *linear(f"{ours}/attention/out", f"{layer}.attention.output.dense", OUT),
            *norm(f"{ours}/attention_norm", f"{layer}.attention.output.LayerNorm"),
            *linear(f"{ours}/feed_forward/expand", f"{layer}.intermediate.dense"),
            *linear(f"{ours}/feed_forward/contract", f"{layer}.output.dense"),
            *norm(f"{ours}/feed_forward_norm", f"{layer}.output.LayerNorm"),
        ]
    return entries


def global_entries(architecture: Architecture, ours: str, layer: str) -> list[Entry]:
    """The projections of global tokens, as Longformer has them; where there are none, those of all tokens."""
    if not architecture.options.get("global_projections", False):
        return []
    found: list[Entry] = []
    for name in ("query", "key", "value"):
        there = f"{layer}.attention.self.{name}"
        found += linear(f"{ours}/attention/of_global/{name}", f"{there}_global", older=there)
    return found


def masked_lm_entries(architecture: Architecture, *, dense: str, layer_norm: str, output: str) -> list[Entry]:
    """The arrays of the head that names tokens; `output` is the name of what holds its table and bias.

    Untied, the bias that is added there is that of the decoder, and the other is not read.
    """
    tied = architecture.options.get("tie_embeddings", True)
    names = (f"{output}.bias", f"{output}.decoder.bias")
    return [
        *linear("transform", dense),
        *norm("transform_norm", layer_norm),
        Entry("bias", names if tied else names[::-1], VECTOR, copies=() if tied else (f"{output}.bias",)),
        *([] if tied else [Entry("output_table", (f"{output}.decoder.weight",), SAME)]),
    ]
