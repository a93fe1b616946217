"""A benchmark of contenders: their results checked against each other, then time and memory measured in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from xformer.bench import memory, timing
from xformer.bench.contender import Case, Contender, Ready
from xformer.bench.timing import Key

# Of the largest entry; on a GPU float32 products may run in TF32.
TOLERANCE = {"float32": 5e-3, "bfloat16": 3e-2, "float16": 1e-2}


def prepare(
    found: Iterable[Contender], case: Case, check: Callable[[str, Ready], None] = lambda name, ready: None
) -> tuple[dict[str, Ready], dict[str, str]]:
    """Sets contenders up for a case and calls each once.

    Args:
      found: the contenders; results are checked against those of the first.
      case: what they are to compute.
      check: given a name and a contender that is set up, raises NotImplementedError to leave it out uncalled.

    Returns:
      The contenders that can do the case, and for each of the others the reason: it refuses the case, it failed, or it
      computes something else.
    """
    ready: dict[str, Ready] = {}
    skipped: dict[str, str] = {}
    expected: Sequence[np.ndarray] | None = None
    for contender in found:
        try:
            one = contender.prepare(case)
            check(contender.name, one)
            given = one.call()
            if one.results is not None:
                results = one.results(given)
                expected = results if expected is None else expected
                _agree(results, expected, case.dtype)
            ready[contender.name] = one
        except (ValueError, RuntimeError, MemoryError) as error:  # refusals, no compiler, out of memory
            skipped[contender.name] = " ".join(str(error).split())[:200] or type(error).__name__
    return ready, skipped


def _agree(results: Sequence[np.ndarray], expected: Sequence[np.ndarray], dtype: str) -> None:
    """NotImplementedError where results are not the expected ones."""
    for name, got, want in zip(("output", "query", "key", "value"), results, expected, strict=False):
        error = float(np.abs(got - want).max() / np.abs(want).max())
        if not error <= TOLERANCE[dtype]:
            what = name if name == "output" else f"gradient of {name}"
            raise NotImplementedError(f"computes something else: its {what} is off by {error:.1e} of the largest entry")


def measure(ready: Mapping[Key, Ready], rounds: timing.Rounds, gemm_rate: float) -> dict[Key, dict[str, Any]]:
    """Measures contenders in turn: seconds, FLOPs and memory of each, as they stand in result files.

    Each was called before: a first call may compile.
    """
    figures: dict[Key, dict[str, Any]] = {}
    for name, seconds in timing.in_turn({name: one.call for name, one in ready.items()}, rounds).items():
        low, middle, high = timing.quartiles(seconds)
        flops, extra = ready[name].flops, memory.extra_memory(ready[name].call)
        figures[name] = {
            "seconds": middle,
            "quartiles": [low, high],
            "rounds": len(seconds),
            "flops": flops,
            "flops_per_second": flops / middle,
            "share_of_gemm": flops / middle / gemm_rate,
            "extra_bytes": extra if math.isfinite(extra) else None,  # JSON knows no NaN
        }
    return figures
