"""What a computation costs, in numbers that add up."""

from __future__ import annotations

import dataclasses


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
