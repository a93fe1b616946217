"""Who is measured beside xformer: what JAX has, what PyTorch and Transformers have, and what a user's own file adds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

from xformer.bench.contender import Case, Contender
from xformer.bench.jax_contenders import jax_peers

Extra = Callable[[Case], Iterable[Contender]]


def load_extra(path: Path) -> Extra:
    """The function `contenders(case)` of a Python file, for peers that can't be installed.

    Raises:
      ValueError: no such file, or no such function in it.
    """
    spec = importlib.util.spec_from_file_location("extra_contenders", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"got {str(path)!r}, takes a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, "contenders", None)):
        raise ValueError(f"got {str(path)!r}, takes a file that defines contenders(case)")
    return found


def peers(case: Case, extra: Extra | None = None) -> list[Contender]:
    """All that compute the case's op without this package: in JAX, in PyTorch where it is installed, and extra ones."""
    found = list(jax_peers(case))
    if has_torch():
        from xformer.bench.torch_contenders import torch_peers  # imports PyTorch, which few have

        found += torch_peers(case)
    return [*found, *(extra(case) if extra else ())]


def has_torch() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
