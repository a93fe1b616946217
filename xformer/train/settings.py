"""The settings of a training run, checked when made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from xformer.checks import check_integer, is_integer
from xformer.position_tables import Extension

AXES = ("data", "fsdp", "tensor", "sequence")
# How often a batch may hold each training example: a little, so that the smallest data sets work; far more is a mistake
# that would only fill the memory.
MOST_REPEATS = 4
MOST_BUCKETS = 16  # of lengths, each half of the next


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, how large, how often and on what.

    Attributes:
      num_steps: optimizer steps of the whole run; schedules end here.
      num_epochs: passes over the training split after which the run ends if it has not ended by `num_steps`; schedules
        end there too. None: `num_steps` alone decides. Read by whoever opens the data, through `steps_for`.
      batch_size: examples an optimizer step sees, over all devices and processes together.
      eval_batch_size: examples an evaluation step sees, over all devices; None: `batch_size`. Changes no result.
      length_buckets: texts of like length meet in a batch, which is padded to the least that fits of so many lengths:
        the task's `max_len`, half of it, a quarter, ...; each compiles a step of its own. 1: all have `max_len`.
      eval_every: steps between evaluations of the validation split; the last step is always evaluated.
      checkpoint_every: steps between checkpoints; the last step and every new best are always saved.
      log_every: steps between rows for the train split in `metrics.jsonl`, each the mean since the row before.
      parallel: "jit" lays the step over a mesh of devices, "pmap" copies the model to each of them.
      mesh: size by axis: "data" and "fsdp" share out the examples, "fsdp" and "tensor" the parameters, "sequence" the
        length. One size may be -1: all devices that are left. "pmap" takes "data" only.
      dtype: what the model computes in; parameters and optimizer stay float32. Read by whoever builds the model.
      stop_at_step: end here as an interruption would (saved, resumable), schedules untouched. None: run to the end.
      accumulate: micro-batches that an optimizer step is cut into, to save memory; sums first, one division after.
      select_metric: the validation metric that decides which checkpoint is the best; None: the task's first. In a
        config "package.module:Class" names a metric from outside.
      select_mode: whether more ("max") or less ("min") of it is better; None: as the task says of it.
      callbacks: what is called while the run trains, in order: each a name of `xformer.train.CALLBACKS` or
        "package.module:Class", or a section of it and its arguments. Read by whoever makes the trainer.
      metrics: further metrics beside the task's, each "package.module:Class" or a section of it and its arguments; see
        `xformer.tasks.Metric`. Read by whoever makes the trainer, as callbacks are.
      trackers: where rows and results go besides the run's own files and TensorBoard, as callbacks are listed; of
        `xformer.train.TRACKERS` or one's own. Changes no result. Read by whoever makes the trainer.
      init_from: a run's workdir (its best checkpoint), a checkpoint's folder or, as "hf:FOLDER", a Hugging Face folder,
        whose parameters the run starts from; see `xformer.train.warm_start` for what is taken. The optimizer starts
        afresh. A relative path is looked for in the run's own workdir first, but for "hf:".
      init_positions: what makes a longer table of learned positions: "copy" repeats it, "interpolate" stretches it.
      init_strict: whether nothing of `init_from` may be missing, extra or of another shape.

    Raises:
      ValueError: a value out of range; the message names the key.
    """

    num_steps: int
    batch_size: int
    eval_batch_size: int | None = None
    eval_every: int = 500
    checkpoint_every: int = 500
    log_every: int = 50
    parallel: Literal["jit", "pmap"] = "jit"
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"data": -1})
    dtype: Literal["float32", "bfloat16"] = "float32"
    stop_at_step: int | None = None
    accumulate: int = 1
    select_metric: str | None = None
    select_mode: Literal["max", "min"] | None = None
    num_epochs: float | None = None
    callbacks: tuple[str | Mapping[str, Any], ...] = ()
    metrics: tuple[str | Mapping[str, Any], ...] = ()
    trackers: tuple[str | Mapping[str, Any], ...] = ()
    init_from: str | None = None
    init_strict: bool = False
    init_positions: Extension = "copy"
    length_buckets: int = 1

    def __post_init__(self) -> None:
        optional = {"eval_batch_size", "stop_at_step"}
        counts = ("num_steps", "batch_size", "eval_every", "checkpoint_every", "log_every", "accumulate", *optional)
        for name in counts:
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            check_integer(name, value, at_most=2**31 - 1)
        check_integer("length_buckets", self.length_buckets, at_most=MOST_BUCKETS)
        choices = {"parallel": ("jit", "pmap"), "dtype": ("float32", "bfloat16"), "select_mode": ("max", "min", None)}
        choices["init_positions"] = get_args(Extension)
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {getattr(self, name)!r}")
        if self.init_strict and self.init_from is None:
            raise ValueError("init_strict must be False where init_from is None, got True")
        if self.init_positions != "copy" and self.init_from is None:
            raise ValueError(f"init_positions must be 'copy' where init_from is None, got {self.init_positions!r}")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate must divide batch_size, got {self.accumulate} micro-batches of {self.batch_size} examples"
            )
        epochs = self.num_epochs
        if epochs is not None and (isinstance(epochs, bool) or not 0 < epochs < math.inf):
            raise ValueError(f"num_epochs must be a number above 0, or None, got {epochs!r}")
        self._check_mesh()

    def steps_for(self, num_examples: int) -> TrainConfig:
        """These settings with the steps that a training split of so many examples gets by `num_epochs`."""
        if self.num_epochs is None:
            return self
        steps = max(math.ceil(self.num_epochs * num_examples / self.batch_size), 1)
        return dataclasses.replace(self, num_steps=min(self.num_steps, steps))

    def _check_mesh(self) -> None:
        for axis, size in self.mesh.items():
            if axis not in AXES:
                raise ValueError(f"mesh takes the axes {', '.join(AXES)}, got {axis!r}")
            if not is_integer(size) or (size < 1 and size != -1):
                raise ValueError(f"mesh: the size of {axis} must be a positive integer or -1, got {size!r}")
            if self.parallel == "pmap" and axis != "data" and size != 1:
                raise ValueError(
                    f"mesh: parallel 'pmap' shares out data only, got {axis}={size}; 'jit' takes every axis"
                )
        if sum(size == -1 for size in self.mesh.values()) > 1:
            raise ValueError(f"mesh: at most one axis can be -1 (all devices left), got {dict(self.mesh)}")


