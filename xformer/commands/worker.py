"""One run of a comparison in a process of its own, wherever that is: what launchers start.

  python -c "from xformer.commands import start; start.run('worker')" JOB.json OUTCOME.json PARENT

Nobody types this. `xformer compare --workers=2` (or `--launcher`) does: it writes JOB.json, a `Job`, and reads
OUTCOME.json, which `execute` gives. The process ends, saved and resumable, when its parent does.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xformer.commands import cli, compile_cache
from xformer.commands.comparison_plan import Planned
from xformer.commands.comparison_runs import attempt
from xformer.config import check
from xformer.experiment import as_json
from xformer.tasks.location import data_root
from xformer.train import DataChanged, Interrupted
from xformer.train import workdir as folders

INTERRUPTED, CHANGED, LOST = "interrupted", "changed", "lost"  # outcomes besides those of `attempt`
PARENT_DIED = 1  # of prctl: which signal a process gets then


@dataclasses.dataclass(frozen=True)
class Job:
    """A run as any machine that sees its folder can do it. Plain values only, so that JSON holds it.

    Attributes:
      name: what engines and log files call it, unlike any other of the comparison.
      run: the fields of a `Planned`, configs as JSON, `folder` absolute.
      workdir: of the comparison, where compiled programs are kept; absolute.
      directory: where the command was given, for what a config names relative to it.
      data_dir: root of all data, absolute.
      fingerprints: what the data has to be, by task.
      keep: whether all checkpoints of the finished run stay.
      threads: cores that XLA may use; None: all that the process may run on.
    """

    name: str
    run: Mapping[str, Any]
    workdir: str
    directory: str
    data_dir: str
    fingerprints: Mapping[str, Mapping[str, Any]]
    keep: bool
    threads: int | None = None

    def planned(self) -> Planned:
        """The run that this describes."""
        configs = {key: check(value) for key in ("config", "pretraining") if (value := self.run[key]) is not None}
        return Planned(**{**self.run, **configs, "folder": Path(self.run["folder"])})


def describe(
    run: Planned,
    workdir: Path,
    data_dir: str | None,
    fingerprints: Mapping[str, Mapping[str, Any]],
    keep: bool,
    threads: int | None = None,
) -> Job:
    """The job of a run of the comparison in `workdir`."""
    fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    fields |= {"folder": str(run.folder.absolute()), "config": as_json(run.config), "values": dict(run.values)}
    fields["pretraining"] = None if run.pretraining is None else as_json(run.pretraining)
    name = ".".join(filter(None, (run.task, run.role, run.folder.name)))  # names have no dots
    root = str(data_root(data_dir).absolute())
    known = {key: dict(value) for key, value in fingerprints.items()}
    return Job(name, fields, str(workdir.absolute()), os.getcwd(), root, known, keep, threads)


def execute(job: Mapping[str, Any]) -> dict[str, Any]:
    """Does a job, given as the fields of `Job`: `outcome` and `message`.

    The outcome is what `attempt` gives; INTERRUPTED where a signal stopped the run, which is saved; or CHANGED where
    the data is not what it has to be. What else goes wrong before the run begins is raised.
    """
    own = Job(**job)
    if own.threads is not None:
        os.environ["NPROC"] = str(own.threads)  # XLA reads it when its first computation is prepared
    if Path(own.directory).is_dir():
        os.chdir(own.directory)
    try:
        run = own.planned()
        with compile_cache.kept(Path(own.workdir)):
            outcome = attempt(run, own.data_dir, own.fingerprints, {}, own.keep)
    except DataChanged as error:
        return {"outcome": CHANGED, "message": str(error)}
    except Interrupted as error:
        return {"outcome": INTERRUPTED, "message": str(error)}
    except KeyboardInterrupt:
        return {"outcome": INTERRUPTED, "message": "it was starting or ending"}
    failure = folders.read_json(run.folder / "failure.json") or {}
    return {"outcome": outcome, "message": failure.get("error", "")}


def command(argv: Sequence[str]) -> None:
    """Does the job of a file; see the module docstring."""
    job, outcome, parent = argv
    ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before it could be watched
        raise Interrupted("the command that started this is gone; the same command begins it", 0)
    found = execute(json.loads(Path(job).read_text()))
    folders.write_json(Path(outcome), found)
    cli.say(found["outcome"])
