"""Token embeddings and absolute position embeddings. Relative positions live in the attention op instead."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype

from xformer.checks import check_integer
from xformer.nn.check import check_sizes

Array = jax.Array


class TokenEmbedding(nnx.Module):
    """A table of vectors, scaled by sqrt(width) when looked up (Vaswani et al. 2017, section 3.4), or not (`scale`).

    The table starts with standard deviation 1/sqrt(width), so embedded tokens start with unit variance while an
    optimizer that moves each parameter by about its learning rate (Adam) still moves them fast.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        scale: bool = True,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes(vocab_size=vocab_size, width=width)
        init = nnx.initializers.normal(stddev=width**-0.5)
        self.table = nnx.Param(init(rngs.params(), (vocab_size, width), param_dtype))
        self.dtype, self.factor = dtype, width**0.5 if scale else 1.0

    def __call__(self, tokens: Array) -> Array:
        """Maps integer ids `[..., length]` in [0, vocab_size) to `[..., length, width]`; an id outside to NaN.

        Raises ValueError for ids that are no integers.
        """
        vocab_size = self.table.shape[0]
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integer ids, got dtype {tokens.dtype}")
        if isinstance(tokens, np.ndarray):  # JAX would cut off the upper half of 64 bits
            tokens = np.where((tokens < 0) | (tokens >= vocab_size), vocab_size, tokens).astype(np.int32)
        rows = jnp.asarray(self.table[...]).at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return rows.astype(self.dtype) * self.factor


class LearnedPositions(nnx.Module):
    """One trained vector for each of `max_len` positions (BERT: Devlin et al. 2019, section 3).

    Made and scaled like the token embedding, so that tokens and places start with equal weight. The table has `offset`
    rows more before that of position 0, which are never read (RoBERTa's tables have two).
    """

    def __init__(
        self,
        max_len: int,
        width: int,
        *,
        scale: bool = True,
        offset: int = 0,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(stddev=width**-0.5)
        self.table = nnx.Param(init(rngs.params(), (offset + max_len, width), param_dtype))
        self.dtype, self.offset, self.factor = dtype, offset, width**0.5 if scale else 1.0

    def __call__(self, length: int) -> Array:
        """Vectors of positions 0 to `length` - 1, `[length, width]`. ValueError above `max_len`."""
        self._check(length)
        return self.table[self.offset : self.offset + length].astype(self.dtype) * self.factor

    def at(self, positions: Array, max_len: int) -> Array:
        """Vectors of given positions, int `[..., length]` to `[..., length, width]`; from `max_len` on NaN."""
        self._check(max_len)
        rows = self.table.shape[0]
        known = jnp.where(positions < max_len, positions + self.offset, rows)  # those asked for, not the whole table
        return _rows(jnp.asarray(self.table[...]), known).astype(self.dtype) * self.factor

    def _check(self, length: int) -> None:
        if length > (max_len := self.table.shape[0] - self.offset):
            raise ValueError(f"length must be at most max_len {max_len}, got {length}")


class SinusoidalPositions(nnx.Module):
    """Fixed vectors for any position (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, width: int, *, dtype: Dtype = jnp.float32):
        self.width = width
        self.dtype = dtype

    def __call__(self, length: int) -> Array:
        """Vectors of positions 0 to `length` - 1, `[length, width]`, made in float64 and rounded to `dtype`.

        Columns 2i and 2i + 1 are sin and cos of position / 10000^(2i / width); an odd width ends on a sine.
        """
        column_W = np.arange(self.width)
        angle_TxW = np.arange(length)[:, None] / 10000.0 ** (2 * (column_W // 2) / self.width)
        return jnp.asarray(np.where(column_W % 2 == 0, np.sin(angle_TxW), np.cos(angle_TxW)), self.dtype)

    def at(self, positions: Array, max_len: int) -> Array:
        """Vectors of given positions, int `[..., length]` to `[..., length, width]`; from `max_len` on NaN."""
        return _rows(self(max_len), positions)


def _rows(table: Array, positions: Array) -> Array:
    return table.at[positions].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def make_positions(
    kind: Literal["sinusoidal", "learned", "none"],
    max_len: int,
    width: int,
    *,
    scale: bool = True,
    offset: int = 0,
    dtype: Dtype = jnp.float32,
    param_dtype: Dtype = jnp.float32,
    rngs: nnx.Rngs,
) -> SinusoidalPositions | LearnedPositions | None:
    """The position embedding of that name; None for "none". `scale` and `offset` are those of LearnedPositions.

    Raises ValueError for another name, or an offset of what has no table.
    """
    check_integer("position_offset", offset, at_least=0)
    if offset and kind != "learned":
        raise ValueError(f"position_offset must be 0 where position_embedding is {kind!r}, got {offset}")
    if kind == "sinusoidal":
        return SinusoidalPositions(width, dtype=dtype)
    if kind == "learned":
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        return LearnedPositions(max_len, width, scale=scale, offset=offset, **dtypes, rngs=rngs)
    if kind != "none":
        raise ValueError(f"position_embedding must be 'sinusoidal', 'learned' or 'none', got {kind!r}")
    return None
