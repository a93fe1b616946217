"""Orders of tokens: in which tokens that a pattern relates, and are far apart, stand side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine.tile_plan import ceil_div

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Order:
    """Every token, in order of position; base of the others.

    Attributes:
      step: what the positions of two tokens differ by if their places do by 1, wherever a pattern relates both; None
        where that is no constant.
    """

    @property
    def step(self) -> int | None:
        return 1

    def length(self, length: int) -> int:
        """The number of places, of so many tokens."""
        return length

    def take(self, x: Any, axis: int) -> Any:
        """`x`, whose `axis` is by token, by place; zeros (False) at places that hold no token."""
        return x

    def put(self, x: Array, axis: int, length: int) -> Array:
        """The inverse of `take`, for orders that have every token."""
        return x

    def positions(self, length: int) -> np.ndarray:
        """The position of the token at each place, int32; any number where there is none."""
        return np.arange(length, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class First(Order):
    """The first `count` tokens."""

    count: int

    def length(self, length: int) -> int:
        return min(self.count, length)

    def take(self, x: Any, axis: int) -> Any:
        return jax.lax.slice_in_dim(x, 0, self.length(x.shape[axis]), axis=axis)

    def positions(self, length: int) -> np.ndarray:
        return np.arange(self.length(length), dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Classes(Order):
    """Tokens by the residue of their position modulo `stride`, those of each class in order, `width` places each."""

    stride: int
    width: int

    @property
    def step(self) -> int:
        return self.stride

    def length(self, length: int) -> int:
        return self.stride * self.width

    def take(self, x: Any, axis: int) -> Any:
        length, rows = x.shape[axis], ceil_div(x.shape[axis], self.stride)
        x = _split(_fill(x, axis, rows * self.stride - length), axis, rows, self.stride)
        x = _fill(jnp.swapaxes(x, axis, axis + 1), axis + 1, self.width - rows)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    def put(self, x: Array, axis: int, length: int) -> Array:
        rows = ceil_div(length, self.stride)
        x = jax.lax.slice_in_dim(_split(x, axis, self.stride, self.width), 0, rows, axis=axis + 1)
        x = jnp.swapaxes(x, axis, axis + 1)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, length, axis=axis)

    def positions(self, length: int) -> np.ndarray:
        places = np.arange(self.length(length), dtype=np.int32)
        return places % self.width * self.stride + places // self.width


@dataclasses.dataclass(frozen=True)
class Summaries(Order):
    """The last `size` tokens of every `stride`, as far as they exist."""

    stride: int
    size: int

    @property
    def step(self) -> None:
        return None

    def length(self, length: int) -> int:
        whole, rest = divmod(length, self.stride)
        return whole * self.size + max(rest - (self.stride - self.size), 0)

    def take(self, x: Any, axis: int) -> Any:
        length, rows = x.shape[axis], ceil_div(x.shape[axis], self.stride)
        x = _split(_fill(x, axis, rows * self.stride - length), axis, rows, self.stride)
        x = jax.lax.slice_in_dim(x, self.stride - self.size, self.stride, axis=axis + 1)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, self.length(length), axis=axis)

    def positions(self, length: int) -> np.ndarray:
        places = np.arange(self.length(length), dtype=np.int32)
        return places // self.size * self.stride + self.stride - self.size + places % self.size


def _fill(x: Array, axis: int, amount: int) -> Array:
    return jnp.pad(x, [(0, amount if at == axis else 0) for at in range(x.ndim)]) if amount else x


def _split(x: Array, axis: int, *sizes: int) -> Array:
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
