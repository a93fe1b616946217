"""Checkpoints that are whole or not there: orbax arrays, the run's position, and a manifest checked on loading.

`checkpoints/STEP/` holds `model/` and `optimizer/` (orbax), `position.json`, `data-PROCESS.json` and `manifest.json`.
It is written as `STEP.tmp` and renamed when complete, so what bears a number was complete once; the manifest's digests
tell whether it still is. The newest two are kept, and the best one that each of them names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from xformer.train import workdir as folders
from xformer.train.errors import CheckpointError, WorkdirMismatch

logger = logging.getLogger(__name__)

KEEP = 2
MANIFEST = "manifest.json"


def _is_news(record: logging.LogRecord) -> bool:
    """False for tracebacks that are logged of orbax's threads: `save` raises what they raise, and that is said once.

    Some come after `save` has returned, so that this has to be a filter for good.
    """
    if not record.exc_info:
        return True
    files = [record.pathname, *(frame.filename for frame in traceback.extract_tb(record.exc_info[2]))]
    return not any("orbax" in Path(file).parts for file in files)


logging.getLogger("absl").addFilter(_is_news)


class Checkpoints:
    """The checkpoints of one run, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, damaged or not, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def save(self, step: int, trees: Mapping[str, Any], position: Mapping[str, Any], data_state: Any) -> None:
        """Writes the checkpoint of `step`, replacing one that is there; then forgets those that nothing needs.

        Every process of the run calls this with its own `data_state`; `position` is the same in all of them.

        Raises:
          CheckpointError: it could not be written; the checkpoints before it are untouched.
        """
        temporary = self.folder / f"{step}.tmp"
        # Which futures were never asked for their exception. It stays where the save fails: some are told of later.
        (futures := logging.getLogger("asyncio")).addFilter(_is_news)
        try:
            if jax.process_index() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            barrier(f"save {step}")
            for name, tree in trees.items():
                _orbax().save(temporary / name, args=ocp.args.StandardSave(tree))
            (temporary / f"data-{jax.process_index()}.json").write_text(json.dumps(data_state))
            barrier(f"saved {step}")
            if jax.process_index() == 0:
                (temporary / "position.json").write_text(json.dumps(position, allow_nan=False))
                self._commit(temporary, self.folder / str(step))
                self._forget()
            barrier(f"committed {step}")
        except Exception as error:  # a full disk, a lost mount, whatever orbax makes of it
            if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
                raise  # another process is gone: no fault of the disk
            with contextlib.suppress(OSError):
                shutil.rmtree(temporary)
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written to {self.folder}: {_line(error)}; "
                f"those before it ({self.steps() or 'none'}) are untouched"
            ) from error
        futures.removeFilter(_is_news)

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """(step, position) of the newest intact checkpoint, None if there is none; damaged ones are set aside."""
        if jax.process_index() == 0:
            self._tidy()
            for step in reversed(self.steps()):
                if (damage := self.damage(step)) is None:
                    break
                logger.warning("checkpoint %s is damaged (%s): skipped", self.folder / str(step), damage)
                aside = self.folder / f"{step}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                (self.folder / str(step)).rename(aside)
        barrier("latest")
        steps = self.steps()
        return (steps[-1], self.position(steps[-1])) if steps else None

    def position(self, step: int) -> dict[str, Any]:
        """The position that was saved with the checkpoint of `step`.

        Raises:
          CheckpointError: it is missing or damaged.
        """
        path = self.folder / str(step) / "position.json"
        try:
            position = folders.read_object(path)
        except WorkdirMismatch as error:
            raise CheckpointError(str(error)) from error
        if position is None:
            raise CheckpointError(f"{path} is missing")
        return position

    def data_state(self, step: int) -> Any:
        """The state of this process's data iterator.

        Raises:
          CheckpointError: the run had another number of processes and their iterators were not all at the same place.
        """
        files = sorted((self.folder / str(step)).glob("data-*.json"))
        own = self.folder / str(step) / f"data-{jax.process_index()}.json"
        if len(files) == jax.process_count():
            return folders.read_json(own)
        states = [folders.read_json(file) for file in files]
        if any(state != states[0] for state in states):
            raise CheckpointError(
                f"{self.folder / str(step)} was saved by {len(files)} processes that read different data; "
                f"it can't go on with {jax.process_count()}"
            )
        return states[0]

    def restore(self, step: int, part: str, target: Any) -> Any:
        """The arrays of a part, in the structure, dtypes and shardings of `target` (of shapes), on any devices.

        Raises:
          CheckpointError: it is missing, damaged, or of a model of another structure.
        """
        if (damage := self.damage(step)) is not None:
            raise CheckpointError(f"checkpoint {self.folder / str(step)} is damaged ({damage})")
        try:
            return _orbax().restore(self.folder / str(step) / part, args=ocp.args.StandardRestore(target))
        except Exception as error:
            raise CheckpointError(f"{self.folder / str(step)} does not fit this model: {_line(error)}") from error

    def damage(self, step: int) -> str | None:
        """What is wrong with the checkpoint of `step`, in a few words; None if every byte is as it was written."""
        path = self.folder / str(step)
        try:
            expected = json.loads((path / MANIFEST).read_text())
            found = _digests(path)
        except (OSError, ValueError) as error:
            return f"{MANIFEST}: {_line(error)}"
        missing = [name for name in expected if name not in found]
        changed = [name for name in expected if name in found and expected[name] != found[name]]
        if missing or changed:
            return ", ".join([f"{name} is missing" for name in missing] + [f"{name} has changed" for name in changed])
        return None

    def thin(self, keep: int) -> None:
        """Deletes every checkpoint but that of the step `keep`; nothing where that one is damaged or missing.

        For runs that are finished: what goes on from here repeats the steps after `keep`.
        """
        if self.damage(keep) is None:
            for step in self.steps():
                if step != keep:
                    self._delete(step)

    def _delete(self, step: int) -> None:
        doomed = self.folder / f"{step}.tmp"  # renamed first: a folder half deleted must not bear a number
        (self.folder / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def _commit(self, temporary: Path, final: Path) -> None:
        folders.write_json(temporary / MANIFEST, _digests(temporary, sync=True))
        old = final.with_name(f"{final.name}.old")
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        folders.sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _forget(self) -> None:
        newest = self.steps()[-KEEP:]
        try:
            best = [(self.position(step).get("best") or {}).get("step") for step in newest]
        except CheckpointError as error:  # which others are needed can't be told
            logger.warning("no checkpoint is deleted: %s", error)
            return
        for step in self.steps():
            if step not in newest and step not in best:
                self._delete(step)

    def _tidy(self) -> None:
        """Clears what a killed process left behind."""
        if not self.folder.is_dir():
            return
        for path in list(self.folder.iterdir()):
            if path.suffix == ".old" and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (".tmp", ".old"):
                shutil.rmtree(path)


def _digests(path: Path, sync: bool = False) -> dict[str, str]:
    """SHA-256 by relative path of every file under `path` but the manifest; `sync` first forces them to the disk."""
    digests = {}
    for file in sorted(file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST):
        with file.open("rb") as opened:
            if sync:
                os.fsync(opened.fileno())
            digests[file.relative_to(path).as_posix()] = hashlib.file_digest(opened, "sha256").hexdigest()
    return digests


def _orbax() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def barrier(name: str) -> None:
    """Returns when every process of the run is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"xformer {name}")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
