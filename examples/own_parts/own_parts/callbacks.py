"""A callback."""

from __future__ import annotations

from collections.abc import Mapping

from xformer.train import Callback, Run


class Notes(Callback):
    """Appends a line for each evaluation to a file in the workdir."""

    def __init__(self, file: str = "notes.txt") -> None:
        self.file = file

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        if run.is_main:
            with (run.workdir / self.file).open("a") as notes:
                notes.write(f"step {run.step}: {run.select_metric} {metrics[run.select_metric]:.3f}\n")
