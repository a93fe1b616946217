"""A recurrent layer over token sequences, on Flax's own LSTM cell."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

Array = jax.Array
Carry = Any


class LSTM(nnx.Module):
    """An LSTM (Hochreiter & Schmidhuber 1997) read in one direction; padding leaves its state as it was.

    Args:
      in_features, hidden_dim: sizes of what it reads at a token, and of its state.
      reverse: it reads from the last token to the first.
      remat: the backward pass keeps the states alone and computes the gates again.
      dtype: of the computation. param_dtype: of the parameters. rngs: stream `params`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_dim: int,
        *,
        reverse: bool = False,
        remat: bool = False,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.cell = nnx.OptimizedLSTMCell(in_features, hidden_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.hidden_dim, self.reverse, self.remat, self.dtype = hidden_dim, reverse, remat, dtype

    def start(self, batch_size: int) -> Carry:
        """The state before the first token: zeros, (memory, output), each `[batch, hidden_dim]`."""
        return (jnp.zeros((batch_size, self.hidden_dim), self.dtype),) * 2

    def __call__(self, x: Array, mask: Array | None = None, segment_ids: Array | None = None) -> tuple[Array, Carry]:
        """Reads a batch.

        Args:
          x: `[batch, length, in_features]`.
          mask: bool `[batch, length]`, True where a token is real; None: all are.
          segment_ids: int `[batch, length]` of texts that share a row, each of which is read from zeros; None: a row is
            one text.

        Returns:
          (the output at every token, `[batch, length, hidden_dim]`, 0 at padding; the state at the end).
        """
        graphdef, params = nnx.split(self.cell)
        real_BxT = jnp.ones(x.shape[:2], bool) if mask is None else mask > 0
        begins_BxT = jnp.zeros(x.shape[:2], bool) if segment_ids is None else begins(segment_ids, reverse=self.reverse)

        def step(carry: Carry, token: tuple[Array, Array, Array]) -> tuple[Carry, Array]:
            x_BxW, real_B, begins_B = token
            carry = jax.tree.map(lambda old: jnp.where(begins_B[:, None], 0, old), carry)
            read, out_BxH = nnx.merge(graphdef, params)(carry, x_BxW)
            keep = lambda new, old: jnp.where(real_B[:, None], new, old)
            return jax.tree.map(keep, read, carry), keep(out_BxH, jnp.zeros((), out_BxH.dtype))

        if self.remat:
            step = jax.checkpoint(step, prevent_cse=False)
        by_time = (x.astype(self.dtype).swapaxes(0, 1), real_BxT.T, begins_BxT.T)
        carry, out_TxBxH = jax.lax.scan(step, self.start(len(x)), by_time, reverse=self.reverse)
        return out_TxBxH.swapaxes(0, 1), carry


class BidirectionalLSTM(nnx.Module):
    """Two LSTMs that read in opposite directions (Graves & Schmidhuber 2005); the arguments are those of `LSTM`."""

    def __init__(self, in_features: int, hidden_dim: int, **options: Any):
        self.forward = LSTM(in_features, hidden_dim, **options)
        self.backward = LSTM(in_features, hidden_dim, reverse=True, **options)

    def __call__(
        self, x: Array, mask: Array | None = None, segment_ids: Array | None = None
    ) -> tuple[Array, tuple[Carry, Carry]]:
        """As `LSTM`, outputs side by side: `[batch, length, 2 * hidden_dim]`, and both states."""
        forward, forward_carry = self.forward(x, mask, segment_ids)
        backward, backward_carry = self.backward(x, mask, segment_ids)
        return jnp.concatenate([forward, backward], axis=-1), (forward_carry, backward_carry)


def begins(segment_ids: Array, *, reverse: bool = False) -> Array:
    """True at the first token of each run of equal ids, of int `[batch, length]`; `reverse`: at the last one."""
    other = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(other, ((0, 0), (0, 1) if reverse else (1, 0)), constant_values=True)
