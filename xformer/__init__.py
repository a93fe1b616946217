"""Efficient attention in JAX and Flax: run it, compare it, reuse it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xformer.loading import Loaded, load

__all__ = ["Loaded", "load"]


def __getattr__(name: str) -> object:
    # Late, so that `import xformer.attention` needs jax and numpy only.
    if name in __all__:
        from xformer import loading

        return getattr(loading, name)
    raise AttributeError(f"module 'xformer' has no attribute {name!r}")
