"""A user's callback, as a config names it: writes down each start of a run, and once kills its process in mid-step."""

import os
import signal
from pathlib import Path

from xformer.train import Callback


class Deadly(Callback):
    """Of the run whose folder is called `victim`, at step `step`; never where the file `killed` is in `folder`."""

    def __init__(self, folder: str = "", victim: str = "", step: int = 1) -> None:
        self.folder, self.victim, self.step = Path(folder), victim, step

    def on_start(self, run):
        with (self.folder / "starts").open("a") as file:
            file.write(f"{run.workdir.name} {run.step} {os.getpid()}\n")

    def on_step(self, run, metrics):
        killed = self.folder / "killed"
        if run.workdir.name == self.victim and run.step == self.step and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
