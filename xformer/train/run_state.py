"""Where a run is, besides its arrays and its data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from xformer.train.checkpoint import Checkpoints

logger = logging.getLogger(__name__)

# Step times kept for the median.
TIMES = 200


@dataclasses.dataclass
class Position:
    """Where a run is, besides its arrays and its data: saved with every checkpoint.

    Attributes:
      step: optimizer steps done.
      examples, tokens: seen in training so far, fillers not counted; see `token_masks` for what counts as a token.
      seconds: spent training so far: no compilation, evaluation or saving.
      waited: seconds of those in which the loop waited for data.
      step_seconds: the last steps' times, each process's first step left out.
      sums, counts: of the steps since the last row for the train split.
      best: step, value and validation metrics of the best checkpoint; None before the first evaluation.
      evaluated: False if an evaluation is due at this step but was interrupted.
      flops_per_step: of the whole first step over all devices; `uncounted` names what it leaves out.
      train_flops: of all steps so far, each by the length of its batch.
      callbacks: what each callback remembers.
      stopped: why a callback ended the run before its last step; None where none did.
      peak_memory_bytes: what one device needs for the compiled training step; None if that is unknown.
    """

    step: int = 0
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    sums: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    best: dict[str, Any] | None = None
    evaluated: bool = True
    flops_per_step: int = 0
    train_flops: int = 0
    uncounted: list[str] = dataclasses.field(default_factory=list)
    peak_memory_bytes: int | None = None
    callbacks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    stopped: str | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Position:
        """The position that `dataclasses.asdict` wrote."""
        before = content["flops_per_step"] * content["step"]  # where all batches had one length
        return cls(**{"train_flops": before, **content})

    def check_best(self, checkpoints: Checkpoints) -> None:
        """Forgets a best checkpoint that has been damaged; the next evaluation makes a new one."""
        if self.best is not None and (damage := checkpoints.damage(self.best["step"])) is not None:
            logger.warning(
                "the best checkpoint (step %d) is damaged (%s): the best is chosen anew from step %d on",
                self.best["step"], damage, self.step,
            )  # fmt: skip
            self.best, self.evaluated = None, False
