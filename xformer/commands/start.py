"""The first thing that a command does: listen to signals, before imports that take seconds."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

RESUMABLE = 75  # as in xformer.commands.cli, which is not imported yet
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(name: str) -> NoReturn:
    """Runs the command `xformer.commands.NAME` on the process's arguments and exits with its code."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a job in the background ignores SIGINT
            signal.signal(number, _nothing_begun)
    if hasattr(signal, "pthread_sigmask"):  # whoever started this may have had them wait until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # `"package.module:Class"` in a config may name a module of the working directory. `python -m` finds those first; a
    # console command would not find them at all. Last, so that nothing there stands in for an installed package.
    if os.getcwd() not in map(os.path.abspath, sys.path):
        sys.path.append(os.getcwd())
    from xformer.commands import cli  # takes seconds

    cli.main(importlib.import_module(f"xformer.commands.{name}").command)


def _nothing_begun(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once: an exception could be caught, or lost, in the middle of an import."""
    line = f"stopped: {signal.Signals(number).name} came before anything was begun; the same command begins it\n"
    os.write(2, line.encode())
    os._exit(RESUMABLE)
