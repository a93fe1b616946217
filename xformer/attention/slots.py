"""What the variants that mix tokens into slots share: which tokens are real, and windows of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.call import Call
from xformer.attention.dtypes import compute_dtype
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.signature import Params

Array = jax.Array
NO_PAIRS = "its slots mix the length, so there are no token pairs left"
REFUSES: Mapping[str, str] = dict.fromkeys(("bias", "segment_ids", "positions", "softcap", "sinks", "plan"), NO_PAIRS)


def without_padding(name: str, call: Call) -> tuple[Array, Array, Array]:
    """Which keys are real, and keys and values in the dtype of the computation, zero where they are not.

    Args:
      name: of the variant, for messages.
      call: whose mask may only say which keys are padding.

    Returns:
      bool `[batch or 1, kv_len, 1 or num_heads]`; key and value `[batch, kv_len, num_kv_heads, depth]`. Query heads
      that see different tokens have keys of their own: then key and value have `num_heads` heads.

    Raises:
      NotImplementedError: the mask differs by query.
    """
    dtype = compute_dtype(call.query.dtype)
    key, value = call.key.astype(dtype), call.value.astype(dtype)
    if call.mask is None:
        return jnp.ones((1, key.shape[1], 1), bool), key, value
    batch, heads, q_len, _ = call.mask.shape
    if q_len != 1:
        raise NotImplementedError(
            f"{name} cannot honour a mask with query dimension {q_len} (only 1, a padding mask, works): {NO_PAIRS}"
        )
    real = jnp.broadcast_to(jnp.moveaxis(call.mask[:, :, 0], 1, 2), (batch, key.shape[1], heads))
    if heads > 1:
        key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    key, value = (jnp.where(real[..., None], x, 0) for x in (key, value))
    return real, key, value


def for_heads(params: Params, num_heads: int) -> dict[str, Any]:
    """Parameters `[1 or num_kv_heads, ...]` for keys of so many heads, as `without_padding` gives them."""
    return {name: x if x.shape[0] == 1 else jnp.repeat(x, num_heads // x.shape[0], 0) for name, x in params.items()}


def windows(x: Array, size: int) -> Array:
    """`[batch, length, ...]` cut into windows of `size` tokens, `[batch, num_windows, size, ...]`, zeros at the end."""
    length = x.shape[1]
    num_windows = ceil_div(length, size)
    padded = jnp.pad(x, [(0, 0), (0, num_windows * size - length)] + [(0, 0)] * (x.ndim - 2))
    return padded.reshape(x.shape[0], num_windows, size, *x.shape[2:])


def convolve(x: Array, kernel: Array, precision: Any = None) -> Array:
    """A convolution along the length with a stride as wide as its kernel, head by head.

    `x [batch, length, heads, depth]`, `kernel [1 or heads, size, depth, out_depth]` ->
    `[batch, num_windows, heads, out_depth]`.
    """
    kernel, cut = kernel.astype(x.dtype), windows(x, kernel.shape[1])
    if kernel.shape[0] == 1:
        return jnp.einsum("bnwhd,wde->bnhe", cut, kernel[0], precision=precision)
    return jnp.einsum("bnwhd,hwde->bnhe", cut, kernel, precision=precision)


def as_mask(real: Array) -> Array:
    """bool `[batch or 1, slots, heads or 1]` -> `[batch or 1, heads or 1, 1, slots]`."""
    return jnp.moveaxis(real, 1, 2)[:, :, None]
