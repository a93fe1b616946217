"""Training from Python, in a notebook or a program of one's own: no flags, no exit."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from xformer import config as files
from xformer import experiment
from xformer.schema import ConfigError, Text
from xformer.train import workdir as folders


def fit(
    config: str | Path | Mapping[str, Any] | ConfigDict,
    workdir: str | Path,
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    data_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Trains an experiment in `workdir` and returns its result: test metrics, FLOPs, step time and more.

    The same call again goes on from the last checkpoint; a finished run gives its result at once, and
    `xformer.load(workdir)` its model. Progress goes to stderr, a line each `train.log_every` steps. The process is left
    as it is: flags and logging are not touched. While it trains in the main thread, Ctrl-C (or a notebook's stop
    button) and SIGTERM save a checkpoint first; afterwards the signals do what they did before.

    Args:
      config: an experiment as a mapping or a ConfigDict, a config file (`path.py`, `path.py:ARGUMENT`, a run's
        `config.json`), or the name of a shipped config such as `listops:bigbird`.
      workdir: folder of the run, made if missing; what it holds is described in the launch guide.
      overrides: values by dotted key, `{"train.num_steps": 200}`, or `train.num_steps=200` as on the command line.
      data_dir: folder of prepared data; default `$XFORMER_DATA`, else `~/.cache/xformer`.

    Raises:
      ConfigError: wrong config or overrides; nothing was computed.
      DataMissing, MissingExtra: what is missing, and the command that gets it.
      Interrupted: a signal or `train.stop_at_step` ended it, saved.
      Diverged, CallbackFailed, CheckpointError, WarmStartError, WorkdirBusy, WorkdirMismatch: as their messages say.
    """
    workdir = Path(workdir)
    given = files.read_plain(str(config)) if isinstance(config, str | Path) else config
    plain = given.to_dict() if isinstance(given, ConfigDict) else dict(given)
    built = experiment.build(files.override(plain, as_overrides(overrides)))
    experiment.check_devices(built)
    folders.check(workdir, experiment.as_json(built.config), experiment.complete)  # refused before data is made
    trainer = built.trainer(workdir, data_dir, progress=_say)
    experiment.recommend_half([built.config.train.dtype], _say)
    return trainer.fit()


def as_overrides(overrides: Any) -> Mapping[str, Any] | list[str]:
    """Overrides as `config.override` takes them; numbers of NumPy become plain ones, strings may be parsed."""
    if isinstance(overrides, Mapping):
        return {str(key): _plain(value) for key, value in overrides.items()}
    given = [overrides] if isinstance(overrides, str) else overrides
    if not isinstance(given, Sequence) or not all(isinstance(item, str) for item in given):
        raise ConfigError(f"overrides: got {overrides!r:.80}, takes a mapping, or a list of strings key=value")
    return list(given)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return Text(str(value), typed=False) if isinstance(value, str | Path) else value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
