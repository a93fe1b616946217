"""The sizes that the data gives to a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Sizes(dict[str, int]):
    """Constructor arguments of a model that the data decides: `vocab_size`, `num_classes`, `max_len`.

    Attributes:
      assumed: those that only the data can tell, where there is none yet: a guess, good for shapes and rough counts.
    """

    def __init__(self, sizes: Mapping[str, Any], assumed: Iterable[str] = ()) -> None:
        super().__init__({name: int(size) for name, size in sizes.items()})
        self.assumed = tuple(assumed)
