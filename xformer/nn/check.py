"""Checks of constructor arguments that several layers share. All raise ValueError with one line."""

from __future__ import annotations

from xformer.checks import check_integer


def check_sizes(**sizes: int | None) -> None:
    """Each size is a positive integer, or None where that is its default."""
    for name, size in sizes.items():
        if size is not None:
            check_integer(name, size)


def check_rates(**rates: float) -> None:
    """Each rate is a share below 1."""
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {rate!r}")


def check_heads(width: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None = None) -> int:
    """The features of a head: `head_dim`, by default what heads get that divide the width evenly.

    Query heads share key heads evenly.
    """
    check_sizes(width=width, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    if head_dim is None and width % num_heads:
        raise ValueError(f"num_heads must divide width, got num_heads={num_heads} and width={width}; or give head_dim")
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, got num_kv_heads={num_kv_heads} and {num_heads} heads")
    return head_dim or width // num_heads
