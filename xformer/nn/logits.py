"""The logits of a language model as what they are made of, so that those of a whole batch need never exist."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xformer.nn.tokens import flatten

Array = jax.Array
CHUNK_LOGITS = 2**23  # that exist at a time, 32 MiB of them in float32


@functools.partial(jax.tree_util.register_dataclass, data_fields=["hidden", "table"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Logits:
    """Logits `hidden @ table.T`, `[batch, length, vocab_size]` in float32. A pytree.

    `scores` and `argmax` compute some tokens of each row at a time, exactly: the float32 logits of `CHUNK_LOGITS`
    numbers, or of one token of each row, and in the backward pass those once more.

    Attributes:
      hidden: `[batch, length, width]`, the vector that the model gives at each token.
      table: `[vocab_size, width]`, the output embedding.
    """

    hidden: Array
    table: Array

    @property
    def vocab_size(self) -> int:
        """Token ids that there are logits for."""
        return int(self.table.shape[0])

    def dense(self) -> Array:
        """All logits, float32 `[batch, length, vocab_size]`."""
        return _logits(self.hidden, self.table)

    def scores(self, targets: Array, *, chunk_tokens: int | None = None) -> tuple[Array, Array]:
        """The cross entropy of targets in nats, float32 `[batch, length]`, and the likeliest ids, int32 likewise.

        Args:
          targets: int `[batch, length]`; where one is no id in [0, vocab_size) the cross entropy is NaN.
          chunk_tokens: tokens whose logits exist at a time, about; None: as `CHUNK_LOGITS` says.

        Raises:
          ValueError: targets of another shape.
        """
        if targets.shape != self.hidden.shape[:2]:
            raise ValueError(f"targets must be [batch, length] as in {self.hidden.shape}, got {targets.shape}")
        return self._by_chunks(_scores, self.hidden, targets, chunk_tokens=chunk_tokens)

    def argmax(self, *, chunk_tokens: int | None = None) -> Array:
        """The likeliest ids, int32 `[batch, length]`, the first of equals."""
        best = lambda hidden, table: jnp.argmax(_logits(hidden, table), axis=-1).astype(jnp.int32)
        return self._by_chunks(best, self.hidden, chunk_tokens=chunk_tokens)

    def above_mean(self, targets: Array) -> Array:
        """The logits of targets less the mean of all ids' at the same place, float32 `[batch, length]`.

        A share e of this, added to the cross entropy, is label smoothing: the cross entropy of the distribution that
        gives the target 1 - e, and spreads e evenly over all ids (Szegedy et al. 2016, section 7). Nothing as large as
        the logits exists.

        Args:
          targets: int `[batch, length]`; where one is no id in [0, vocab_size) the result is NaN.
        """
        rows = self.table.at[targets].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        directions = rows.astype(jnp.float32) - self.table.astype(jnp.float32).mean(axis=0)
        return jnp.einsum("btw,btw->bt", self.hidden.astype(jnp.float32), directions)

    def _by_chunks(self, fn: Callable[..., Any], *arrays: Array, chunk_tokens: int | None) -> Any:
        """`fn(*arrays, table)` of arrays `[batch, length, ...]`, some tokens of each row at a time."""
        batch, length = self.hidden.shape[:2]
        chunk_tokens = chunk_tokens or max(CHUNK_LOGITS // self.vocab_size, 1)
        step = max(min(chunk_tokens // max(batch, 1), length), 1)
        count = math.ceil(length / step)
        if count <= 1:
            return fn(*arrays, self.table)

        # By stride: where rows are cut along `sequence`, each device has a part of every chunk.
        def cut(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, step * count - length), *((0, 0),) * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(batch, step, count, *x.shape[2:]), 2, 0)

        one = jax.checkpoint(lambda arrays: fn(*arrays, self.table), prevent_cse=False)
        found = jax.lax.map(one, tuple(map(cut, arrays)))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(batch, step * count)[:, :length], found)


def _logits(hidden: Array, table: Array) -> Array:
    flat = jnp.matmul(flatten(hidden), table.T, preferred_element_type=jnp.float32)
    return flat.astype(jnp.float32).reshape(*hidden.shape[:-1], len(table))


def _scores(hidden: Array, targets: Array, table: Array) -> tuple[Array, Array]:
    logits = _logits(hidden, table)
    chosen = jnp.where((targets >= 0) & (targets < len(table)), targets, len(table))
    target = jnp.take_along_axis(logits, chosen[..., None], axis=-1, mode="fill")[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - target
    return loss, jnp.argmax(logits, axis=-1).astype(jnp.int32)
