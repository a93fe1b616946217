"""The encoder of T5 (Raffel et al. 2020) and of T5 1.1 (Shazeer 2020).

There dense layers have no biases: those of ours are zero. Scores are not divided there, so the projection of queries is
multiplied by sqrt(head_dim) here. All layers share the relative bias of the first.
"""

from __future__ import annotations

from typing import Any

from xformer.attention import T5Bias
from xformer.models.encoder import MAX_LAYERS
from xformer.weights import bert_like
from xformer.weights.family import Architecture, Family, num_labels
from xformer.weights.keys import Keys
from xformer.weights.layout import LINEAR, OUT, Entry, Layout

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "silu": "silu",
    "gated-gelu": "geglu",
    "gated-silu": "swiglu",
}
GATED = ("geglu", "swiglu")


def read(keys: Keys, model: str) -> Architecture:
    """The architecture of a `T5Config`. Positions are relative: `max_len` may be any."""
    keys.only(is_decoder=False)
    rate = keys.number("dropout_rate", 0.1, below=1)
    position = {
        "name": "t5",
        "num_buckets": keys.integer("relative_attention_num_buckets", 32),
        "max_distance": keys.integer("relative_attention_max_distance", 128),
    }
    options: dict[str, Any] = {
        "num_layers": keys.integer("num_layers", 6, at_most=MAX_LAYERS),
        "width": keys.integer("d_model", 512),
        "num_heads": keys.integer("num_heads", 8),
        "head_dim": keys.integer("d_kv", 64),
        "mlp_dim": keys.integer("d_ff", 2048),
        "dropout_rate": rate,
        "attention_dropout_rate": rate,
        "hidden_dropout_rate": rate,
        "norm": "pre",
        "norm_type": "rms",
        "norm_epsilon": keys.number("layer_norm_epsilon", 1e-6),
        "activation": keys.choice("feed_forward_proj", ACTIVATIONS, "relu"),
        "position_embedding": "none",
        "position_offset": 0,
        "scale_embeddings": False,
        "embedding_norm": False,
        "share_attention_params": True,
    }
    if model == "classifier":
        options |= {"pooling": "mean", "head_dropout_rate": keys.number("classifier_dropout", 0.0, below=1)}
    return Architecture(
        model,
        vocab_size=keys.integer("vocab_size", 32128),
        max_len=keys.integer("n_positions", 512),
        attention={"name": "full", "position": position},
        options=options,
        num_classes=num_labels(keys),
    )


def entries(architecture: Architecture) -> list[Entry]:
    """The encoder, and the head that classifies tokens."""
    options, encoder = architecture.options, "transformer.encoder"
    table = "transformer.shared.weight", f"{encoder}.embed_tokens.weight"
    first = f"{encoder}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    found = [
        Entry("embed/table", table),
        Entry("final_norm/scale", (f"{encoder}.final_layer_norm.weight",)),
    ]
    if getattr(architecture.op, "position", None) is not None:
        found.append(Entry("blocks/0/attention/attention_fn/params/position/bias", (first,), LINEAR))
    expand = {"expand": "wi_0", "gate": "wi_1"} if options["activation"] in GATED else {"expand": "wi"}
    query = Layout("linear", factor=(options.get("head_dim") or options["width"] // options["num_heads"]) ** 0.5)
    for index in range(options["num_layers"]):
        ours, (attention, dense) = f"blocks/{index}", (f"{encoder}.block.{index}.layer.{part}" for part in (0, 1))
        for name, there, layout in (
            ("query", "q", query),
            ("key", "k", LINEAR),
            ("value", "v", LINEAR),
            ("out", "o", OUT),
        ):
            found.append(
                Entry(f"{ours}/attention/{name}/kernel", (f"{attention}.SelfAttention.{there}.weight",), layout)
            )
        for name, there in {**expand, "contract": "wo"}.items():
            found.append(
                Entry(f"{ours}/feed_forward/{name}/kernel", (f"{dense}.DenseReluDense.{there}.weight",), LINEAR)
            )
        found.append(Entry(f"{ours}/attention_norm/scale", (f"{attention}.layer_norm.weight",)))
        found.append(Entry(f"{ours}/feed_forward_norm/scale", (f"{dense}.layer_norm.weight",)))
    if architecture.model == "token_classifier":
        found.append(Entry("classify/kernel", ("classifier.weight",), LINEAR))
        found.append(Entry("classify/bias", ("classifier.bias",)))
    return found


def write(architecture: Architecture) -> dict[str, Any]:
    """The keys that `read` reads."""
    of, position = architecture.options, getattr(architecture.op, "position", None)
    written = {
        "vocab_size": architecture.vocab_size,
        "n_positions": architecture.max_len,
        "num_layers": of["num_layers"],
        "d_model": of["width"],
        "num_heads": of["num_heads"],
        "d_kv": of.get("head_dim") or of["width"] // of["num_heads"],
        "d_ff": of["mlp_dim"],
        "dropout_rate": of.get("dropout_rate", 0.0),
        "layer_norm_epsilon": of.get("norm_epsilon", 1e-6),
        "feed_forward_proj": next((key for key, x in ACTIVATIONS.items() if x == of.get("activation", "gelu")), None),
        "is_encoder_decoder": False,
    }
    if isinstance(position, T5Bias):
        written["relative_attention_num_buckets"] = position.num_buckets
        written["relative_attention_max_distance"] = position.max_distance
    return written | bert_like.labels(architecture)


T5 = Family(
    names={"t5": "T5"},
    prefix="transformer.",
    models=("token_classifier", "classifier"),
    heads={"token_classifier": "ForTokenClassification"},
    read=read,
    entries=entries,
    write=write,
    zero=r"^blocks/.*/bias$",
    ignored=(r"encoder\.embed_tokens\.weight$",),  # the shared table once more
)
