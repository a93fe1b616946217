"""The first things that a command does: it listens to signals, before imports that take seconds, and keeps memory."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

RESUMABLE = 75  # as in xformer.commands.cli, which is not imported yet
KEEP = (  # of <malloc.h>: one arena for all threads, large blocks in it too, and never a smaller one
    (-8, 1),  # M_ARENA_MAX
    (-4, 0),  # M_MMAP_MAX
    (-1, -1),  # M_TRIM_THRESHOLD
)
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(name: str) -> NoReturn:
    """Runs the command `xformer.commands.NAME` on the process's arguments and exits with its code."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a job in the background ignores SIGINT
            signal.signal(number, _nothing_begun)
    if hasattr(signal, "pthread_sigmask"):  # whoever started this may have had them wait until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    keep_freed_memory()
    # `"package.module:Class"` in a config may name a module of the working directory. `python -m` finds those first; a
    # console command would not find them at all. Last, so that nothing there stands in for an installed package.
    if os.getcwd() not in map(os.path.abspath, sys.path):
        sys.path.append(os.getcwd())
    from xformer.commands import cli  # takes seconds

    cli.main(importlib.import_module(f"xformer.commands.{name}").command)


def keep_freed_memory() -> bool:
    """Has the C library keep memory that is freed, and give it out again; whether it will.

    XLA asks for the memory of a step anew at every call on a CPU. The GNU C library gives blocks of that size back to
    the system at once, so that each step waits until all its pages are mapped and zeroed. To be called before threads
    allocate, and left alone where the environment says how to allocate. What is kept can still be given back: see
    `xformer.train.memory.release`.
    """
    own = [name for name in os.environ if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD")]
    if sys.platform != "linux" or own:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in KEEP)


def _nothing_begun(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once: an exception could be caught, or lost, in the middle of an import."""
    line = f"stopped: {signal.Signals(number).name} came before anything was begun; the same command begins it\n"
    os.write(2, line.encode())
    os._exit(RESUMABLE)
