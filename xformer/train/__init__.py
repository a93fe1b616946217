"""The training engine. It knows no attention, no model and no task by name."""

from xformer.train.callbacks import CALLBACKS, Callback, EarlyStopping, ExponentialMovingAverage, Run
from xformer.train.engine import Engine
from xformer.train.errors import (
    CallbackFailed,
    CheckpointError,
    DataChanged,
    Diverged,
    Interrupted,
    OutOfMemory,
    ProcessLost,
    WarmStartError,
    WorkdirBusy,
    WorkdirMismatch,
)
from xformer.train.restoring import restore_model
from xformer.train.settings import TrainConfig
from xformer.train.trackers import TRACKERS, Tracker
from xformer.train.trainer import Trainer

__all__ = [
    "CALLBACKS",
    "TRACKERS",
    "Callback",
    "CallbackFailed",
    "CheckpointError",
    "DataChanged",
    "Diverged",
    "EarlyStopping",
    "Engine",
    "ExponentialMovingAverage",
    "Interrupted",
    "OutOfMemory",
    "ProcessLost",
    "Run",
    "Tracker",
    "TrainConfig",
    "Trainer",
    "WarmStartError",
    "WorkdirBusy",
    "WorkdirMismatch",
    "restore_model",
]
