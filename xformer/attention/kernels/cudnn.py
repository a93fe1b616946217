"""implementation="cudnn": full and causal attention in half precision, through cuDNN's flash attention.

cuDNN takes a number of keys for each example, not a mask. Without a causal cut the order of the keys does not matter,
so a padding mask is honoured by moving the real keys to the front.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.kernels.pallas import common_refusals, key_padding, merge_heads
from xformer.attention.kernels.tile_lists import num_tiles
from xformer.attention.pattern import Causal, Full, Pattern, Window, split_causal

Array = jax.Array
CUTS_ITSELF, TAKES_OFFSETS = True, False  # what `kernels.meshes` needs to know
TILES = ()  # cuDNN chooses its own


def refusals(inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> list[str]:
    """Why cuDNN can't do a call; empty where it can. Only shapes and dtypes are read."""
    reasons, (q_len, head_dim), kv_len = [], inputs.query.shape[1::3], inputs.key.shape[1]
    if inputs.query.dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"computes in bfloat16 or float16, got {inputs.query.dtype}")
    if head_dim % 8 or head_dim > 128:
        reasons.append(f"head_dim must be a multiple of 8 up to 128, got {head_dim}")
    cut = _cut(pattern)
    if cut is None:
        reasons.append("it knows full attention and causal windows, no other pattern")
    elif cut["is_causal"] and (controls.offset != 0 if isinstance(controls.offset, int) else True):
        reasons.append("its causal cut starts at position 0: no query offset")
    elif cut["is_causal"] and q_len != kv_len:
        reasons.append(f"its causal cut needs as many keys as queries, got {kv_len} and {q_len}")
    elif cut["is_causal"] and controls.mask is not None:
        reasons.append("it takes no padding mask with a causal cut")
    if controls.q_segments is not None:
        reasons.append("it takes no segments")
    return reasons + common_refusals(inputs, controls, settings, slopes=False)


@functools.cache
def unusable() -> list[str]:
    """Why JAX can't call cuDNN on this machine, such as none or an old one being installed; empty where it can."""
    spec = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    try:
        jax.eval_shape(lambda x: jax.nn.dot_product_attention(x, x, x, implementation="cudnn"), spec)
    except (RuntimeError, ValueError, TypeError) as error:
        return [" ".join(str(error).split())[:200]]
    return []


def _cut(pattern: Pattern) -> dict[str, Any] | None:
    """The pattern in the words of `jax.nn.dot_product_attention`; None where it has none."""
    if isinstance(pattern, Full):
        return {"is_causal": False}
    if isinstance(pattern, Causal):
        return {"is_causal": True}
    base, causal = split_causal(pattern)
    if causal and isinstance(base, Window) and base.unit == 1:
        return {"is_causal": True, "local_window_size": (base.left, 0)}
    return None


def flops(pattern: Pattern, q_len: int, kv_len: int, head_dim: int) -> int:
    """Of one head's forward pass, counted in tiles of 128 x 128 pairs: cuDNN does not say what it executes."""
    q_block, kv_block = min(q_len, 128), min(kv_len, 128)
    return 4 * num_tiles(pattern, q_len, kv_len, q_block, kv_block) * q_block * kv_block * head_dim


def traced_flops(name: str, params: Mapping[str, Any], query: tuple[int, ...], key: tuple[int, ...]) -> int | None:
    """FLOPs of a call to cuDNN as JAX traces it; None for any other primitive.

    Two matrix products forward and five backward, where the scores are computed once more, of tiles as in `flops`.

    Args:
      name, params: of the primitive.
      query, key: shapes of its first two operands, `[batch, length, heads, head_dim]`.
    """
    products = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}.get(name)
    if products is None or params.get("layout") != 0 or len(query) != 4:
        return None
    causal, window = "CAUSAL" in str(params.get("mask_type")), params.get("sliding_window_length")
    pattern: Pattern = Causal() if causal else Full()
    if causal and window is not None:
        pattern = Window(int(window) - 1, 0) & Causal()
    batch, q_len, heads, head_dim = query
    return batch * heads * flops(pattern, q_len, key[1], head_dim) * products // 2


def plan(pattern: Pattern, q_len: int, kv_len: int, offset: int, num_heads: int, head_dim: int, dtype: str) -> None:
    """cuDNN has none."""


def by_head(tiles: None, num_heads: int) -> None:
    """No array has an entry for each head."""


def attend(
    inputs: Inputs,
    controls: Controls,
    settings: Settings,
    pattern: Pattern,
    tiles: None = None,
    *,
    backend: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """Attention `[batch, q_len, heads, head_dim]` in the query's dtype; `backend="xla"` asks JAX to do cuDNN's part."""
    query, key, value = merge_heads(inputs, controls.mask)
    cut, lengths, real = _cut(pattern), None, key_padding(controls.mask, key.shape[1])
    assert cut is not None
    if real is not None:
        real = jnp.broadcast_to(real, key.shape[:2])
        order = jnp.argsort(~real, axis=1, stable=True)
        front = jax.vmap(lambda x, order: x.at[order].get(unique_indices=True, mode="promise_in_bounds"))
        key, value = front(key, order), front(value, order)
        # An example without a real key attends to one padded key, which is zero as its value is, and so gives zero.
        lengths = jnp.maximum(real.sum(1, dtype=jnp.int32), 1)
    return jax.nn.dot_product_attention(
        query, key, value, scale=settings.scale, key_value_seq_lengths=lengths, implementation=backend, **cut
    )
