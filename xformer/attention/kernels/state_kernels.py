"""Pallas kernels for GPUs (through Triton): sums over past or later keys of weights that are products of features.

The chunkwise schedule of Sun et al. 2023 (equation 7), in two passes: one kernel walks along the chunks and leaves the
state before each, the other computes all chunks at once, each from its state and the pairs within it. On CPUs the same
kernels run in Pallas's interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xformer.attention.kernels.chunks import Blocks

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Order:
    """Which keys a query sees.

    Attributes:
      later: those after it, instead of those before.
      own: the one beside it too.
      precision: of the products.
    """

    later: bool
    own: bool
    precision: Any = None

    @property
    def reversed(self) -> Order:
        """Which queries see a key."""
        return dataclasses.replace(self, later=not self.later)


class Extras(NamedTuple):
    """What weights depend on besides features; None where they don't.

    Attributes:
      logs: float32 `[heads]`, logarithms of what a weight is multiplied by at each step of distance.
      q_segments, kv_segments: int32 `[batch or 1, length]`; pairs within a segment only, each in one piece.
    """

    logs: Array | None = None
    q_segments: Array | None = None
    kv_segments: Array | None = None

    @property
    def swapped(self) -> Extras:
        """With queries for keys."""
        return Extras(self.logs, self.kv_segments, self.q_segments)


def weighted_sums(order: Order, extras: Extras, query: Array, key: Array, value: Array) -> Array:
    """`sum_s decay^|t - s| (query_t key_s) value_s` over the keys that `order` names, `[batch, length, heads, depth]`.

    Args:
      order, extras: which pairs count, and how much.
      query, key: features, float32 `[batch, length, heads, size]`; value `[batch, length, heads, depth]`. Each may have
        fewer heads, which then serve as many of the output's in turn.
    """
    length, size, depth = query.shape[1], query.shape[3], value.shape[3]
    blocks = Blocks(length, size, depth)
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, blocks.length - length), (0, 0), (0, wide - x.shape[3])))
        for x, wide in ((query, blocks.size), (key, blocks.size), (value, blocks.depth))
    )
    longer: Any = lambda x: None if x is None else jnp.pad(x, ((0, 0), (0, blocks.length - length)), mode="edge")
    extras = Extras(extras.logs, *map(longer, extras[1:]))
    call = _Call(order, extras, blocks, query, key, value)
    return call.read(call.states())[:, :length, :, :depth]


class _Call:
    """The two launches. Programs: (block, head, example)."""

    def __init__(self, order: Order, extras: Extras, blocks: Blocks, query: Array, key: Array, value: Array) -> None:
        self.order, self.extras, self.blocks, self.arrays = order, extras, blocks, (query, key, value)
        self.batch = query.shape[0]
        self.state_heads = max(key.shape[2], value.shape[2])
        self.heads = max(query.shape[2], self.state_heads)

    def states(self) -> Array:
        """The state before each chunk, `[batch, heads of keys or values, chunks, size, depth]`."""
        blocks, (_, key, value) = self.blocks, self.arrays
        across = blocks.num_depth_blocks
        by_size = lambda i: i // across
        by_depth = lambda i: i % across
        shape = self.batch, self.state_heads, blocks.num_chunks, blocks.size, blocks.depth
        specs = [
            self._tokens(key, blocks.size_block, by_size, self.state_heads),
            self._tokens(value, blocks.depth_block, by_depth, self.state_heads),
            self._extras(self.state_heads),
        ]
        out = pl.BlockSpec(
            (None, None, blocks.num_chunks, blocks.size_block, blocks.depth_block),
            lambda i, h, b: (b, h, 0, by_size(i), by_depth(i)),
        )
        flops = self.batch * self.state_heads * blocks.length * blocks.enter_flops
        grid = (blocks.size // blocks.size_block * across, self.state_heads, self.batch)
        return self._launch(state_kernel, grid, specs, out, shape, flops, (key, value, self.extras))

    def read(self, states: Array) -> Array:
        """What queries read from the states and from the keys of their chunk, `[batch, length, heads, depth]`."""
        blocks, (query, key, value) = self.blocks, self.arrays
        across = blocks.num_depth_blocks
        by_depth = lambda i: i % across
        all_of = lambda i: 0
        shared = self.heads // self.state_heads
        specs = [
            self._tokens(query, blocks.size, all_of, self.heads),
            self._tokens(key, blocks.size, all_of, self.heads),
            self._tokens(value, blocks.depth_block, by_depth, self.heads),
            pl.BlockSpec(
                (None, None, None, blocks.size, blocks.depth_block),
                lambda i, h, b: (b, h // shared, i // across, 0, by_depth(i)),
            ),
            self._extras(self.heads),
        ]
        out = pl.BlockSpec((None, blocks.length, None, blocks.depth_block), lambda i, h, b: (b, 0, h, by_depth(i)))
        shape = self.batch, blocks.length, self.heads, blocks.depth
        flops = self.batch * self.heads * blocks.length * blocks.read_flops
        grid = (blocks.num_chunks * across, self.heads, self.batch)
        operands = (query, key, value, states, self.extras)
        return self._launch(read_kernel, grid, specs, out, shape, flops, operands)

    def _tokens(self, x: Array, width: int, at: Any, heads: int) -> pl.BlockSpec:
        """All tokens of one head, and a block of their features."""
        shared = heads // x.shape[2]
        return pl.BlockSpec((None, self.blocks.length, None, width), lambda i, h, b: (b, 0, h // shared, at(i)))

    def _extras(self, heads: int) -> Any:
        logs, *segments = self.extras
        of_logs = None if logs is None else pl.BlockSpec((1,), lambda i, h, b: (h // (heads // logs.shape[0]),))
        by_example = lambda x: pl.BlockSpec((None, x.shape[1]), lambda i, h, b: (b if x.shape[0] > 1 else 0, 0))
        return Extras(of_logs, *(None if x is None else by_example(x) for x in segments))  # type: ignore[arg-type]

    def _launch(self, kernel: Any, grid: Any, specs: Any, out: Any, shape: Any, flops: int, operands: Any) -> Array:
        result = jax.ShapeDtypeStruct(shape, jnp.float32)
        size = lambda x: math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        launch = lambda interpret: pl.pallas_call(
            functools.partial(kernel, order=self.order, blocks=self.blocks),
            grid=grid,
            in_specs=specs,
            out_specs=out,
            out_shape=result,
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
            cost_estimate=pl.CostEstimate(
                flops=flops, transcendentals=0, bytes_accessed=sum(map(size, jax.tree.leaves((operands, result))))
            ),
            interpret=interpret,
            name=kernel.__name__,
        )
        return jax.lax.platform_dependent(
            *operands, cpu=lambda *x: launch(True)(*x), default=lambda *x: launch(False)(*x)
        )


# The kernels. References: key, value `[length, features]` of one head, a block of each; query, out likewise.


def _dot(a: Array, b: Array, order: Order, *, trans_a: bool = False, trans_b: bool = False) -> Array:
    axes = ((0 if trans_a else 1,), (1 if trans_b else 0,))
    return jax.lax.dot_general(a, b, (axes, ((), ())), precision=order.precision, preferred_element_type=jnp.float32)


def _beside(number: Any, order: Order, blocks: Blocks) -> tuple[Any, Any]:
    """Positions of the token that the state of a chunk ends with, and of the last one to enter the next state."""
    first = number * blocks.chunk
    last = first + blocks.chunk - 1
    if order.later:
        return jnp.minimum(last + 1, blocks.length - 1), first
    return jnp.maximum(first - 1, 0), last


def state_kernel(key: Any, value: Any, extras: Any, states: Any, *, order: Order, blocks: Blocks) -> None:
    """Writes the state before each chunk, and lets the chunk enter it."""
    index = jnp.arange(blocks.chunk)
    left = index if order.later else blocks.chunk - 1 - index  # steps from a key to the end of its chunk

    def body(step: Any, state: Array) -> Array:
        number = blocks.num_chunks - 1 - step if order.later else step
        states[number, :, :] = state
        tokens = pl.ds(number * blocks.chunk, blocks.chunk)
        k = key[tokens, :]
        if extras.logs is not None:
            k = k * jnp.exp(extras.logs[0] * left.astype(jnp.float32))[:, None]
            state = state * jnp.exp(extras.logs[0] * blocks.chunk)
        if extras.kv_segments is not None:
            before, last = _beside(number, order, blocks)
            segment = extras.kv_segments[last]
            k = jnp.where((extras.kv_segments[tokens] == segment)[:, None], k, 0.0)
            state = jnp.where(extras.kv_segments[before] == segment, state, 0.0)
        return state + _dot(k, value[tokens, :], order, trans_a=True)

    empty = jnp.zeros((blocks.size_block, blocks.depth_block), jnp.float32)
    jax.lax.fori_loop(0, blocks.num_chunks, body, empty)


def read_kernel(
    query: Any, key: Any, value: Any, state: Any, extras: Any, out: Any, *, order: Order, blocks: Blocks
) -> None:
    """One chunk of the output."""
    number = pl.program_id(0) // blocks.num_depth_blocks
    tokens, index = pl.ds(number * blocks.chunk, blocks.chunk), jnp.arange(blocks.chunk)
    total = jnp.zeros((blocks.chunk, blocks.depth_block), jnp.float32)
    pairs = jnp.zeros((blocks.chunk, blocks.chunk), jnp.float32)
    for start in range(0, blocks.size, blocks.size_block):
        some = pl.ds(start, blocks.size_block)
        q = query[tokens, some]
        total += _dot(q, state[some, :], order)
        pairs += _dot(q, key[tokens, some], order, trans_b=True)
    distance = index[:, None] - index[None]
    distance = -distance if order.later else distance
    seen = distance >= (0 if order.own else 1)
    if extras.logs is not None:
        steps = blocks.chunk - index if order.later else index + 1
        total *= jnp.exp(extras.logs[0] * steps.astype(jnp.float32))[:, None]
        pairs *= jnp.exp(extras.logs[0] * jnp.maximum(distance, 0).astype(jnp.float32))
    if extras.q_segments is not None:
        before, _ = _beside(number, order, blocks)
        segments = extras.q_segments[tokens]
        total = jnp.where((segments == extras.kv_segments[before])[:, None], total, 0.0)
        seen &= segments[:, None] == extras.kv_segments[tokens][None]
    pairs = jnp.where(seen, pairs, 0.0)
    out[tokens, :] = total + _dot(pairs, value[tokens, :], order)
