"""A Hugging Face folder on disk: its config and its tensors, one at a time. Never a pickle, never the network."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xformer import extras
from xformer.weights.errors import WeightsError

safetensors = extras.Lazy("safetensors")  # optional

CONFIG, ONE_FILE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin")
DTYPES = ("F64", "F32", "F16", "BF16")
CONVERT = (
    'python -c "import glob, torch, safetensors.torch as s; p = {}; '
    "[p.update(torch.load(f, weights_only=True)) for f in glob.glob('*model*.bin')]; "
    "s.save_file({k: v.clone().contiguous() for k, v in p.items()}, 'model.safetensors')\""
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies, its shape, and its dtype by the format's name."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class Folder:
    """The config and the tensors of a folder. Nothing is read but headers, until a tensor is asked for.

    Args:
      path: the folder; or a `.safetensors` file in it, whose tensors alone are read.

    Attributes:
      config: what `config.json` holds.
      tensors: name -> where it lies. Old names of layer norms (`gamma`, `beta`) are `weight` and `bias` here.

    Raises:
      WeightsError: no folder, no config, no safetensors, or a damaged file.
    """

    def __init__(self, path: str | Path):
        path = Path(path).expanduser()
        if not path.exists():
            raise WeightsError(f"{path}: there is no such folder; weights are read from disk, never from a network")
        self.path = path if path.is_dir() else path.parent
        self.config = read_json(self.path / CONFIG)
        files = _files(self.path) if path.is_dir() else {path: None}
        self.tensors: dict[str, Stored] = {}
        for file, names in files.items():
            header = {stored.name: stored for stored in _header(file)}
            for stored in header.values():
                name = _modern(stored.name)
                if name in self.tensors:
                    raise WeightsError(f"{file}: {name} is in {self.tensors[name].file.name} too")
                self.tensors[name] = stored
            if missing := sorted(set(names or ()) - header.keys()):
                raise WeightsError(f"{self.path / INDEX}: says that {file.name} has {missing[0]}, which it has not")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; only its file's header was read."""
        return self.tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        """One tensor, as it is stored. Its file is mapped for so long only: no more of it stays in memory."""
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise WeightsError(f"{stored.file}: {name} has dtype {stored.dtype}; {', '.join(DTYPES)} can be read")
        try:
            with safetensors.safe_open(stored.file, framework="numpy") as file:
                return file.get_tensor(stored.name)
        except (safetensors.SafetensorError, OSError) as error:
            raise WeightsError(f"{stored.file}: {name} can't be read: {_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. WeightsError where it is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path.parent} holds no {path.name}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise WeightsError(f"{path} can't be read: {_line(error)}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """The files with tensors, and of shards the names that the index promises."""
    if (folder / ONE_FILE).is_file():
        return {folder / ONE_FILE: None}
    if not (folder / INDEX).is_file():
        if pickles := [name for name in PICKLES if (folder / name).exists()]:
            raise WeightsError(
                f"{folder} holds {pickles[0]}, a pickle, which can run any program and is not read; where PyTorch is "
                f"installed, {ONE_FILE} is made of it there by: {CONVERT}"
            )
        raise WeightsError(f"{folder} holds no {ONE_FILE} and no {INDEX}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise WeightsError(f"{folder / INDEX} must have a weight_map: names of tensors with their files")
    promised: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(f"{folder / INDEX}: {name} must be in a .safetensors file of the folder, got {file!r}")
        if not (folder / file).is_file():
            raise WeightsError(f"{folder / INDEX}: {name} is in {file}, which is missing")
        promised.setdefault(folder / file, []).append(name)
    return dict(promised)


def _header(file: Path) -> Iterator[Stored]:
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118, no mapping
                piece = opened.get_slice(name)
                yield Stored(file, name, tuple(piece.get_shape()), str(piece.get_dtype()))
    except (safetensors.SafetensorError, OSError, MemoryError) as error:
        raise WeightsError(f"{file} is damaged, or no safetensors file: {_line(error)}") from error


def _modern(name: str) -> str:
    stem, dot, last = name.rpartition(".")
    return stem + dot + {"gamma": "weight", "beta": "bias"}.get(last, last)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
