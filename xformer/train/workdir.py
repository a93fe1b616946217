"""The folder of a run: one process at a time, one config for ever."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xformer.difference import difference
from xformer.train.errors import WorkdirBusy, WorkdirMismatch

logger = logging.getLogger(__name__)

Complete = Callable[[Mapping[str, Any]], Mapping[str, Any]]

# What may differ when a run goes on: it changes when things happen, or where, not what is computed.
MAY_CHANGE = ("stop_at_step", "log_every", "checkpoint_every", "parallel", "mesh", "trackers")

# Of a result, what no reader can do without.
_RESULT = {"name": str, "best_step": int, "eval": dict, "test": dict}


@contextlib.contextmanager
def lock(workdir: Path) -> Iterator[None]:
    """Keeps other processes out while it is held; the kernel lets go of it when the process ends, however it ends.

    Raises:
      WorkdirBusy: another process (or another run in this one) holds it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / ".lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise WorkdirBusy(f"{workdir} is in use by {owner}; wait for it or choose another workdir") from error
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def claim(workdir: Path, config: Mapping[str, Any], complete: Complete | None = None) -> None:
    """Writes `config.json`, or checks the one that a run has used; allowed changes are logged and written.

    `complete` is that of `changed`.

    Raises:
      WorkdirMismatch: the folder holds a run of another config; the message shows the difference.
    """
    changes = check(workdir, config, complete)
    for key, (old, new) in changes.items():
        logger.warning("%s goes on with %s: %r, before %r", workdir, key, new, old)
    if "train.num_steps" in changes:
        (workdir / "result.json").unlink(missing_ok=True)
    if changes or not started(workdir):
        write_json(workdir / "config.json", config)


def check(workdir: Path, config: Mapping[str, Any], complete: Complete | None = None) -> dict[str, tuple[Any, Any]]:
    """What `changed` says of a folder that holds a started run; nothing for any other folder.

    Raises:
      WorkdirMismatch: the run is of another config, or its `config.json` is gone.
    """
    if not started(workdir):
        return {}
    if not (workdir / "config.json").is_file():
        raise WorkdirMismatch(
            f"{workdir} holds a run whose config.json is missing; restore that, or choose another workdir"
        )
    return changed(workdir, config, complete)


def started(workdir: Path) -> bool:
    """Whether the folder holds a run that has computed something."""
    rows = workdir / "metrics.jsonl"
    finished = (workdir / "result.json").exists()
    return finished or any((workdir / "checkpoints").glob("*")) or (rows.exists() and rows.stat().st_size > 0)


def changed(workdir: Path, config: Mapping[str, Any], complete: Complete | None = None) -> dict[str, tuple[Any, Any]]:
    """(value there, value here) by dotted key, where `config` differs from `config.json` as it may.

    Args:
      workdir: the run's folder.
      config: the run's config now.
      complete: fills in keys that are newer than the run that wrote `config.json`, with the values that it had.

    Raises:
      WorkdirMismatch: it differs in what it may not.
    """
    given = json.loads(json.dumps(config))
    there = read_object(workdir / "config.json")
    if not there:
        raise WorkdirMismatch(f"{workdir / 'config.json'} is damaged: it holds no key")
    if complete is not None and there != given:
        there = json.loads(json.dumps(complete(there)))
    changes = difference(there, given)
    refused = {key: change for key, change in changes.items() if not _allowed(key, change, given)}
    if refused:
        spelt = "; ".join(f"{key}: {old!r} there, {new!r} now" for key, (old, new) in refused.items())
        hint = " (more steps: only with a constant schedule)" if "train.num_steps" in refused else ""
        raise WorkdirMismatch(f"{workdir} holds a run of another config: {spelt}{hint}; choose another workdir")
    return changes


def _allowed(key: str, change: tuple[Any, Any], config: Mapping[str, Any]) -> bool:
    if key == "train.num_steps":
        constant = config.get("optimizer", {}).get("schedule") == "constant"
        return constant and all(isinstance(steps, int) for steps in change) and change[1] > change[0]
    return key.startswith("train.") and key.split(".")[1] in MAY_CHANGE


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where there is none.

    Raises:
      WorkdirMismatch: the file is empty, cut off or otherwise no JSON.
    """
    if not path.exists():
        return None
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise WorkdirMismatch(f"{path} is damaged: it is no JSON ({' '.join(str(error).split())})") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no file.

    Raises:
      WorkdirMismatch: the file is empty, cut off or otherwise no JSON object.
    """
    content = read_json(path)
    if (content is not None and not isinstance(content, dict)) or (content is None and path.exists()):
        raise WorkdirMismatch(f"{path} is damaged: it holds {json.dumps(content)[:40]}, not an object")
    return content


def read_result(workdir: Path) -> dict[str, Any] | None:
    """The content of `result.json`, or None where there is none or it is damaged, which a warning says."""
    path = workdir / "result.json"
    try:
        result = read_object(path)
        if result is not None:
            wrong = [key for key, kind in _RESULT.items() if not isinstance(result.get(key), kind)]
            if wrong:
                raise WorkdirMismatch(f"{path} is damaged: {', '.join(wrong)} is missing, or is not what it was")
    except WorkdirMismatch as error:
        logger.warning("%s; what it said is found again from the checkpoints", error)
        return None
    return result


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all, and to the disk."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, and to the disk."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
