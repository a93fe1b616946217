"""How a run is going, on one line of a terminal or a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

EVALUATION_EVERY = 10.0  # seconds between lines in a log


class Progress:
    """Shows loss, step time, tokens/s, FLOP/s and time left.

    On a terminal one line is rewritten, ten times a second; elsewhere each row of the metrics file is a line. `stream`
    is stderr unless given; `quiet` shows nothing (the other processes of a run over many hosts).
    """

    def __init__(self, name: str, num_steps: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._name, self._num_steps, self._quiet = name, num_steps, quiet
        self._stream = stream if stream is not None else sys.stderr
        self._live = self._stream.isatty()
        self._width = 0
        self._shown = 0.0

    def step(self, step: int, loss: float, seconds: float | None, tokens: float, flops: int | None, log: bool) -> None:
        """One step is done: its loss, typical seconds, tokens and FLOPs a step. `log`: a row was written."""
        now = time.monotonic()
        if not (log or (self._live and now - self._shown > 0.1)):
            return
        self._shown = now
        parts = [f"{self._name}: step {step}/{self._num_steps}", f"loss {loss:.4f}"]
        if seconds:
            parts += [f"{seconds * 1e3:.1f} ms/step", f"{scaled(tokens / seconds)}tokens/s"]
            parts += [f"{scaled(flops / seconds)}FLOP/s"] if flops else []
            parts += [f"{clock((self._num_steps - step) * seconds)} left"]
        self._show(", ".join(parts))

    def watch(self, split: str, check: Callable[[], None] = lambda: None) -> Callable[[int, int], None]:
        """A function of the examples evaluated so far and of all: calls `check`, and shows now and then how far it is.

        Raises whatever `check` raises.
        """
        shown = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal shown
            check()
            now = time.monotonic()
            if now - shown > (0.5 if self._live else EVALUATION_EVERY):
                shown = now
                self._show(f"{self._name}: evaluated {done:,} of {total:,} examples of the {split} split")

        return report

    def say(self, message: str) -> None:
        """A line that stays."""
        if self._live and self._width:
            self._show("")
            self._stream.write("\r")
            self._width = 0
        if not self._quiet:
            print(f"{self._name}: {message}", file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the line as it is and goes to the next."""
        if self._live and self._width:
            print(file=self._stream, flush=True)
            self._width = 0

    def _show(self, text: str) -> None:
        if self._quiet:
            return
        if self._live:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()


def scaled(value: float) -> str:
    """A number with a metric prefix: 12.3 k, 4.56 G."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} P"


def clock(seconds: float) -> str:
    """h:mm:ss of a number of seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
