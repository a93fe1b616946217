"""Memory of the process that trains."""

from __future__ import annotations

import ctypes
import sys


def release() -> None:
    """Gives the system memory that the C allocator keeps free, much of it the compiler's (Linux with glibc)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)
