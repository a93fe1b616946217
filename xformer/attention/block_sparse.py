"""The engine: attention over the tiles of a layout, exact, in memory linear in the length.

FlashAttention's tiling and recomputation (Dao et al. 2022, algorithms 1 and 4) over an arbitrary list of tiles: an
online softmax over the key tiles of a query tile, and a custom VJP that computes the tiles once more from the saved row
statistics. No array of `q_len x kv_len` is made; a mask or bias that the caller passed is read tile by tile.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.call import Controls, Inputs, Settings
from xformer.attention.layout import round_up
from xformer.attention.rows import Rows

Array = jax.Array


def attend(inputs: Inputs, controls: Controls, settings: Settings) -> Array:
    """Attention `[batch, kv_heads, groups, q_len, head_dim]` in float32 (float64 for float64 inputs)."""
    q_len, kv_len = inputs.query.shape[3], inputs.key.shape[3]
    layout = controls.layout
    q_pad, kv_pad = round_up(q_len, layout.q_block) - q_len, round_up(kv_len, layout.kv_block) - kv_len
    inputs = inputs._replace(
        query=pad(inputs.query, 3, q_pad),
        key=pad(inputs.key, 3, kv_pad),
        value=pad(inputs.value, 3, kv_pad),
        bias=pad_pairs(inputs.bias, q_pad, kv_pad),
    )
    controls = controls._replace(
        mask=pad_pairs(controls.mask, q_pad, kv_pad),
        q_segments=pad(controls.q_segments, 3, q_pad),
        kv_segments=pad(controls.kv_segments, 4, kv_pad),
        offset=jnp.asarray(controls.offset, jnp.int32),
    )
    return attend_tiles((settings, kv_len if kv_pad else None), inputs, controls)[..., :q_len, :]


def pad(x: Array | None, axis: int, amount: int) -> Any:
    """`x` with `amount` zeros at the end of an axis."""
    if x is None or not amount:
        return x
    return jnp.pad(x, [(0, amount if at == axis else 0) for at in range(x.ndim)])


def pad_pairs(x: Array | None, q_pad: int, kv_pad: int) -> Any:
    """A mask or bias `[b, k, g, q_len or 1, kv_len or 1]`, padded where it does not broadcast."""
    if x is None:
        return None
    x = x if x.shape[3] == 1 else pad(x, 3, q_pad)
    return x if x.shape[4] == 1 else pad(x, 4, kv_pad)


def _attend_primal(static: tuple[Settings, int | None], inputs: Inputs, controls: Controls) -> Array:
    return _forward(static, inputs, controls)[0]


def _forward(static: Any, inputs: Inputs, controls: Controls) -> tuple[Array, Any]:
    settings, kv_len = static
    rows = Rows(settings, kv_len, inputs, controls)
    parts = [rows.map(group, functools.partial(rows.forward, group)) for group in controls.layout.groups]
    out, lse = (rows.in_order(part) for part in zip(*parts, strict=True))
    return out, (inputs, controls, out, lse)


def _backward(static: Any, saved: Any, d_out: Array) -> tuple[Inputs, None]:
    inputs, controls, out, lse = saved
    settings, kv_len = static
    rows = Rows(settings, kv_len, inputs, controls)
    delta = (d_out * out).sum(-1)
    totals, parts = rows.zeros(), []
    for group in controls.layout.groups:
        totals, part = rows.scan(group, functools.partial(rows.backward, group, d_out, lse, delta), totals)
        parts.append(part)
    return rows.gradients(rows.in_order(parts), totals), None


_attend_vjp = jax.custom_vjp(_attend_primal, nondiff_argnums=(0,))
_attend_vjp.defvjp(_forward, _backward)
# Jitted here so that calls outside jit compile too, and so that layers of one shape share one trace.
attend_tiles = jax.jit(_attend_vjp, static_argnums=0)
