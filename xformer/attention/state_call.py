"""A call in the running state's terms: heads split, what is hidden or not finite taken out, and marked afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.call import Call
from xformer.attention.engine import mesh_axes
from xformer.attention.state import visible
from xformer.attention.state.operands import Controls, Inputs

Array = jax.Array


class StateCall(NamedTuple):
    """A call as the engine takes it, and what stays outside.

    Attributes:
      inputs, controls: of the engine.
      raw: queries, keys and values before what is not finite was taken out.
      ranges: the keys that each query sees.
      finite_query: bool `[batch, q_len, num_heads]`; finite_key: bool `[batch, kv_len, kv_heads]`.
      served: bool `[batch or 1, q_len]`, False where segments are such that the output is wrong; or None.
    """

    inputs: Inputs
    controls: Controls
    raw: tuple[Array, Array, Array]
    ranges: visible.Ranges
    finite_query: Array
    finite_key: Array
    served: Array | None

    def marked(self, out: Array) -> Array:
        """The output, NaN for queries that are not finite, see what is not, or are not served."""
        groups = out.shape[2] // self.finite_key.shape[2]
        hit = jnp.repeat(visible.any_in(~self.finite_key, self.ranges), groups, axis=2) | ~self.finite_query
        if self.served is not None:
            hit = hit | ~self.served[..., None]
        return out * jnp.where(hit, jnp.full((), jnp.nan, out.dtype), jnp.ones((), out.dtype))[..., None]


def state_call(
    call: Call,
    offset: int | Array,
    name: str,
    *,
    causal: bool,
    by_head: bool,
    scaled: Callable[[Array, Array, Array], tuple[Array, Array]],
) -> StateCall:
    """The call as the engine takes it.

    Args:
      call: with queries and keys rotated.
      offset: position of the first query.
      name: of the op, for messages.
      causal: the op's.
      by_head: the query heads of a group differ in what they make of their keys, so that keys are repeated.
      scaled: queries and keys for a scale that is an array.
    """
    # What the devices of a `shard_map` share is theirs from here on; its gradient is then summed over them.
    arrays = call.query, call.key, call.value
    axes = mesh_axes.axes_of(*arrays, call.mask, call.q_segments, call.kv_segments, call.head_scale)
    query, key, value = mesh_axes.varying(arrays, axes)
    (q_len, kv_len), groups = call.lengths, call.query.shape[2] // call.key.shape[2]
    real = None
    if call.mask is not None:
        real = jnp.moveaxis(call.mask[:, :, 0], 1, 2)  # [batch or 1, kv_len or 1, num_heads or 1]
        real = jnp.broadcast_to(real, (real.shape[0], kv_len, real.shape[2]))
    by_head = by_head or any(x is not None and x.shape[-1] > 1 for x in (real, call.head_scale))
    if groups > 1 and by_head:
        key, value, groups = jnp.repeat(key, groups, axis=2), jnp.repeat(value, groups, axis=2), 1
    if real is not None:
        key, value = _only(real, key), _only(real, value)
    raw = query, key, value
    finite_query, finite_key = jnp.isfinite(query).all(-1), jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1)
    query, key, value = _only(finite_query, query), _only(finite_key, key), _only(finite_key, value)
    if call.head_scale is not None:
        query, key = scaled(query, key, call.head_scale)
    along = isinstance(offset, int) and offset == 0 and q_len == kv_len
    inputs = Inputs(query.reshape(*query.shape[:2], key.shape[2], groups, -1), key, value)
    controls = Controls(real, call.q_segments, call.kv_segments, None if along else jnp.asarray(offset, jnp.int32))
    ranges = visible.ranges(
        q_len,
        kv_len,
        causal=causal,
        offset=controls.offset,
        q_segments=call.q_segments,
        kv_segments=call.kv_segments,
    )
    served = None if call.kv_segments is None else _served(call, offset, name)
    return StateCall(inputs, controls, raw, ranges, finite_query, finite_key, served)


def _only(where: Array, x: Array) -> Array:
    return jnp.where(where[..., None], x, jnp.zeros((), x.dtype))


def _served(call: Call, offset: int | Array, name: str) -> Array:
    """Whether the engine serves a query's segment, `[batch or 1, q_len]`. Raises where it is known not to."""
    arrays = call.q_segments, call.kv_segments, offset
    known = not any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in arrays)
    if known and not visible.aligned(*(np.asarray(x) for x in arrays)).all():
        raise NotImplementedError(
            f"{name} cannot honour segment_ids with a segment in several pieces, or with queries apart from the keys "
            "of their segment: the state starts anew where one ends; sort the tokens, or use Full"
        )
    served: Array = visible.aligned(*(jnp.asarray(x) for x in arrays))
    return served
