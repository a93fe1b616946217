"""The training engine. It knows no attention, no model and no task by name."""

from xformer.train.engine import Engine
from xformer.train.errors import (
    CheckpointError,
    DataChanged,
    Diverged,
    Interrupted,
    OutOfMemory,
    ProcessLost,
    WorkdirBusy,
    WorkdirMismatch,
)
from xformer.train.restoring import restore_model
from xformer.train.settings import TrainConfig
from xformer.train.trainer import Trainer

__all__ = [
    "CheckpointError",
    "DataChanged",
    "Diverged",
    "Engine",
    "Interrupted",
    "OutOfMemory",
    "ProcessLost",
    "TrainConfig",
    "Trainer",
    "WorkdirBusy",
    "WorkdirMismatch",
    "restore_model",
]
