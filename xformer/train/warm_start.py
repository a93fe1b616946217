"""Starting from the parameters of another run (`train.init_from`): what fits is taken, what does not is named.

Parameters are matched by their path. One of another shape is left as it was freshly drawn (a head for other classes,
embeddings of another vocabulary), except for tables of positions, which are fitted:

- learned absolute positions: cut; or repeated from the first, or interpolated (`xformer.position_tables`); those of a
  grid, as the patches of an image have, interpolated in two dimensions (Dosovitskiy et al. 2021, section 3.2).
- tables over the distance (Shaw, Shaw2D, MusicRelative): every distance takes the row of its own distance, and one
  beyond those the row of the farthest in its direction, as if distances were clipped (Shaw et al. 2018, equation 5).
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from xformer.position_tables import Extension, extend
from xformer.train import workdir as folders
from xformer.train.checkpoint import MANIFEST, Checkpoints
from xformer.train.errors import CheckpointError, WarmStartError, WorkdirMismatch
from xformer.train.restoring import choose
from xformer.train.run_state import Position
from xformer.tree_paths import path_name

logger = logging.getLogger(__name__)

FILE = "init_from.json"
SHOWN = 6  # names in one group of a message


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint to start from, or a folder whose arrays somebody else reads.

    Attributes:
      folder: of the checkpoint.
      digest: SHA-256 of its manifest, which has those of its files.
      position_offset: rows of its table of positions that are no position's, the first ones.
      arrays: parameters by path, each read when it is asked for; None: those of a checkpoint of ours.
    """

    folder: Path
    digest: str
    position_offset: int = 0
    arrays: Mapping[str, np.ndarray] | None = dataclasses.field(default=None, compare=False, repr=False)

    def record(self) -> dict[str, Any]:
        """What a run remembers of where it started."""
        return {"checkpoint": str(self.folder), "digest": self.digest}


def find(path: str | Path) -> Source:
    """The checkpoint that `train.init_from` names: a checkpoint's folder, or the best one of a run's.

    Raises:
      WarmStartError: there is none, or it is damaged.
    """
    path = Path(path).expanduser()
    own = path.parent if path.name.isdigit() and (path / MANIFEST).is_file() else None
    checkpoints = Checkpoints(own or path / "checkpoints")
    try:
        step = int(path.name) if own else choose(checkpoints, "best")
        if (damage := checkpoints.damage(step)) is not None:
            raise CheckpointError(f"{path} is damaged ({damage})")
    except CheckpointError as error:
        hint = "" if path.exists() else f"; there is no {path}"
        raise WarmStartError(
            f"init_from: got {str(path)!r}, takes a run's workdir or a checkpoint in it: {error}{hint}"
        ) from error
    folder = checkpoints.folder / str(step)
    config = folders.read_object(folder.parent.parent / "config.json") or {}
    offset = (config.get("model") or {}).get("position_offset", 0)
    return Source(folder, hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest(), offset)


