"""What a computation costs, in numbers that add up."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from xformer.attention.shape import Shape


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


def call_cost(shape: Shape, flops: int, params: Any) -> Cost:
    """The cost of a call with the bytes of its arguments and result, in float32, and the number of parameters."""
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    tokens = shape.batch * (shape.q_len * shape.num_heads + shape.kv_len * shape.kv_heads)
    return Cost(flops, 4 * (tokens * (shape.head_dim + shape.value_depth) + num_params), num_params)
