"""Ray: each run is a task of a Ray cluster, which schedules it by its resources and starts it again when it is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from xformer import extras
from xformer.commands import worker
from xformer.commands.comparison_plan import Planned
from xformer.commands.launchers.interface import SAVING, failed, lost
from xformer.schema import ConfigError

ray = extras.Lazy("ray")
RETRIES = 3
OPTIONS = {"num_cpus": float, "num_gpus": float, "memory": float, "accelerator_type": str}  # of Ray, a run


class OnRay:
    """Tasks of the cluster that `RAY_ADDRESS` names, or of the one on this machine; of a new one where there is none.

    Args:
      resources: options of a Ray task (OPTIONS), others are custom resources of the cluster by their name and amount.
      most: at most so many runs at once; None: as many as there are resources for.

    Raises:
      MissingExtra: Ray is not installed.
      ConfigError: a resource of another kind, or the cluster can't be reached.
    """

    tries = 1  # Ray itself tries again

    def __init__(self, resources: Mapping[str, Any], most: int | None = None) -> None:
        for name, value in resources.items():
            kind = OPTIONS.get(name, float)
            fits = isinstance(value, str) if kind is str else isinstance(value, int | float) and value >= 0
            if not fits or isinstance(value, bool):
                takes = "a string" if kind is str else "a number from 0"
                raise ConfigError(f"--resources: got {name}={value!r}, takes {takes}")
        if not ray.is_initialized():
            try:
                ray.init(log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                line = " ".join(str(error).split())
                raise ConfigError(f"--launcher: the Ray cluster can't be reached: {line}") from error
        options = {name: value for name, value in resources.items() if name in OPTIONS}
        custom = {name: value for name, value in resources.items() if name not in OPTIONS}
        # A process a run: what JAX and a run before hold is given back, and a device is the task's own.
        self._task = ray.remote(max_calls=1)(worker.execute)
        self._options = {"max_retries": RETRIES, "num_cpus": 1, **options, "resources": custom or None}
        self.threads: int | None = max(int(options.get("num_cpus", 1)), 1)
        self._most, self._running = most, set[Any]()

    def plan(self, runs: Sequence[Planned], data_dir: str | None) -> None:
        pass

    def start(self, run: Planned, job: worker.Job, alone: bool = False) -> Any:
        if self._most is not None and len(self._running) >= self._most:
            return None
        handle = self._task.options(name=job.name, **self._options).remote(dataclasses.asdict(job))
        self._running.add(handle)
        return handle

    def poll(self, handle: Any) -> dict[str, Any] | None:
        done, _ = ray.wait([handle], timeout=0)
        if not done:
            return None
        self._running.discard(handle)
        try:
            return ray.get(handle)
        except ray.exceptions.TaskCancelledError:
            return {"outcome": worker.INTERRUPTED, "message": "Ray cancelled it"}
        except ray.exceptions.RayTaskError as error:  # raised before the run began
            return failed(str(error.cause or error))
        except ray.exceptions.RayError as error:
            return lost(f"Ray lost it {RETRIES + 1} times: {type(error).__name__}: {str(error).splitlines()[0]}")

    def stop(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            ray.cancel(handle)  # as Ctrl-C: a run saves
        deadline, waiting = time.monotonic() + SAVING, list(handles)
        try:
            while waiting and time.monotonic() < deadline:
                _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=1)
        finally:
            for handle in waiting:
                with contextlib.suppress(ValueError, ray.exceptions.RayError):
                    ray.cancel(handle, force=True)
