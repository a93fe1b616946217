"""The first things that a command does: it asks for huge pages, and listens to signals, before imports take seconds."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

RESUMABLE = 75  # as in xformer.commands.cli, which is not imported yet
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(name: str) -> NoReturn:
    """Runs the command `xformer.commands.NAME` on the process's arguments and exits with its code."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # they wait until there is who listens
    use_huge_pages()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a job in the background ignores SIGINT
            signal.signal(number, _nothing_begun)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # `"package.module:Class"` in a config may name a module of the working directory. `python -m` finds those first; a
    # console command would not find them at all. Last, so that nothing there stands in for an installed package.
    if os.getcwd() not in map(os.path.abspath, sys.path):
        sys.path.append(os.getcwd())
    from xformer.commands import cli  # takes seconds

    cli.main(importlib.import_module(f"xformer.commands.{name}").command)


def use_huge_pages() -> None:
    """Begins the process anew, once, where the C library then takes pages of 2 MiB for large blocks.

    XLA asks for the memory of a step anew at every call on a CPU, and each step waits until the system has mapped and
    zeroed it page by page. The GNU C library (2.35 or later) asks for huge pages only where the environment said so
    when the process began, and they are given to those that ask where the system's own setting is `madvise`. What the
    environment says of memory already is left alone, and so is a process that a debugger watches.
    """
    own = any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)
    watched = sys.gettrace() is not None or "pydevd" in sys.modules
    if own or watched or not sys.executable or not gives_huge_pages():
        return
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    os.execve(sys.executable, sys.orig_argv, environment)


def gives_huge_pages() -> bool:
    """Whether this system's C library can ask for huge pages, and must."""
    library = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ()) else None
    try:
        version = tuple(map(int, (library or "glibc 0").split()[-1].split(".")[:2]))
        return version >= (2, 35) and "[madvise]" in HUGE_PAGES.read_text()
    except (OSError, ValueError):
        return False


def _nothing_begun(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once: an exception could be caught, or lost, in the middle of an import."""
    line = f"stopped: {signal.Signals(number).name} came before anything was begun; the same command begins it\n"
    os.write(2, line.encode())
    os._exit(RESUMABLE)
