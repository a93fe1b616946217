"""Waiting for another process: for what it does, not for a time that a slow machine could need more of."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

HANG = 600.0  # seconds: no process of a test that is right takes as long, however busy the machine


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """Returns when the condition holds; the test fails where the process ends before that, or hangs."""
    deadline = time.monotonic() + HANG
    while True:
        over = process.poll() is not None or time.monotonic() > deadline  # first, as it may have ended with what it did
        if condition():
            return
        if over:
            process.kill()
            pytest.fail(f"what was waited for did not happen: {process.returncode}, {process.communicate()}")
        time.sleep(0.01)


def has_rows(workdir: Path, number: int) -> bool:
    """Whether the metrics file of a run has so many whole rows."""
    path = workdir / "metrics.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") >= number


def free_port() -> int:
    """A port for a process that takes seconds until it listens there.

    It is below those that Linux gives to whoever asks for any, so that nobody else gets it meanwhile; each process of
    the tests begins to look somewhere else.
    """
    for port in range(20_000 + os.getpid() * 101 % 11_000, 32_000):
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port from 20,000 to 31,999 is free")
