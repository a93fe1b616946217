"""Efficient attention in JAX and Flax: run it, compare it, reuse it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xformer.fitting import fit
    from xformer.loading import Loaded, load

__all__ = ["Loaded", "fit", "load"]

_HOMES = {"Loaded": "xformer.loading", "fit": "xformer.fitting", "load": "xformer.loading"}


def __getattr__(name: str) -> object:
    # Late, so that `import xformer.attention` needs jax and numpy only.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'xformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
