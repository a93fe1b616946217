"""Times of several calls, measured in turn.

All calls run in one process and take turns, so that whatever else the machine does slows all of them alike. Compilation
and first calls are never timed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Call:
    """Something to measure: `launch` starts it, `wait` returns when what `launch` gave is ready.

    `memory` gives the bytes that one call takes on an accelerator; on a CPU the process's own high-water mark says it.
    `planned` are bytes that the call takes for certain, as a compiler planned them.
    """

    launch: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    memory: Callable[[], float] | None = None
    planned: float = 0.0

    def __call__(self) -> Any:
        return self.wait(self.launch())


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How often calls take turns: at least `least` times, then up to `most` while that takes less than `seconds`.

    A turn repeats a short call for `turn_seconds` and counts as one measurement; before it comes a pause of
    `pause_seconds`, in which the threads of whoever ran before, which spin for a while after their work, go to sleep.
    """

    least: int = 5
    most: int = 15
    seconds: float = 20.0
    turn_seconds: float = 0.03
    pause_seconds: float = 0.02


def in_turn(calls: Mapping[Key, Call], rounds: Rounds) -> dict[Key, list[float]]:
    """Seconds a call, measured once a round for each; every call was run before."""
    repeats = {key: max(1, math.ceil(rounds.turn_seconds / _seconds(call, 1))) for key, call in calls.items()}
    times: dict[Key, list[float]] = {key: [] for key in calls}
    started = time.perf_counter()
    for turn in range(rounds.most):
        if turn >= rounds.least and time.perf_counter() - started > rounds.seconds:
            break
        for key, call in calls.items():
            time.sleep(rounds.pause_seconds)
            times[key].append(_seconds(call, repeats[key]))
    return times


def _seconds(call: Call, repeats: int) -> float:
    # An accelerator runs what it is given one by one, so one wait is enough; on a CPU calls would overlap.
    overlapping = jax.default_backend() == "cpu"
    started = time.perf_counter()
    for _ in range(repeats):
        out = call.launch()
        if overlapping:
            call.wait(out)
    call.wait(out)
    return (time.perf_counter() - started) / repeats


def quartiles(seconds: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high