def selection(train: TrainConfig, better: Mapping[str, str]) -> tuple[str, str]:
    """The metric that decides which checkpoint is the best, and whether less ("min") or more ("max") of it is better.

    Args:
      better: "min" or "max" by metric, as the task says; the first is what is selected by unless the settings say.

    Raises:
      ValueError: the task has no such metric, or `select_mode` says the opposite.
    """
    metric = next(iter(better)) if train.select_metric is None else train.select_metric
    if metric not in better:
        raise ValueError(f"select_metric must be one of {', '.join(better)}, got {metric!r}")
    found = better[metric]
    if train.select_mode not in (None, found):
        raise ValueError(f"select_mode must be {found!r} for {metric}, or None, got {train.select_mode!r}")
    return metric, found


def check_batch_size(train: TrainConfig, num_examples: int) -> None:
    """Raises ValueError for a batch that would hold each training example more than `MOST_REPEATS` times."""
    if train.batch_size > MOST_REPEATS * num_examples:
        raise ValueError(
            f"batch_size must be at most {MOST_REPEATS} times the {num_examples:,} training examples, "
            f"got {train.batch_size:,}"
        )


def check_data(train: TrainConfig, data: Any) -> None:
    """Raises ValueError for settings that opened data can't serve: a batch too large for it, or buckets of lengths."""
    check_batch_size(train, data.num_examples("train"))
    if train.length_buckets > 1 and not getattr(data, "by_length", False):
        raise ValueError(
            f"length_buckets must be 1 where all batches of a task have one length, got {train.length_buckets}"
        )
