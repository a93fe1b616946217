"""The Attention contract: what every variant takes, returns, refuses and costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

Array = jax.Array
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one attention call. Lengths are in tokens; `num_kv_heads=None` means as many as `num_heads`."""

    batch: int
    q_len: int
    kv_len: int
    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size is None and field.name == "num_kv_heads":
                continue
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
                raise ValueError(f"Shape.{field.name} must be a positive integer, got {size!r}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.kv_heads}")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call costs.

    Attributes:
      flops: floating-point operations of matrix products and convolutions, 2 per multiply-add.
      bytes: bytes of the call's array arguments and results, each counted once (float32 for closed forms).
      params: number of trainable parameters.
      uncounted: names of what could not be counted; empty when `flops` is the whole truth.
    """

    flops: int
    bytes: int
    params: int = 0
    uncounted: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        uncounted = self.uncounted + tuple(name for name in other.uncounted if name not in self.uncounted)
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.params + other.params, uncounted)

    def scale(self, times: int) -> Cost:
        """The cost of doing this `times` times with the same parameters."""
        return dataclasses.replace(self, flops=self.flops * times, bytes=self.bytes * times)
