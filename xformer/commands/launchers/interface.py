"""What a launcher is: it starts jobs, says what became of them, and stops them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from xformer.commands.comparison_plan import Planned
from xformer.commands.worker import LOST, Job

SAVING = 120.0  # seconds that runs which are stopped have, to save and to end


class Launcher(Protocol):
    """Starts jobs where it can, without waiting for them.

    Attributes:
      tries: how often a run is started whose worker is lost; 1 where the engine itself tries again.
      threads: cores that each job's XLA may use; None where the engine, or the operating system, sees to that.
    """

    tries: int
    threads: int | None

    def plan(self, runs: Sequence[Planned], data_dir: str | None) -> None:
        """Looks at all runs before the first is started."""

    def start(self, run: Planned, job: Job, alone: bool = False) -> Any:
        """Starts a job and gives a handle; None while there is no room for it. `alone`: with no other beside it."""

    def poll(self, handle: Any) -> dict[str, Any] | None:
        """What `worker.execute` gave, or `lost` of a worker that ended without; None while it goes on."""

    def stop(self, handles: Sequence[Any]) -> None:
        """Has these save and end, and returns when they have."""


def lost(message: str) -> dict[str, Any]:
    """The outcome of a job whose worker is gone."""
    return {"outcome": LOST, "message": " ".join(message.split())}


def failed(message: str) -> dict[str, Any]:
    """The outcome of a job that could not begin."""
    return {"outcome": "failed", "message": " ".join(message.split())}
