"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import logging
from typing import Any

from xformer.models.encoder import MAX_LAYERS
from xformer.weights import bert_like
from xformer.weights.family import ACTIVATIONS, Architecture, Family, linear, norm, num_labels, theirs
from xformer.weights.keys import Keys
from xformer.weights.layout import LINEAR, Entry, Layout

logger = logging.getLogger(__name__)
CONV1D, CONV1D_OUT = Layout("conv1d"), Layout("conv1d", inputs=2)


def read(keys: Keys, model: str) -> Architecture:
    """The architecture of a `GPT2Config`. One dropout rate serves embeddings and blocks: that of the blocks."""
    keys.only(
        add_cross_attention=False, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
        reorder_and_upcast_attn=False,
    )  # fmt: skip
    model_options: dict[str, Any] = {}
    if model == "decoder":
        model_options = {"tie_embeddings": keys.flag("tie_word_embeddings", True)}
    if model == "classifier":
        model_options = {"pooling": "last", "head_bias": False}
    width, dropout = keys.integer("n_embd", 768), keys.number("resid_pdrop", 0.1, below=1)
    if (embedded := keys.number("embd_pdrop", 0.1, below=1)) != dropout:
        logger.warning("%s: embd_pdrop is %g; embeddings drop resid_pdrop %g here", keys.path, embedded, dropout)
    return Architecture(
        model,
        vocab_size=keys.integer("vocab_size", 50257),
        max_len=keys.integer("n_positions", 1024),
        attention={"name": "full", "causal": True},
        options={
            "num_layers": keys.integer("n_layer", 12, at_most=MAX_LAYERS),
            "width": width,
            "num_heads": keys.integer("n_head", 12),
            "mlp_dim": keys.integer("n_inner", 4 * width),
            "dropout_rate": dropout,
            "attention_dropout_rate": keys.number("attn_pdrop", 0.1, below=1),
            "hidden_dropout_rate": 0.0,
            "norm": "pre",
            "norm_type": "layer",
            "norm_epsilon": keys.number("layer_norm_epsilon", 1e-5),
            "activation": keys.choice("activation_function", ACTIVATIONS, "gelu_new"),
            "position_embedding": "learned",
            "position_offset": 0,
            "scale_embeddings": False,
            "embedding_norm": False,
            **model_options,
        },
        num_classes=None if model == "decoder" else num_labels(keys),
    )


def entries(architecture: Architecture) -> list[Entry]:
    """Trunk, and output table or head. Kernels are `[in, out]` there; queries, keys and values are one."""
    found = [
        Entry("embed/table", ("transformer.wte.weight",)),
        Entry("positions/table", ("transformer.wpe.weight",)),
        *norm("final_norm", "transformer.ln_f"),
    ]
    for index in range(architecture.options["num_layers"]):
        ours, layer = f"blocks/{index}", f"transformer.h.{index}"
        for part, name in enumerate(("query", "key", "value")):
            fused = {"part": part, "parts": 3}
            found += [
                Entry(f"{ours}/attention/{name}/kernel", (f"{layer}.attn.c_attn.weight",), Layout("conv1d", **fused)),
                Entry(f"{ours}/attention/{name}/bias", (f"{layer}.attn.c_attn.bias",), Layout("vector", **fused)),
            ]
        found += [
            *linear(f"{ours}/attention/out", f"{layer}.attn.c_proj", CONV1D_OUT),
            *norm(f"{ours}/attention_norm", f"{layer}.ln_1"),
            *linear(f"{ours}/feed_forward/expand", f"{layer}.mlp.c_fc", CONV1D),
            *linear(f"{ours}/feed_forward/contract", f"{layer}.mlp.c_proj", CONV1D),
            *norm(f"{ours}/feed_forward_norm", f"{layer}.ln_2"),
        ]
    if architecture.model == "classifier":
        found.append(Entry("classify/kernel", ("score.weight",), LINEAR))
    if architecture.model == "token_classifier":
        found += linear("classify", "classifier")
    if not architecture.options.get("tie_embeddings", True):
        found.append(Entry("output_table", ("lm_head.weight",)))
    return found


def write(architecture: Architecture) -> dict[str, Any]:
    """The keys that `read` reads."""
    of = architecture.options
    return {
        "vocab_size": architecture.vocab_size,
        "n_positions": architecture.max_len,
        "n_embd": of["width"],
        "n_layer": of["num_layers"],
        "n_head": of["num_heads"],
        "n_inner": of["mlp_dim"],
        "resid_pdrop": of.get("dropout_rate", 0.0),
        "embd_pdrop": of.get("dropout_rate", 0.0),
        "attn_pdrop": of.get("attention_dropout_rate", 0.0),
        "layer_norm_epsilon": of.get("norm_epsilon", 1e-6),
        "activation_function": theirs(of.get("activation", "gelu")),
        "tie_word_embeddings": of.get("tie_embeddings", True),
        **bert_like.labels(architecture),
    }


GPT2 = Family(
    names={"gpt2": "GPT2"},
    prefix="transformer.",
    models=("decoder", "classifier", "token_classifier"),
    read=read,
    entries=entries,
    write=write,
    ignored=(r"\.attn\.(masked_)?bias$",),
)
