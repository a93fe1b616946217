"""Names of the arrays in a tree of parameters. Standard library only, so that every room may import it."""

from __future__ import annotations

import dataclasses
from typing import Any

BLOCKS = "blocks"


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as `blocks/0/attention/value/kernel`; the `value` that Flax puts at the end is left out."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
    return "/".join(names[:-1] if len(names) > 1 and names[-1] == "value" else names)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Where the layers of a model lie in its parameters, which are under `blocks/`.

    In a list, layer i is `blocks/i/`. Scanned layers are stacked: `blocks/` holds arrays `[num_layers, ...]`, or with
    `period` > 1 `blocks/k/` holds arrays `[num_layers / period, ...]` of layers k, k + period, k + 2 period and so on.

    Attributes:
      num_layers: of the model.
      period: after how many layers the attention ops repeat.
      scanned: whether the layers are stacked.
      shared: whether layers `period` apart have the attention op's own parameters in common, which then lie where the
        first of them does, and without an axis of layers.
    """

    num_layers: int
    period: int = 1
    scanned: bool = False
    shared: bool = False

    def layers(self, path: str) -> tuple[range, str]:
        """The layers that an array belongs to, and its path within each of them."""
        _, *names = path.split("/")
        first = int(names.pop(0)) if self.period > 1 or not self.scanned else 0
        step = self.period if self.scanned or self.is_shared(path) else self.num_layers
        return range(first, self.num_layers, step), "/".join(names)

    def is_shared(self, path: str) -> bool:
        """Whether an array is one for all its layers."""
        return self.shared and "attention_fn" in path.split("/")
