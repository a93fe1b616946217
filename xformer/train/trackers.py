"""Where a run's hyperparameters, rows and results go besides its own files: TensorBoard, Weights & Biases, one's own.

TensorBoard's files are written wherever tensorboardX is installed. `train.trackers` in a config lists others:
`("wandb", {"name": "wandb", "project": "mine", "mode": "offline"}, "my_package:Mine")`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from xformer import extras, lookup
from xformer.train import workdir as folder
from xformer.train.callbacks import Run
from xformer.train.errors import CallbackFailed

logger = logging.getLogger(__name__)


class Tracker:
    """Base of all trackers: override what is needed. Process 0 of a run has them, new ones whenever it goes on."""

    def start(self, run: Run, config: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Before the first row of this process.

        Args:
          run: `run.step` is above 0 where the run goes on; rows after it may come a second time.
          config: the run's resolved config.
          metrics: names that every evaluation has.
        """

    def write(self, row: Mapping[str, Any]) -> None:
        """A row of `metrics.jsonl`: `step`, `split` and numbers, None where one is not finite."""

    def end(self, result: Mapping[str, Any]) -> None:
        """The content of `result.json`, of a run that has finished."""

    def flush(self) -> None:
        """Sees that what was written is not lost."""

    def close(self) -> None:
        """Called once, however the run ends."""


class TensorBoard(Tracker):
    """Scalars `split/name` by step, and the run's hyperparameters and final metrics for TensorBoard's HParams.

    Written in the caller's thread: tensorboardX's own would block for ever after a full disk.
    """

    def start(self, run: Run, config: Mapping[str, Any], metrics: Sequence[str]) -> None:
        event_files, self._summary = extras.load("tensorboardX.event_file_writer"), extras.load("tensorboardX.summary")
        self._proto = extras.load("tensorboardX.proto.event_pb2")
        self._writer = event_files.EventsWriter(str(run.workdir / "events"), f".{run.step}")
        if run.step:  # what another process wrote after it is not shown
            log = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._event(run.step + 1, session_log=log)
        tags = {f"{split}/{name}": 0.0 for split in ("validation", "test") for name in metrics}
        experiment, begun, self._ended = self._summary.hparams(dict(flat(config)), tags)
        for summary in (experiment, begun):
            self._event(run.step, summary=summary)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name not in ("step", "split") and value is not None:
                self._event(row["step"], summary=self._summary.scalar(f"{row['split']}/{name}", value))

    def end(self, result: Mapping[str, Any]) -> None:
        self.write({"step": result["best_step"], "split": "test", **result["test"]})
        self._event(result["last_step"], summary=self._ended)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _event(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._proto.Event(wall_time=time.time(), step=step, **content))


class WandB(Tracker):
    """A run of Weights & Biases: config, rows by step, the result as its summary. A run that goes on is the same one.

    Its id stands in `wandb.json` in the workdir, and what is offline in `wandb/` there (`wandb sync` sends that later).

    Args:
      project: of Weights & Biases.
      entity: the user or team; None: the default of the account.
      group: what runs are grouped by, such as a comparison; None: not.
      mode: None: as `WANDB_MODE` says, online by default.

    Raises:
      MissingExtra: wandb is not installed.
    """

    FILE = "wandb.json"

    def __init__(
        self,
        project: str = "xformer",
        entity: str | None = None,
        group: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        extras.check("wandb")
        self._settings = {"project": project, "entity": entity, "group": group, "mode": mode}
        self._run: Any = None
        self._ended = False

    def start(self, run: Run, config: Mapping[str, Any], metrics: Sequence[str]) -> None:
        wandb = extras.load("wandb")
        known = (folder.read_object(run.workdir / self.FILE) or {}).get("id")
        name = f"{run.name}, seed {config['seed']}" if "seed" in config else run.name
        self._run = wandb.init(
            id=known or uuid.uuid4().hex,
            resume="allow",
            name=name,
            dir=str(run.workdir),
            config=dict(config),
            settings=wandb.Settings(console="off"),
            **self._settings,
        )
        folder.write_json(run.workdir / self.FILE, {"id": self._run.id})

    def write(self, row: Mapping[str, Any]) -> None:
        numbers = {
            f"{row['split']}/{name}": value
            for name, value in row.items()
            if name not in ("step", "split") and value is not None
        }
        self._run.log(numbers, step=row["step"])

    def end(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update({key: value for key, value in flat(result) if value is not None})
        self._ended = True

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if self._ended else 1)


TRACKERS: lookup.Table[type[Tracker]] = lookup.Table({"wandb": WandB}, kind=Tracker)
"""The trackers by the name a config gives them; TensorBoard is always there where it is installed."""


def build(config: Mapping[str, Any]) -> Tracker:
    """The tracker of `{"name": ..., **arguments}`; the name is one of `TRACKERS` or `"package.module:Class"`.

    Raises ValueError for a name or an argument that is not taken.
    """
    arguments = dict(config)
    return TRACKERS.find("name", arguments.pop("name", None))(**arguments)


class Trackers(Tracker):
    """TensorBoard, where it is installed, and the trackers of a run, whose errors are one line that names them.

    Args:
      trackers: each with the name that messages give it.
    """

    def __init__(self, trackers: Sequence[tuple[str, Tracker]] = ()) -> None:
        self._named, self._started = tuple(trackers), list[tuple[str, Tracker]]()
        self._board: TensorBoard | None = None

    def start(self, run: Run, config: Mapping[str, Any], metrics: Sequence[str]) -> None:
        board = TensorBoard()
        try:
            board.start(run, config, metrics)
            self._board = board
        except ImportError:
            logger.warning("no TensorBoard events: pip install 'xformer-jax[tensorboard]' for them")
        for name, own in self._named:
            _call(name, own, "start", run, config, metrics)
            self._started.append((name, own))

    def write(self, row: Mapping[str, Any]) -> None:
        self._each("write", row)

    def end(self, result: Mapping[str, Any]) -> None:
        self._each("end", result)

    def flush(self) -> None:
        self._each("flush")

    def close(self) -> None:
        """Closes all, whatever one of them raises; the last error is raised when they are."""
        with contextlib.ExitStack() as stack:
            for name, own in reversed(self._started):
                stack.callback(_call, name, own, "close")
            if self._board is not None:
                stack.callback(self._board.close)

    def _each(self, method: str, *args: Any) -> None:
        if self._board is not None:
            getattr(self._board, method)(*args)
        for name, own in self._started:
            _call(name, own, method, *args)


def _call(name: str, tracker: Tracker, method: str, *args: Any) -> None:
    lookup.guarded(f"tracker {name!r}: {method}", lambda: getattr(tracker, method)(*args), CallbackFailed)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(`a.b`, value) of every leaf of nested mappings; a list as JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value) if isinstance(value, list | tuple) else value
