"""What a benchmark compares: contenders, each an implementation of attention, on cases, each an op and its sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xformer.attention import Attention, Shape
from xformer.bench.timing import Call


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to compute: an op, the sizes and dtype of the call, forward only or forward and backward."""

    op: Attention
    shape: Shape
    dtype: str = "float32"
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Ready:
    """A contender set up for a case: inputs made, program compiled where it can be.

    Attributes:
      call: what is measured.
      flops: of one call.
      needs: bytes that one call takes, as far as that is known before; NaN if it is not.
      results: turns what a call gives into its output and the gradients of query, key and value, each
        `[batch, length, heads, head_dim]`, so that contenders can be checked against each other; None for one that
        draws random blocks of its own and so computes something else.
    """

    call: Call
    flops: float
    needs: float = math.nan
    results: Callable[[Any], Sequence[np.ndarray]] | None = None


@dataclasses.dataclass(frozen=True)
class Contender:
    """One implementation that takes part in a benchmark: a name, and `prepare`, which sets it up for a case.

    `prepare` runs nothing, and raises NotImplementedError where the implementation can't do the case.
    """

    name: str
    prepare: Callable[[Case], Ready]