def read(folder: Path, part: str) -> dict[str, np.ndarray]:
    """Every array of a part of a checkpoint by its path, whatever the model, on one device."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        stored = checkpointer.metadata(folder.absolute() / part).item_metadata.tree
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), stored)
        arrays = checkpointer.restore(folder.absolute() / part, args=ocp.args.StandardRestore(target))
    return {path_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(arrays)}


def cost(folder: Path) -> dict[str, Any]:
    """What a checkpoint cost: `train_flops` and `train_seconds` of its whole run, or up to it where that is not
    finished, and of the runs that this one started from; of a finished run its `name`, `select_metric` and `test` too.
    """
    workdir = folder.parent.parent
    result = folders.read_result(workdir)
    if result is None:
        position = Position.from_json(Checkpoints(folder.parent).position(int(folder.name)))
        result = {"train_flops": position.train_flops, "train_seconds": position.seconds}
    before = (folders.read_object(workdir / FILE) or {}).get("source", {})
    total = {key: result.get(key, 0) + before.get(key, 0) for key in ("train_flops", "train_seconds")}
    return {key: result[key] for key in ("name", "select_metric", "test") if key in result} | total


@dataclasses.dataclass
class Report:
    """What a warm start took, by path; `fitted` and `left` with both shapes."""

    taken: list[str] = dataclasses.field(default_factory=list)
    fitted: list[str] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    extra: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        groups: tuple[tuple[str, list[str]], ...] = (
            (f"{len(self.taken) + len(self.fitted)} arrays taken", []),
            ("tables of positions fitted", self.fitted),
            ("left freshly drawn, because their shape differs", self.left),
            ("left freshly drawn, because they are not there", self.missing),
            ("there, but not in this model", self.extra),
        )
        return "; ".join(
            f"{what}: {_short(names)}" if names else what for what, names in groups if names or what.endswith("taken")
        )


def _short(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def apply(
    source: Source, params: Any, constants: Any, *, strict: bool = False, positions: Extension = "copy"
) -> tuple[Any, Any, Report]:
    """(params, constants) with the arrays of the source for those that it has, and what was taken.

    Args:
      params, constants: trees of arrays at step 0. Values keep their dtypes and shardings.
      strict: nothing may differ but what is fitted by rule.
      positions: what a longer table of learned absolute positions is made of.

    Raises:
      WarmStartError: no parameter is taken; or, with `strict`, something is missing, extra or of another shape.
    """
    stored = read(source.folder, "model") if source.arrays is None else {}
    part = lambda name: {key.partition("/")[2]: x for key, x in stored.items() if key.startswith(f"{name}/")}
    theirs, rest = part("params") if source.arrays is None else source.arrays, part("rest")
    report, found = Report(), set()

    def take(there: Mapping[str, np.ndarray], path: tuple, mine: Any) -> Any:
        name = path_name(path)
        if name not in there:
            report.missing.append(name)
            return mine
        found.add(name)
        value = there[name]
        if value.shape != mine.shape:
            shapes = f"{name} ({list(value.shape)} there, {list(mine.shape)} here)"
            fitted = fit(name, value, mine.shape, source.position_offset, positions)
            shapes += ", interpolated" if fitted is not None and re.search(GRID, name) else ""
            (report.left if fitted is None else report.fitted).append(shapes)
            if fitted is None:
                return mine
            value = fitted
        else:
            report.taken.append(name)
        return jax.device_put(value.astype(mine.dtype), mine.sharding)

    params = jax.tree_util.tree_map_with_path(lambda path, x: take(theirs, path, x), params)
    constants = jax.tree_util.tree_map_with_path(lambda path, x: take(rest, path, x), constants)
    report.extra = [name for name in theirs if name not in found]
    if not report.taken and not report.fitted:
        raise WarmStartError(f"init_from: no parameter of {source.folder} fits this model: {report}")
    if strict and (report.left or report.missing or report.extra):
        raise WarmStartError(f"init_from: {source.folder} differs, and init_strict is True: {report}")
    return params, constants, report


def _by_distance(table: np.ndarray, length: int, offset: int, positions: Extension) -> np.ndarray:
    theirs, mine = table.shape[-2] // 2, length // 2
    return np.take(table, np.clip(np.arange(-mine, mine + 1), -theirs, theirs) + theirs, axis=-2)


# (pattern of a parameter's path, what makes a table of another length of it); rows are the last dimension but one.
TABLES: tuple[tuple[str, Callable[[np.ndarray, int, int, Extension], np.ndarray]], ...] = (
    (r"(^|/)positions/table$", extend),
    (r"/position/((row|column|sequence)_)?(key|value)$", _by_distance),
)


GRID = r"(^|/)positions/grid$"  # learned positions `[rows, columns, width]`


def fit(
    name: str, value: np.ndarray, shape: tuple[int, ...], offset: int = 0, positions: Extension = "copy"
) -> np.ndarray | None:
    """A table of positions with as many rows as `shape` asks for; None for what no rule fits to it.

    offset: rows at the beginning of a table of learned absolute positions that stay as they are.
    positions: what a longer one is made of.
    """
    if value.ndim != len(shape) or value.ndim < 2:
        return None
    if re.search(GRID, name) and value.shape[-1] == shape[-1]:
        return np.asarray(jax.image.resize(value, shape, "bilinear"))
    if value.shape[:-2] != shape[:-2] or value.shape[-1] != shape[-1]:
        return None
    rule = next((rule for pattern, rule in TABLES if re.search(pattern, name)), None)
    return None if rule is None else rule(value, shape[-2], offset, positions)


def record(workdir: Path, source: Source, report: Report) -> None:
    """Records where a run starts, what that cost and what it took, or compares it with where it started before.

    Raises:
      WorkdirMismatch: it started elsewhere.
    """
    recorded = folders.read_object(workdir / FILE)
    if recorded is not None and folders.started(workdir) and recorded.get("digest") != source.digest:
        raise WorkdirMismatch(
            f"{workdir} started from {recorded.get('checkpoint')}, whose content was another than that of "
            f"{source.folder} now; bring that checkpoint back or choose another workdir"
        )
    before = cost(source.folder) if source.arrays is None else {}  # nobody knows what others spent
    content = source.record() | dataclasses.asdict(report) | {"source": before}
    folders.write_json(workdir / FILE, content)
