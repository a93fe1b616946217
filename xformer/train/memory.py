"""Memory of the process that trains."""

from __future__ import annotations

import ctypes
import sys


def release() -> None:
    """Gives memory that the C allocator holds back for later, after compiling some 150 MB, to the system (Linux)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)
