"""Checks of arguments that several layers and models share. All raise ValueError with one line."""

from __future__ import annotations

from typing import Any

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


def check_tokens(name: str, tokens: Any, longest: int) -> None:
    """An array of token ids is `[batch, length]`, and no longer than a model reads."""
    if tokens.ndim != 2 or tokens.shape[1] > longest:
        raise ValueError(f"{name} must be [batch, length] with length up to {longest}, got {tokens.shape}")


def check_dropout(has_dropout: bool, deterministic: bool, rngs: Any) -> None:
    """A model that drops something is given what draws it."""
    if has_dropout and not deterministic and rngs is None:
        raise ValueError("deterministic=False needs rngs with a stream 'dropout', got rngs=None")


def check_segments(segment_ids: Any, decoder_segment_ids: Any) -> None:
    """Segments are given of sources and targets, or of neither."""
    if (segment_ids is None) != (decoder_segment_ids is None):
        raise ValueError("segment_ids and decoder_segment_ids must be given together")
