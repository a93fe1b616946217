"""A model of ours from a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype

from xformer import extras, position_tables, tokenizer_files
from xformer.position_tables import Extension
from xformer.tree_paths import BLOCKS, path_name
from xformer.weights import families
from xformer.weights.errors import WeightsError
from xformer.weights.family import Architecture, Family, has_global_tokens, has_t5_bias
from xformer.weights.folder import CONFIG, Folder
from xformer.weights.keys import Keys
from xformer.weights.layout import Shape
from xformer.weights.tensors import Tensors

logger = logging.getLogger(__name__)
tokenizers = extras.Lazy("tokenizers")  # optional
POSITIONS = "positions/table"
CLASSES = ("classify/kernel", "classify/bias")
SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model out of a folder.

    Attributes:
      model: the NNX module, called as `architecture.model` of `MODELS` is.
      architecture: what it was made from; `architecture.attention` and `architecture.options` are the `attention` and
        `model` sections of a config.
      config: what `config.json` holds.
      fresh: paths of arrays that the folder has not, drawn freshly.
      unused: names of tensors that the model has no place for.
      folder: where it comes from.
    """

    model: nnx.Module
    architecture: Architecture
    config: Mapping[str, Any]
    fresh: list[str]
    unused: list[str]
    folder: Path

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer as a `tokenizers.Tokenizer`; None where it has none.

        `tokenizer.json`, `vocab.txt`, or `vocab.json` with `merges.txt` is read.

        Raises:
          WeightsError: the file can't be read.
          MissingExtra: `tokenizers` is not installed.
        """
        if not tokenizer_files.exists(self.folder):
            return None
        make = tokenizers.Tokenizer.from_str
        try:
            return make(tokenizer_files.read(self.folder))
        except extras.MissingExtra:
            raise
        except Exception as error:  # the library raises no class of its own
            raise WeightsError(
                f"{self.folder}: its tokenizer can't be read: {' '.join(str(error).split())[:300]}"
            ) from error


def load(
    path: str | Path,
    *,
    model: str | None = None,
    num_classes: int | None = None,
    attention: Mapping[str, Any] | None = None,
    max_len: int | None = None,
    positions: Extension = "copy",
    options: Mapping[str, Any] | None = None,
    as_released: bool | None = None,
    dtype: Dtype = jnp.float32,
    param_dtype: Dtype = jnp.float32,
    seed: int = 0,
) -> Pretrained:
    """The model that a Hugging Face folder holds, with the same logits; or another one that starts from it.

    `config.json` and `model.safetensors`, or its shards, are read. Tensors are read one at a time: at no time is there
    a second copy of the model. What a model gets that the folder has not is drawn freshly, and named.

    Args:
      path: the folder, or a `.safetensors` file in it.
      model: "masked_lm", "classifier", "token_classifier" or "decoder"; None: the one that the folder's class is.
      num_classes: of a classifier; where the folder has others, the last layer is drawn freshly. None: the folder's.
      attention: the section of another op, such as `{"name": "longformer", "window": 512}`; None: the folder's own.
      max_len: longest input in tokens; None: the folder's.
      positions: what a longer table of positions is made of: "copy" or "interpolate".
      as_released: attention as their code computes it, so that logits can be compared, where that is not what the paper
        defines: a block-sparse BigBird counts the first block again in place of random blocks (`ReleasedBigBird`), and
        Nystromformer counts padding and what else is in the batch (`ReleasedNystrom`). None: BigBird as the paper
        defines it, Nystromformer as released, since its logits are theirs in no other way.
      options: other keys of the `model` section, such as dropout rates or `remat`.
      dtype: of the computation. param_dtype: of the parameters.
      seed: of what is drawn freshly.

    Raises:
      WeightsError: no such folder, only a pickle, damaged files, a family, head or activation that is not known here,
        a missing tensor or one of another shape.
      MissingExtra: `safetensors` is not installed.
    """
    folder = Folder(path)
    family, architecture = describe(folder, model)
    if as_released or (as_released is None and family.equal_as_released_only):
        architecture = released(folder, family, architecture)
    changes: dict[str, Any] = {"attention": attention, "max_len": max_len}
    if num_classes is not None and architecture.num_classes is None:
        raise WeightsError(f"num_classes must be None for {architecture.model}, which has none, got {num_classes}")
    changes["num_classes"] = num_classes
    changed = {key: value for key, value in changes.items() if value is not None}
    own = dict(architecture.options)
    if attention is not None:
        try:
            if own.get("global_projections"):
                own["global_projections"] = has_global_tokens(attention)  # other ops have none to project
            if own.get("share_attention_params"):
                own["share_attention_params"] = has_t5_bias(attention)
        except (ValueError, NotImplementedError) as error:
            raise WeightsError(f"attention: {error}") from error
    changed["options"] = {**own, **(options or {})}
    if positions not in get_args(Extension):
        raise WeightsError(f"positions must be 'copy' or 'interpolate', got {positions!r}")
    architecture = dataclasses.replace(architecture, **changed)
    make = lambda: architecture.make(nnx.Rngs(seed), dtype, param_dtype)
    try:
        _ = architecture.op
        tensors = Tensors(folder, family, architecture)  # what is missing is said before the model is made
        abstract = nnx.eval_shape(make)
    except WeightsError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        given = {**changes, "options": options or None}
        asked = ", ".join(name for name, value in given.items() if value is not None)
        whose = f"{folder.path / CONFIG}" + (f", with the {asked} given" if asked else "")
        raise WeightsError(f"{whose}: no model can be made of it: {error}") from error
    offset = architecture.options.get("position_offset", 0)
    made, fresh = _fill(abstract, make, tensors, None if max_len is None else positions, offset)
    # What has a place, but another shape, as the last layer for another number of classes.
    unused = sorted([*tensors.unused, *(tensors.entries[path][1] for path in fresh if path in tensors.entries)])
    for what, names in (("drawn freshly, not from", fresh), ("left, no place for them, of", unused)):
        if names:
            logger.warning("%d arrays %s %s: %s", len(names), what, folder.path, _short(names))
    return Pretrained(made, architecture, folder.config, fresh, unused, folder.path)


def sections(path: str | Path, model: str | None = None) -> dict[str, dict[str, Any]]:
    """The `attention` and `model` sections of a config for a run that starts from a folder; no tensor is read.

    Args:
      path, model: see `load`.

    Raises:
      WeightsError: as `load`.
    """
    _, found = describe(Folder(path), model)
    return {"attention": dict(found.attention), "model": {"name": found.model, **found.options}}


def describe(folder: Folder, model: str | None = None, *, trunk: bool = False) -> tuple[Family, Architecture]:
    """The family and the architecture that a folder's config describes, with the head of `model` if given.

    trunk: where the family has no such head, any will do.
    """
    keys = Keys(folder.config, folder.path / CONFIG)
    model_type, family = families.find(keys)
    own = families.model_of(keys, model_type, family)
    if trunk and model not in family.models:
        model = family.models[0]
    return family, family.read(keys, families.check_model(keys, family, model or own))


def released(folder: Folder, family: Family, architecture: Architecture) -> Architecture:
    """The architecture with attention as their code computes it; the same where that is what the paper defines."""
    if family.released is None:
        return architecture
    section = family.released(Keys(folder.config, folder.path / CONFIG), architecture.attention)
    return dataclasses.replace(architecture, attention=section)


def way(tensors: Tensors, path: str, shape: Shape, offset: int) -> Literal["as it is", "fitted", "zero", "fresh"]:
    """How our array of this path comes out of a folder, told from headers alone.

    Args:
      offset: rows of a table of positions that are no position's.

    Raises:
      WeightsError: the tensor has a shape that does not fit.
    """
    if not tensors.layers(path):
        return "zero" if tensors.is_zero(path) else "fresh"
    if (wrong := tensors.misfit(path, shape)) is None:
        return "as it is"
    if path.startswith(f"{BLOCKS}/"):
        raise WeightsError(wrong)
    entry, name = tensors.entries[path]
    there = tensors.folder.shape(name)
    if path == POSITIONS and len(there) == 2 and there[1] == shape[1] and there[0] > offset + entry.layout.skip:
        return "fitted"
    if path in CLASSES and there[1:] == entry.layout.shape(shape)[1:]:  # a head for another number of classes
        return "fresh"
    raise WeightsError(wrong)


def read(tensors: Tensors, path: str, shape: Shape, offset: int, positions: Extension) -> np.ndarray | None:
    """Our array of this path; None for what is drawn freshly. WeightsError as `way`."""
    how = way(tensors, path, shape, offset)
    if how == "zero":
        return np.zeros(shape, np.float32)
    if how != "fitted":
        return tensors.read(path, shape) if how == "as it is" else None
    entry, name = tensors.entries[path]
    rows, *rest = tensors.folder.shape(name)
    there = (rows - entry.layout.skip, *rest)
    done = "cut" if shape[0] <= there[0] else {"copy": "copied", "interpolate": "interpolated"}[positions]
    logger.info("positions: %d there, %d here: %s", there[0] - offset, shape[0] - offset, done)
    return position_tables.extend(tensors.read(path, there), shape[0], offset, positions)


def _fill(
    abstract: nnx.Module, make: Any, tensors: Tensors, positions: Extension | None, offset: int
) -> tuple[nnx.Module, list[str]]:
    """The model with its arrays, and the paths of those that were drawn freshly.

    Raises WeightsError as `way`, and without `positions` for a table of positions that is not as long as it should be.
    """
    graph, state = nnx.split(abstract)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    shapes = [(path_name(path), leaf.shape) for path, leaf in leaves]
    for path, shape in shapes:
        if way(tensors, path, shape, offset) == "fitted" and positions is None:  # before anything is read
            raise WeightsError(tensors.misfit(path, shape))
    values: list[Any] = []
    for (path, shape), (_, leaf) in zip(shapes, leaves, strict=True):
        value = read(tensors, path, shape, offset, positions or "copy")
        values.append(None if value is None else jnp.asarray(value, leaf.dtype))
    lacking = [index for index, value in enumerate(values) if value is None]
    if lacking:
        draw = jax.jit(lambda: [jax.tree.leaves(nnx.state(make()))[index] for index in lacking])
        for index, value in zip(lacking, draw(), strict=True):
            values[index] = value
    return nnx.merge(graph, jax.tree.unflatten(tree, values)), [shapes[index][0] for index in lacking]


def _short(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
