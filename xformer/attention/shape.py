"""The sizes of one attention call."""

from __future__ import annotations

import dataclasses

from xformer.checks import check_integer


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one attention call.

    Lengths are in tokens. `num_kv_heads=None` means as many as `num_heads`, and `value_dim=None` that values are as
    deep as keys, `head_dim`.
    """

    batch: int
    q_len: int
    kv_len: int
    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size is not None or field.name not in ("num_kv_heads", "value_dim"):
                check_integer(f"Shape.{field.name}", size)
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.kv_heads}")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def value_depth(self) -> int:
        """Depth of the values, which is that of the output."""
        return self.head_dim if self.value_dim is None else self.value_dim
