"""A model of ours as a Hugging Face folder that loads there with equal logits."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from xformer import extras, tokenizer_files
from xformer.attention import Attention, BigBird
from xformer.models import MODELS, Encoder
from xformer.tree_paths import path_name
from xformer.weights.errors import WeightsError
from xformer.weights.families import BY_TYPE
from xformer.weights.family import Architecture, Family
from xformer.weights.folder import CONFIG, INDEX, ONE_FILE
from xformer.weights.keys import Keys
from xformer.weights.layout import Entry
from xformer.weights.loading import Pretrained

safetensors_numpy = extras.Lazy("safetensors.numpy")  # optional

SHARD_BYTES = 4 * 2**30
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "sentencepiece.bpe.model", "spiece.model",
)  # fmt: skip
BY_ID = ("embed/table", "output_table", "bias")  # arrays whose rows are token ids
ELSEWHERE = (
    "self", "remat", "scan_layers", "dtype", "param_dtype", "rngs", "attention", "vocab_size", "max_len",
    "num_classes",
)  # fmt: skip


def save(
    model: Pretrained | Any, path: str | Path, *, model_type: str | None = None, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Writes a folder with `config.json` and `model.safetensors`, which their library loads, with equal logits.

    Args:
      model: what `xformer.weights.load` or `xformer.load` gave.
      path: the folder; it is made, and must be empty where it exists.
      model_type: the family there, such as "roberta"; None: that of the folder it came from, or the first that fits.
      shard_bytes: what is above this is written as shards of about so many bytes, and no more than one of them is in
        memory at a time.

    Returns:
      The folder.

    Raises:
      WeightsError: the architecture is none of theirs, with what differs; or the folder holds something.
    """
    path, source = Path(path).expanduser(), model if isinstance(model, Pretrained) else _of_run(model)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise WeightsError(f"{path} must be a new or an empty folder, and is not")
    own = source.config.get("model_type")
    given: str | None = model_type or own
    types = list(BY_TYPE) if given is None else [given]
    if unknown := [name for name in types if name not in BY_TYPE]:
        raise WeightsError(f"model_type must be one of {', '.join(BY_TYPE)}, got {unknown[0]!r}")
    reasons = {name: differences(source.architecture, BY_TYPE[name]) for name in types}
    chosen = next((name for name, found in reasons.items() if not found), None)
    if chosen is None:
        name, found = min(reasons.items(), key=lambda item: len(item[1]))
        raise WeightsError(f"the model is no {name} and can't be saved as one: {'; '.join(found)}")
    family = BY_TYPE[chosen]
    arrays: dict[str, Any] = dict(_arrays(source.model))
    own_tokenizer = _tokenizer(model, source)
    if own_tokenizer is not None:
        arrays |= {name: swapped(np.asarray(arrays[name]), own_tokenizer[0]) for name in BY_ID if name in arrays}
    entries = family.entries(source.architecture)
    is_zero = lambda name: family.zero is not None and re.search(family.zero, name) and not np.any(arrays[name])
    if lost := sorted(name for name in arrays.keys() - {entry.ours for entry in entries} if not is_zero(name)):
        raise WeightsError(f"the model can't be saved as {chosen}, which has no place for {', '.join(lost[:6])}")
    path.mkdir(parents=True, exist_ok=True)
    _write_tensors(path, entries, arrays, shard_bytes)
    kept = source.config if own == chosen else {}
    written = family.write(source.architecture)
    if len(kept.get("id2label") or ()) == source.architecture.num_classes:
        written = {key: value for key, value in written.items() if key not in ("id2label", "label2id")}
    content = {**kept, **written, "model_type": chosen}
    content["architectures"] = [family.class_name(chosen, source.architecture.model)]
    content["dtype"] = str(next(iter(arrays.values())).dtype)
    content.pop("torch_dtype", None)
    if own_tokenizer is not None:
        content |= {"pad_token_id": own_tokenizer[0]}
        (path / "tokenizer.json").write_text(json.dumps(own_tokenizer[1]) + "\n", encoding="utf-8")
        told = tokenizer_files.config(own_tokenizer[1], own_tokenizer[0])
        (path / "tokenizer_config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    names = list(getattr(model, "class_names", ()))
    if len(names) == source.architecture.num_classes:
        content |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    (path / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if isinstance(model, Pretrained) and source.folder.is_dir():
        for name in TOKENIZER_FILES:
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, path / name)
    return path


def _tokenizer(model: Any, source: Pretrained) -> tuple[int, dict[str, Any]] | None:
    """The padding's id there and the `tokenizer.json` of a run that has one; None where ids are those of the folder.

    Raises WeightsError for a run without, whose padding has an id there that is a token's here.
    """
    if isinstance(model, Pretrained):
        return None
    stored = model.preprocess.vocabulary.to_json()
    offset = source.architecture.options.get("position_offset", 0)
    if stored.get("kind") == "tokenizer":
        if offset and offset != stored["pad_id"] + 1:
            raise WeightsError(
                f"the model can't be saved: position_offset is {offset}, and the tokenizer's padding is "
                f"{stored['pad_id']}: there positions begin one after it"
            )
        return stored["pad_id"], stored["tokenizer"]
    if offset > 1:
        raise WeightsError(
            f"the model can't be saved: position_offset is {offset}, so the padding there is {offset - 1}, a token here"
        )
    return None


def differences(architecture: Architecture, family: Family) -> list[str]:
    """What of an architecture a family can't say, a sentence for each; empty where it is one of theirs."""
    known = [model for model in family.models if model in family.heads]
    if architecture.model not in known:
        return [f"model.name is {architecture.model!r}, there is {' or '.join(known)}"]
    try:
        keys = Keys(family.write(architecture))
        there = family.read(keys, architecture.model)
        if family.released is not None and family.equal_as_released_only:
            there = dataclasses.replace(there, attention=family.released(keys, there.attention))
    except WeightsError as error:
        return [str(error)]
    constructors: Any = (Encoder, MODELS[architecture.model])
    takes = {key: x for cls in constructors for key, x in inspect.signature(cls.__init__).parameters.items()}
    found = []
    for key, parameter in takes.items():
        if key in ELSEWHERE or key.endswith("dropout_rate") or parameter.kind is parameter.VAR_KEYWORD:
            continue
        ours, theirs = (x.options.get(key, parameter.default) for x in (architecture, there))
        if ours != theirs and not _same_heads(key, ours, architecture.options):
            found.append(f"model.{key} is {ours!r}, there {theirs!r}")
    if not _same_op(architecture.op, there.op):
        found.append(f"attention is {architecture.op}, there {there.op}")
    return found


def _same_op(ours: Attention, theirs: Attention) -> bool:
    """Whether two ops compute the same, however; random blocks there are none that a config could say."""
    if isinstance(ours, BigBird) and isinstance(theirs, BigBird):
        sizes = {field.name: getattr(ours, field.name) for field in dataclasses.fields(BigBird)}
        ours = BigBird(**sizes | {"seed": theirs.seed, "layer": theirs.layer})
    plain = lambda op: dataclasses.replace(op, implementation=None)
    return plain(ours) == plain(theirs)


def _same_heads(key: str, ours: Any, options: Mapping[str, Any]) -> bool:
    """Whether a number of heads or features says what None does."""
    if key == "num_kv_heads":
        return ours == options["num_heads"]
    return key == "head_dim" and ours is not None and ours * options["num_heads"] == options["width"]


def swapped(x: np.ndarray, pad_id: int) -> np.ndarray:
    """Rows 0 and `pad_id` in each other's place: in a run the padding is id 0 (`xformer.tasks.vocab.Tokenizer`)."""
    if not pad_id:
        return x
    x = np.array(x)
    x[[0, pad_id]] = x[[pad_id, 0]]
    return x


def _of_run(run: Any) -> Pretrained:
    """A run that `xformer.load` gave, as what came out of a folder."""
    config = run.config.to_dict()
    options = dict(config["model"])
    name, model = options.pop("name"), run.model
    if not isinstance(model, Encoder):
        raise WeightsError(f"model.name is {name!r}, which can't be saved: one that derives from Encoder can")
    rows = int(model.embed.table.shape[0]) + (getattr(model, "mask_vector", None) is not None)
    classes = int(model.classify.kernel.shape[1]) if hasattr(model, "classify") else None
    architecture = Architecture(name, rows, model.max_len, config["attention"], options, classes)
    return Pretrained(model, architecture, {}, [], [], Path("nowhere"))


def _arrays(model: Any) -> dict[str, jax.Array]:
    """Every parameter by its path, the layers in a list."""
    state = nnx.state(model.unrolled() if model.scan_layers else model, nnx.Param)
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _tensors(entries: Sequence[Entry], arrays: Mapping[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
    """Names and tensors there, one at a time."""
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.theirs[0], []).append(entry)
    for name, parts in grouped.items():
        pieces = [entry.layout.theirs(np.asarray(arrays[entry.ours])) for entry in parts]
        tensor = np.ascontiguousarray(pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1))
        for copy in (name, *parts[0].copies):
            yield copy, tensor


def _write_tensors(path: Path, entries: Sequence[Entry], arrays: Mapping[str, jax.Array], shard_bytes: int) -> None:
    total = sum(array.nbytes for array in arrays.values())
    metadata = {"format": "pt"}
    if total <= shard_bytes:
        safetensors_numpy.save_file(dict(_tensors(entries, arrays)), path / ONE_FILE, metadata)
        return
    shard: dict[str, np.ndarray] = {}
    names: list[list[str]] = []

    def flush() -> None:
        if shard:
            safetensors_numpy.save_file(shard, path / f"shard-{len(names):05d}", metadata)
            names.append(list(shard))
            shard.clear()

    for name, tensor in _tensors(entries, arrays):
        if sum(x.nbytes for x in shard.values()) + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor
    flush()
    weight_map: dict[str, str] = {}
    for index, held in enumerate(names):
        file = f"model-{index + 1:05d}-of-{len(names):05d}.safetensors"
        (path / f"shard-{index:05d}").rename(path / file)
        weight_map |= dict.fromkeys(held, file)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
