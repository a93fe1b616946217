"""Vision Transformers out of Hugging Face folders (`ViTForImageClassification`; Dosovitskiy et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xformer.attention import build
from xformer.models import VisionTransformer
from xformer.models.encoder import MAX_LAYERS
from xformer.tree_paths import path_name
from xformer.weights.errors import WeightsError
from xformer.weights.family import ACTIVATIONS, linear, norm, num_labels
from xformer.weights.folder import CONFIG, Folder
from xformer.weights.keys import Keys
from xformer.weights.layout import OUT, Entry

EMBEDDINGS = "vit.embeddings"
# What lies there otherwise: our path -> the tensor's name, and our array of this shape out of it.
OTHERWISE: Mapping[str, tuple[str, Callable[[np.ndarray, tuple[int, ...]], np.ndarray]]] = {
    "cls": (f"{EMBEDDINGS}.cls_token", lambda x, shape: x[0, 0]),
    "positions/prefix": (f"{EMBEDDINGS}.position_embeddings", lambda x, shape: x[0, :1]),
    "positions/grid": (f"{EMBEDDINGS}.position_embeddings", lambda x, shape: x[0, 1:].reshape(shape)),
    "embed/projection/kernel": (
        f"{EMBEDDINGS}.patch_embeddings.projection.weight",  # [width, channels, rows, columns]
        lambda x, shape: x.transpose(2, 3, 1, 0).reshape(shape),
    ),
}


def load_vision(path: str | Path, *, attention: Mapping[str, Any] | None = None) -> VisionTransformer:
    """The Vision Transformer that a folder holds, with the same logits.

    Theirs reads pixels `[batch, channels, height, width]`, ours `[batch, height, width, channels]`, both as numbers
    from -1 to 1.

    Args:
      path: the folder, with `config.json` and `model.safetensors`.
      attention: the section of another op, which has no parameters; None: full attention.

    Raises:
      WeightsError: no such folder, damaged files, another kind of model, a tensor that is missing or of another shape.
      MissingExtra: `safetensors` is not installed.
    """
    folder = Folder(path)
    keys = Keys(folder.config, folder.path / CONFIG)
    keys.only(model_type="vit", architectures=["ViTForImageClassification"], qkv_bias=True)
    side, patch, channels = (
        keys.integer(key, default) for key, default in (("image_size", 224), ("patch_size", 16), ("num_channels", 3))
    )
    num_positions = VisionTransformer.num_positions(side * side * channels, "cls", patch, channels)
    options: dict[str, Any] = {
        "num_layers": keys.integer("num_hidden_layers", 12, at_most=MAX_LAYERS),
        "width": keys.integer("hidden_size", 768),
        "num_heads": keys.integer("num_attention_heads", 12),
        "mlp_dim": keys.integer("intermediate_size", 3072),
        "dropout_rate": keys.number("hidden_dropout_prob", 0.0, below=1),
        "attention_dropout_rate": keys.number("attention_probs_dropout_prob", 0.0, below=1),
        "norm_epsilon": keys.number("layer_norm_eps", 1e-12),
        "activation": keys.choice("hidden_act", ACTIVATIONS, "gelu"),
    }

    def make() -> VisionTransformer:
        op = build(attention or {"name": "full"}, num_positions)
        fixed: dict[str, Any] = {"pooling": "cls", "position_embedding": "learned", "scale_embeddings": False}
        sizes: dict[str, Any] = {"num_classes": num_labels(keys), "num_channels": channels, "patch_size": patch}
        sizes |= {"image_height": side, "image_width": side}
        return VisionTransformer(**{"attention": op, "rngs": nnx.Rngs(0), **sizes, **fixed, **options})

    try:
        graph, state = nnx.split(nnx.eval_shape(make))
    except (ValueError, NotImplementedError) as error:
        raise WeightsError(f"{keys.path}: no model can be made of it: {error}") from error
    entries = {entry.ours: entry for entry in _entries(options["num_layers"])}
    array = lambda path, leaf: jnp.asarray(_read(folder, entries, path_name(path), leaf.shape), leaf.dtype)
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(array, state))


def _entries(num_layers: int) -> list[Entry]:
    """Every array but those of `OTHERWISE`."""
    projection = f"{EMBEDDINGS}.patch_embeddings.projection.bias"
    found = [Entry("embed/projection/bias", (projection,)), *norm("final_norm", "vit.layernorm")]
    found += linear("classify", "classifier")
    for index in range(num_layers):
        ours, layer = f"blocks/{index}", f"vit.encoder.layer.{index}"
        for name in ("query", "key", "value"):
            found += linear(f"{ours}/attention/{name}", f"{layer}.attention.attention.{name}")
        found += [
            *linear(f"{ours}/attention/out", f"{layer}.attention.output.dense", OUT),
            *norm(f"{ours}/attention_norm", f"{layer}.layernorm_before"),
            *linear(f"{ours}/feed_forward/expand", f"{layer}.intermediate.dense"),
            *linear(f"{ours}/feed_forward/contract", f"{layer}.output.dense"),
            *norm(f"{ours}/feed_forward_norm", f"{layer}.layernorm_after"),
        ]
    return found


def _read(folder: Folder, entries: Mapping[str, Entry], path: str, shape: tuple[int, ...]) -> np.ndarray:
    if path not in entries and path not in OTHERWISE:
        raise WeightsError(f"{folder.path}: has no place for {path}: takes an attention without parameters")
    name = OTHERWISE[path][0] if path in OTHERWISE else entries[path].theirs[0]
    if name not in folder.tensors:
        raise WeightsError(f"{folder.path}: {name} is missing, which its config.json asks for")
    stored = folder.read(name)
    try:
        value = OTHERWISE[path][1](stored, shape) if path in OTHERWISE else entries[path].layout.ours(stored, shape)
    except (ValueError, IndexError):
        value = stored
    if value.shape != shape:
        shapes = f"{list(stored.shape)}, which makes no {list(shape)}"
        raise WeightsError(f"{folder.tensors[name].file}: {name} has shape {shapes}")
    return value
