"""Linear attention in chunks: weighted sums and sums of weights, in memory linear in the length.

Where order does not matter, all keys enter one state, which every query then reads. Otherwise a loop over chunks
carries the state of what came before; attention both ways is such a loop in each direction. The backward pass keeps the
state of every chunk and computes the chunk again (`recomputed`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.dtypes import compute_dtype, exact
from xformer.attention.engine import mesh_axes
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.state import recomputed
from xformer.attention.state.chunk import NOTHING, Step, Within
from xformer.attention.state.features import Operands, PositiveRandom
from xformer.attention.state.operands import Controls, Inputs, Marks, Settings, State, Tokens

Array = jax.Array
CHUNK = 128  # tokens; queries meet the keys of their own chunk in pairs
LONG_CHUNK = 512  # where they don't


def ordered(settings: Settings, controls: Controls) -> bool:
    """Whether it matters where tokens stand."""
    return settings.causal or settings.decays is not None or controls.kv_segments is not None


@functools.partial(jax.jit, static_argnums=0)
def continued(
    settings: Settings, inputs: Inputs, operands: Operands, controls: Controls, state: State, steps: Array
) -> tuple[tuple[Array, Array | None], State]:
    """What the next tokens read, as `attend` gives it, and the state after them.

    `steps`, int32 `[batch]`, is how many of the tokens are real; they come first.
    """
    out, state = past(settings, "past", inputs, operands, controls, state, steps)
    return out[:2], state


@functools.partial(jax.jit, static_argnums=0)
def attend(settings: Settings, inputs: Inputs, operands: Operands, controls: Controls) -> tuple[Array, Array | None]:
    """The weighted sums of values `[batch, q_len, kv_heads, groups, depth]`, and the sums of weights without `depth`.

    Both are in float32 (float64 for float64 inputs), and the latter None where `settings` does not ask for it.
    """
    inputs, operands, controls = mesh_axes.varying(
        (inputs, operands, controls), mesh_axes.axes_of(inputs, operands, controls)
    )
    if not ordered(settings, controls):
        if isinstance(settings.features, PositiveRandom):
            operands = operands | {"top": largest_exponents(settings, inputs.key, operands, controls.real)}
        return _both_ways(settings, inputs, operands, controls)
    if settings.causal:
        return past(settings, "past", inputs, operands, controls)[0][:2]
    q_len = inputs.query.shape[1]
    inputs, controls = _whole_chunks(inputs, controls)  # in both directions the same
    out, _ = past(settings, "all", inputs, operands, controls)
    flip = functools.partial(jnp.flip, axis=1)
    mirrored = jax.tree.map(flip, controls._replace(offset=None))
    if controls.offset is not None:
        mirrored = mirrored._replace(offset=inputs.key.shape[1] - controls.offset - inputs.query.shape[1])
    later, _ = past(settings, "none", jax.tree.map(flip, inputs), operands, mirrored)
    return jax.tree.map(lambda x: x[:, :q_len], _added(out, jax.tree.map(flip, later)))


def _added(one: Any, other: Any) -> tuple[Array, Array | None]:
    """The sums of two disjoint sets of keys, as `past` gives them for each."""
    if one[2] is not None:
        top = jnp.maximum(one[2], other[2])  # [batch, q_len, kv_heads]
        one, other = (
            (total * share[..., None], norm * share, None)
            for total, norm, own in (one, other)
            for share in [jnp.exp(own - top)[..., None]]
        )
    total, norm, _ = jax.tree.map(jnp.add, one, other)
    return total, norm


def _whole_chunks(inputs: Inputs, controls: Controls) -> tuple[Inputs, Controls]:
    """Queries, and keys that go along with them, padded so that every chunk is whole."""
    (q_len, kv_len), along = (inputs.query.shape[1], inputs.key.shape[1]), controls.offset is None
    extra = -q_len % min(CHUNK, q_len)
    if not extra:
        return inputs, controls
    wider: Any = lambda x: None if x is None else jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2))
    inputs = inputs._replace(query=wider(inputs.query))
    controls = controls._replace(q_segments=wider(controls.q_segments))
    if not along:
        return inputs, controls
    real = jnp.ones((1, kv_len, 1), bool) if controls.real is None else controls.real
    controls = controls._replace(real=wider(real), kv_segments=wider(controls.kv_segments))
    return inputs._replace(key=wider(inputs.key), value=wider(inputs.value)), controls


def largest_exponents(settings: Settings, key: Array, operands: Operands, real: Array | None) -> Array:
    """The largest exponent of each feature among the real keys, `[batch, kv_heads, features]`; 0 without any."""
    features = settings.features
    assert isinstance(features, PositiveRandom)
    key, operands = jax.lax.stop_gradient((key, operands))
    tokens, marks = _chunks(None, key, None, Controls(real), LONG_CHUNK)
    lowest = jnp.full((), -jnp.inf, compute_dtype(key.dtype))

    def step(top: Array, x: Any) -> tuple[Array, None]:
        exponents = features.exponents(exact(x[0].key), operands, settings.precision)
        return jnp.maximum(top, jnp.where(x[1].real[..., None], exponents, lowest).max(2)), None

    batch, _, kv_heads, _ = key.shape
    start = jnp.broadcast_to(lowest, (batch, kv_heads, operands["projection"].shape[0]))
    start = mesh_axes.varying(start, mesh_axes.axes_of(key, operands, real))
    top, _ = jax.lax.scan(step, start, (tokens, marks))
    return jnp.where(jnp.isfinite(top), top, jnp.zeros((), top.dtype))


def _both_ways(settings: Settings, inputs: Inputs, operands: Operands, controls: Controls) -> Any:
    step, state = Step(settings, "none"), empty_state(settings, inputs, by_key=False)
    tokens, marks = _chunks(None, inputs.key, inputs.value, controls, LONG_CHUNK)
    state, _ = recomputed.scan(step, state, tokens, operands, marks)
    tokens, marks = _chunks(inputs.query, None, None, Controls(), LONG_CHUNK)
    _, out = recomputed.scan(step, state, tokens, operands, marks)
    return _in_order(out, inputs.query.shape[1])[:2]


def past(
    settings: Settings,
    within: Within,
    inputs: Inputs,
    operands: Operands,
    controls: Controls,
    state: State | None = None,
    steps: Array | None = None,
) -> tuple[tuple[Array, Array | None, Array | None], State]:
    """What queries read from the keys before their chunk and, as `within` says, in it; and the state after all keys.

    The weighted sums, the sums of weights, and the logarithms `[batch, q_len, kv_heads]` of what both are divided by.

    Without an offset queries go along with the keys. With one they stand among the keys from there on: the keys before
    enter the state first.
    """
    q_len = inputs.query.shape[1]
    state = empty_state(settings, inputs) if state is None else state
    before = None
    if controls.offset is not None:
        state, inputs, controls, before = _prefix(settings, inputs, operands, controls, state)
    tokens, marks = _chunks(*inputs, controls, min(CHUNK, q_len), before)
    if steps is not None:
        num_chunks, size = tokens.query.shape[0], tokens.query.shape[4]
        marks = marks._replace(advance=jnp.clip(steps[None] - size * jnp.arange(num_chunks)[:, None], 0, size))
    state, out = recomputed.scan(Step(settings, within), state, tokens, operands, marks)
    return _in_order(out, q_len), state


def _prefix(settings: Settings, inputs: Inputs, operands: Operands, controls: Controls, state: State) -> Any:
    """The state of the keys before the first query; keys beside the queries, the segment before them."""
    (q_len, kv_len), offset = (inputs.query.shape[1], inputs.key.shape[1]), jnp.asarray(controls.offset, jnp.int32)
    real, before = (jnp.arange(kv_len) < offset)[None, :, None], None
    if controls.kv_segments is not None:  # only the segment of the key before the first query can be seen any more
        at = jnp.clip(offset - 1, 0, kv_len - 1)
        before = jax.lax.dynamic_slice_in_dim(controls.kv_segments, at, 1, 1)[:, 0]
        real = real & (controls.kv_segments == before[:, None])[..., None]
    real = real if controls.real is None else real & controls.real
    tokens, marks = _chunks(None, inputs.key, inputs.value, Controls(real), LONG_CHUNK)
    num_chunks, size = tokens.key.shape[0], tokens.key.shape[3]
    starts = size * jnp.arange(num_chunks)
    # Queries may stand beyond the last key: what is left of the distance counts in the last chunk.
    ends = jnp.where(jnp.arange(num_chunks) == num_chunks - 1, jnp.maximum(offset - starts, 0), size)
    marks = marks._replace(advance=jnp.clip(offset - starts, 0, ends)[:, None])
    state, _ = recomputed.scan(Step(settings, "none"), state, tokens, operands, marks)

    def beside(x: Array | None) -> Any:
        if x is None:
            return None
        wide = jnp.pad(x, [(0, 0), (q_len, q_len)] + [(0, 0)] * (x.ndim - 2))
        return jax.lax.dynamic_slice_in_dim(wide, jnp.clip(offset + q_len, 0, kv_len + q_len), q_len, 1)

    exists = jnp.ones((1, kv_len, 1), bool) if controls.real is None else controls.real
    inputs = inputs._replace(key=beside(inputs.key), value=beside(inputs.value))
    controls = controls._replace(real=beside(exists), kv_segments=beside(controls.kv_segments))
    return state, inputs, controls, before


def empty_state(settings: Settings, inputs: Inputs, *, by_key: bool = True) -> State:
    """The state before the first key; `by_key`: feature maps that can divide out what is largest do so key by key."""
    (batch, _, kv_heads, head_dim), depth = inputs.key.shape, inputs.value.shape[-1]
    size, dtype = settings.features.size(head_dim), compute_dtype(inputs.key.dtype)
    logs = by_key and isinstance(settings.features, PositiveRandom)
    state = State(
        jnp.zeros((batch, kv_heads, size, depth), dtype),
        jnp.zeros((batch, kv_heads, size), dtype) if settings.normalized else None,
        jnp.full((batch, kv_heads), NOTHING, dtype) if logs else None,
    )
    return mesh_axes.varying(state, mesh_axes.axes_of(inputs))


def _chunks(
    query: Array | None,
    key: Array | None,
    value: Array | None,
    controls: Controls,
    size: int,
    before: Array | None = None,
) -> tuple[Any, Any]:
    """Queries, keys and values and what is known of them, with a leading axis of chunks; the last one is padded."""
    some: Any = query if key is None else key
    length = some.shape[1]
    num_chunks = ceil_div(length, size := min(size, length))

    def of_heads(x: Any) -> Any:
        """`[batch, length, heads.., depth]` to `[chunks, batch, heads.., size, depth]`."""
        if x is None:
            return None
        x = jnp.pad(x, [(0, 0), (0, num_chunks * size - length)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], num_chunks, size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2), (0, x.ndim - 2))

    tokens = Tokens(*map(of_heads, (query, key, value)))
    if tokens.key is None:
        return tokens, Marks()
    real = jnp.ones((1, length, 1), bool) if controls.real is None else controls.real
    marks = Marks(of_heads(real[..., None])[..., 0])
    if controls.kv_segments is not None:
        flat: Any = lambda x: None if x is None else of_heads(x[:, :, None])[..., 0]
        kv_segments = flat(controls.kv_segments)
        first = kv_segments[:1, :, 0] if before is None else jnp.broadcast_to(before, kv_segments[:1, :, 0].shape)
        before_each = jnp.concatenate([first, kv_segments[:-1, :, -1]])
        marks = marks._replace(q_segments=flat(controls.q_segments), kv_segments=kv_segments, before=before_each)
    return tokens, marks


def _in_order(out: Any, length: int) -> Any:
    """`[chunks, batch, kv_heads, (groups,) size, ...]` to `[batch, length, kv_heads, (groups,) ...]`."""

    def one(x: Array, at: int) -> Array:
        x = jnp.moveaxis(x, (0, at), (1, 2))
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

    return tuple(None if x is None else one(x, at) for x, at in zip(out, (4, 4, 3), strict=True))
