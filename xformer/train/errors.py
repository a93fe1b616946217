"""What can stop a run besides a programming error. Every message is one line for the person at the terminal."""

from __future__ import annotations


class Interrupted(Exception):
    """The run stopped early and can go on: a signal or `stop_at_step`. `step` is the step that is saved."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class Diverged(RuntimeError):
    """A loss, gradient or parameter became NaN or infinite.

    Attributes:
      step: the failing step, which is not saved.
      in_training: False if it showed in an evaluation only.
    """

    def __init__(self, message: str, step: int, in_training: bool = True) -> None:
        super().__init__(message)
        self.step, self.in_training = step, in_training


class CheckpointError(RuntimeError):
    """A checkpoint can't be written, or none is there to be read."""


class CallbackFailed(RuntimeError):
    """A callback raised an error; the message names it and what it raised."""


class WarmStartError(ValueError):
    """What `train.init_from` names can't be started from."""


class OutOfMemory(RuntimeError):
    """A step does not fit the memory of a device."""


class ProcessLost(RuntimeError):
    """A run over many processes can't go on, most likely because one of them is gone."""


class WorkdirBusy(RuntimeError):
    """Another process is using the workdir."""


class WorkdirMismatch(ValueError):
    """The workdir holds a run of another config, or what it holds can't be told."""


class DataChanged(WorkdirMismatch):
    """The data is not what the run was begun with."""
