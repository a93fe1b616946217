"""Launches the GPU kernels: which part of each array a program sees, and what the work is estimated to cost."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xformer.attention.kernels.tile_lists import Lists, TileLists
from xformer.attention.kernels.triton import Extras, Static, forward_kernel, key_kernel, query_kernel

Array = jax.Array

# The calls. query, out, ... `[batch, q_len, heads, head_dim]`, lse and delta `[batch, heads, q_len]`, whole tiles long.


def forward(static: Static, lists: TileLists, extras: Extras, query: Array, key: Array, value: Array) -> Any:
    """Output like query, and the base-2 log-sum-exp of the scores, float32 `[batch, heads, q_len]`."""
    call = _Call(static, lists, extras, query, key)
    lse = jax.ShapeDtypeStruct((call.batch, call.heads, query.shape[1]), jnp.float32)
    return call.run(
        forward_kernel, lists.by_query, lists.q_block, 2, 1,
        [query, key, value], [call.queries, call.keys, call.keys], [query, lse], [call.queries, call.statistics],
    )  # fmt: skip


def backward(
    static: Static, lists: TileLists, extras: Extras, query: Array, key: Array, value: Array, d_out: Array, lse: Array,
    delta: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients of query, key and value; `delta` is the sum over head_dim of output times its gradient."""
    call = _Call(static, lists, extras, query, key)
    arrays = [query, key, value, d_out, lse, delta]
    specs = [call.queries, call.keys, call.keys, call.queries, call.statistics, call.statistics]
    (d_query,) = call.run(query_kernel, lists.by_query, lists.q_block, 3, 1, arrays, specs, [query], [call.queries])
    q, k, s = call.group_queries, call.group_keys, call.group_statistics
    d_key, d_value = call.run(
        key_kernel, lists.by_key, lists.kv_block, 4, call.groups, arrays, [q, k, k, q, s, s], [key, value], [k, k]
    )
    return d_query, d_key, d_value


class _Call:
    """Block specifications and the launch. Programs: (line, head or key head, example)."""

    def __init__(self, static: Static, lists: TileLists, extras: Extras, query: Array, key: Array) -> None:
        self.static, self.lists, self.extras = static, lists, extras
        self.batch, q_len, self.heads, self.depth = query.shape
        self.itemsize = query.dtype.itemsize
        kv_len, self.kv_heads = key.shape[1:3]
        self.groups = groups = self.heads // self.kv_heads
        self.queries = pl.BlockSpec((None, q_len, None, self.depth), lambda i, h, b: (b, 0, h, 0))
        self.keys = pl.BlockSpec((None, kv_len, None, self.depth), lambda i, h, b: (b, 0, h // groups, 0))
        self.statistics = pl.BlockSpec((None, None, q_len), lambda i, h, b: (b, h, 0))
        self.group_queries = pl.BlockSpec((None, q_len, groups, self.depth), lambda i, h, b: (b, 0, h, 0))
        self.group_keys = pl.BlockSpec((None, kv_len, None, self.depth), lambda i, h, b: (b, 0, h, 0))
        self.group_statistics = pl.BlockSpec((None, groups, q_len), lambda i, h, b: (b, h, 0))

    def run(
        self, kernel: Any, lists: Lists, block: int, products: int, groups: int, arrays: list, specs: list, outs: list,
        out_specs: list,
    ) -> Any:  # fmt: skip
        """Launches `kernel` on every line of `lists`; `products` matrix products a tile are counted."""
        by_key = kernel is key_kernel
        own = lists.heads > 1
        head_rows = (groups if own else 1) if by_key else None
        list_spec = lambda x: pl.BlockSpec((head_rows, x.shape[1]), lambda i, h, b: (h if own else 0, 0))
        whole = lambda x: pl.BlockSpec(x.shape, lambda i, h, b: (0,) * x.ndim)
        by_example = lambda x: pl.BlockSpec((None, x.shape[1]), lambda i, h, b: (b if x.shape[0] > 1 else 0, 0))
        extras: Any = Extras(*(None if x is None else by_example(x) for x in self.extras[:3]))  # type: ignore
        if self.extras.slopes is not None:
            extras = extras._replace(slopes=pl.BlockSpec((groups,), lambda i, h, b: (h,)))
        options = {"groups": groups, "own_lists": own} if by_key else {}
        sizes = (self.lists.q_block, self.lists.kv_block)
        tile_work = self.batch * self.heads * self.lists.num_tiles * sizes[0] * sizes[1]
        operands = (*arrays, lists, self.lists.bank, self.extras)
        size = lambda x: math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        launch = lambda interpret: pl.pallas_call(
            functools.partial(kernel, static=self.static, sizes=sizes, **options),
            grid=(lists.order.shape[1], self.kv_heads if by_key else self.heads, self.batch),
            in_specs=[*specs, jax.tree.map(list_spec, lists), jax.tree.map(whole, self.lists.bank), extras],
            out_specs=out_specs,
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
            compiler_params=triton.CompilerParams(num_warps=4 if max(sizes) * self.depth <= 8192 else 8, num_stages=2),
            cost_estimate=pl.CostEstimate(
                flops=2 * products * tile_work * self.depth,
                transcendentals=tile_work,
                bytes_accessed=sum(size(x) for x in (*arrays, *outs)),
            ),
            interpret=interpret,
            name=kernel.__name__.strip("_"),
        )
        operands = jax.tree.map(jnp.asarray, operands)
        return jax.lax.platform_dependent(
            *operands, cpu=lambda *x: launch(True)(*x), default=lambda *x: launch(False)(*x)
        )
