"""Training that starts from a Hugging Face folder: `train.init_from="hf:FOLDER"`."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from xformer import tokenizer_files, weights
from xformer.schema import ConfigError
from xformer.train import WarmStartError, warm_start
from xformer.tree_paths import path_name
from xformer.weights.family import has_global_tokens, has_t5_bias
from xformer.weights.folder import CONFIG, Folder
from xformer.weights.layout import Shape
from xformer.weights.loading import describe
from xformer.weights.saving import BY_ID, swapped
from xformer.weights.tensors import Tensors

logger = logging.getLogger(__name__)
PREFIX = "hf:"
# Keys of the `model` section that decide what the arrays mean, whatever their shapes.
MEANING = (
    "norm", "norm_type", "norm_epsilon", "activation", "num_heads", "position_embedding", "position_offset",
    "scale_embeddings", "embedding_norm", "head_activation", "head_epsilon",
)  # fmt: skip
OWN = ("scan_layers", "global_projections", "share_attention_params", "remat")


def fill(config: dict[str, Any]) -> dict[str, Any]:
    """A config whose `model` section leaves the sizes to the folder that `train.init_from` names, with all of them.

    Where the model section has no `width`, every key that it lacks is the folder's, with the attention's where that has
    the same name; and a task with a tokenizer and no file for it has the folder's. Other configs are as they are.

    Raises:
      ConfigError: the folder can't be read.
    """
    path, model = config["train"]["init_from"], config["model"]
    if not (isinstance(path, str) and path.startswith(PREFIX)) or "width" in model:
        return config
    folder = path.removeprefix(PREFIX)
    try:
        there = weights.sections(folder, model["name"])
    except weights.WeightsError as error:
        raise ConfigError(f"train.init_from: {error}") from error
    try:
        own = {"global_projections": has_global_tokens(config["attention"])}
        if there["model"].get("share_attention_params"):
            own["share_attention_params"] = has_t5_bias(config["attention"])
    except (ValueError, NotImplementedError):
        own = {}  # said when the op is built, with the key that is wrong
    task, attention = config["task"], config["attention"]
    if task.get("vocab") == "tokenizer" and task.get("tokenizer") is None:
        task = {**task, "tokenizer": folder}
    position, of_folder = attention.get("position"), there["attention"].get("position")
    if position and of_folder and position["name"] == of_folder["name"]:
        attention = {**attention, "position": {**of_folder, **position}}
    if attention["name"] == there["attention"]["name"]:
        attention = {**there["attention"], **attention}
    return {**config, "model": {**there["model"], **own, **model}, "task": task, "attention": attention}


def source(path: str, config: Mapping[str, Any], sizes: Mapping[str, Any], pad_id: int = 0) -> warm_start.Source:
    """The folder that a run starts from, its arrays by the paths of the run's model.

    Args:
      path: the folder, `hf:` in front or not.
      config: the complete config of the run. sizes: those of its data; tables of more ids are cut to its `vocab_size`.
      pad_id: what the run's tokenizer pads with: in the run it is 0, and ids of the two are swapped.

    Raises:
      WarmStartError: it can't be read, or its arrays mean something else in this model.
    """
    given = {key: value for key, value in config["model"].items() if key != "name"}
    name = config["model"]["name"]
    try:
        folder = Folder(path.removeprefix(PREFIX))
        family, there = describe(folder, name, trunk=True)
        check_meaning(folder, there.options if there.model == name else _trunk(there.options), given)
        kept = {key: given[key] for key in OWN if key in given}
        there = dataclasses.replace(there, attention=config["attention"], options={**there.options, **kept})
        tensors = Tensors(folder, family, there)
    except weights.WeightsError as error:
        raise WarmStartError(f"init_from: {error}") from error
    make = lambda: there.make(nnx.Rngs(0))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(nnx.eval_shape(make), nnx.Param))
    shapes = {path_name(at): leaf.shape for at, leaf in leaves}
    offset = there.options.get("position_offset", 0)
    as_there = config["task"].get("vocab") == "tokenizer"
    if not as_there:
        logger.warning("init_from: task.vocab is not 'tokenizer', so ids may mean other tokens than in %s", folder.path)
    elif others := _other_tokens(folder.path, config["task"]["tokenizer"]):
        logger.warning(
            "init_from: the tokenizer of %s is not that of task.tokenizer %s: of %d ids it has other tokens",
            folder.path, config["task"]["tokenizer"], others,
        )  # fmt: skip
    arrays = _Arrays(tensors, shapes, pad_id if as_there else 0, sizes.get("vocab_size") if as_there else None)
    return warm_start.Source(folder.path.absolute(), _digest(folder), offset, arrays)


def _trunk(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if not key.startswith("head_")}


def check_meaning(folder: Folder, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises WarmStartError where a run's model would compute something else with the same arrays."""
    differ = [f"model.{key} is {here.get(key)!r}, there {there[key]!r}" for key in MEANING if key in there
              and here.get(key) != there[key]]  # fmt: skip
    if differ:
        raise WarmStartError(
            f"init_from: {folder.path / CONFIG} describes another model: {'; '.join(differ)}; "
            "xformer.weights.sections gives the sections of a config"
        )


class _Arrays(Mapping[str, np.ndarray]):
    """The arrays of a folder by the paths of our model, each read when it is asked for."""

    def __init__(self, tensors: Tensors, shapes: Mapping[str, Shape], pad_id: int, num_ids: int | None):
        self._tensors, self._pad_id, self._num_ids = tensors, pad_id, num_ids
        self._shapes = {path: x for path, x in shapes.items() if tensors.layers(path) or tensors.is_zero(path)}

    def __getitem__(self, path: str) -> np.ndarray:
        shape = self._shapes[path]
        if not self._tensors.layers(path):
            return np.zeros(shape, np.float32)
        try:
            x = self._tensors.read(path, shape)
        except weights.WeightsError as error:
            raise WarmStartError(f"init_from: {error}") from error
        return swapped(x, self._pad_id)[: self._num_ids] if path in BY_ID else x

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _other_tokens(folder: Path, tokenizer: str) -> int:
    """How many ids are another token for a folder's own tokenizer than for the run's; 0 where it has none."""
    if not tokenizer_files.exists(folder):
        return 0
    try:
        own, used = tokenizer_files.tokens(folder), tokenizer_files.tokens(tokenizer)
    except (OSError, ValueError):
        return 0  # the run has read its own by now, and the folder's is not asked for
    return sum(own.get(index) != used.get(index) for index in own.keys() | used.keys())


def _digest(folder: Folder) -> str:
    """A hash of the config and of every file with tensors."""
    total = hashlib.sha256((folder.path / CONFIG).read_bytes())
    for file in sorted({stored.file for stored in folder.tensors.values()}):
        with file.open("rb") as opened:
            total.update(hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()
