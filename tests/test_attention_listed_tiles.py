"""Tiles listed on the device: what is visited depends on the data, and only what is listed is computed."""

import dataclasses

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from conformance import BOTH, as_jax, close, expected, forward_and_gradients, inputs, parameters, refuses

from xformer import cost
from xformer.attention import Full, Linformer, Options, Shape, Shaw, Window
from xformer.attention.engine.listed_tiles import ListedTiles
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.pattern import Full as EveryPair
from xformer.attention.pattern_attention import PatternAttention


@dataclasses.dataclass(frozen=True)
class TopBlocks(PatternAttention):
    """Each block of queries attends to the blocks of keys whose mean is nearest to its own (as MoBA and others do)."""

    block_size: int = 8
    num_blocks: int = 2

    def token_pattern(self, kv_len, num_heads):
        return EveryPair()

    def pattern(self, q_len, kv_len, num_heads):
        return None

    def listed_tiles(self, call):
        size, (q_len, kv_len) = self.block_size, call.lengths
        num = ceil_div(q_len, size), ceil_div(kv_len, size)

        def means(x, count):
            x = jnp.pad(jax.lax.stop_gradient(x), ((0, 0), (0, count * size - x.shape[1]), (0, 0), (0, 0)))
            return x.reshape(x.shape[0], count, size, *x.shape[2:]).mean(2)

        query, key = means(call.query, num[0]), means(call.key, num[1])
        key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
        gate = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        if self.causal:
            gate = jnp.where(jnp.arange(num[1]) <= jnp.arange(num[0])[:, None], gate, -jnp.inf)
        best, key_tiles = jax.lax.top_k(gate, min(self.num_blocks, num[1]))
        return ListedTiles(key_tiles, best > -jnp.inf, size, size)

    def listing_flops(self, shape):
        blocks = ceil_div(shape.q_len, self.block_size) * ceil_div(shape.kv_len, self.block_size)
        return 2 * shape.batch * shape.num_heads * blocks * shape.head_dim


def row_of(op, call):
    """A row whose reference is dense attention under the pattern of the selection that these inputs give."""
    visible = np.asarray(op.pattern_of(call["query"], call["key"]))

    def reference(op, params, query, key, value, *, offset=0, **options):
        chosen = lambda q_positions, k_positions: visible
        return references._paired(chosen, op, params, query, key, value, offset, **options)

    return conformance.Row("top_blocks", conformance.Case("top_blocks", op, reference), op), visible


@pytest.mark.sampled(2)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", [None, Shaw(max_distance=5)], ids=["none", "shaw"])
def test_equals_dense_attention_under_the_pattern_of_its_selection(implementation, causal, position):
    op = TopBlocks(causal=causal, implementation=implementation, position=position)
    row, visible = row_of(op, inputs(seed=3))
    assert visible.shape == (2, 4, 45, 45) and (causal or visible.any(-1).all())
    assert (visible[0] != visible[1]).any() and (visible[:, 0] != visible[:, 1]).any()
    call = conformance.everything(row, seed=3)  # the same queries and keys: values are drawn after them
    np.testing.assert_array_equal(call["key"], inputs(seed=3)["key"])
    params, cotangent = parameters(op, call), conformance.random_cotangent(call)
    out, *gradients = forward_and_gradients(op, params, as_jax(call), cotangent)
    close(out, expected(row, params, call))
    conformance.check_gradients(row, params, call, cotangent, gradients)
    weights = op.attention_weights(call["query"], call["key"], call["value"], Options(params=params))
    assert not np.any(np.asarray(weights)[~visible])


@pytest.mark.parametrize("implementation", (None, *BOTH))
def test_costs_are_those_of_the_listed_tiles(implementation):
    """Not of a masked dense pass: four times the length costs four times as much but for the gate."""
    op = TopBlocks(block_size=16, num_blocks=3, implementation=implementation)
    for shape in (Shape(2, 45, 45, 4, 4, 2), Shape(1, 1024, 1024, 2, 8), Shape(1, 1024, 1024, 2, 8, value_dim=4)):
        array = lambda *sizes, shape=shape: jax.ShapeDtypeStruct((shape.batch, *sizes), jnp.float32)
        query, key = (
            array(shape.q_len, shape.num_heads, shape.head_dim),
            array(shape.kv_len, shape.kv_heads, shape.head_dim),
        )
        value = array(shape.kv_len, shape.kv_heads, shape.value_depth)
        counted, said = cost.count(lambda *arrays: op(*arrays), query, key, value), op.cost(shape)
        assert (said.flops, said.bytes) == (counted.flops, counted.bytes), shape
    if implementation != "reference":
        tiles = 64 * 3 * 16 * 16  # query tiles, listed key tiles, pairs in each
        gate = op.listing_flops(shape)
        assert said.flops == 2 * tiles * (8 + 4) * 2 + gate
        assert said.flops < Full().cost(shape).flops / 10


def test_a_list_says_what_exists_and_what_is_valid():
    """An entry that is not valid, or that is no tile, hides; it takes no key's place."""
    key_tiles, valid = [[0, 2, 9, -1], [1, 1, 0, 2]], [[1, 1, 1, 1], [1, 0, 0, 1]]
    listed = ListedTiles(jnp.asarray([[key_tiles]]), jnp.asarray([[valid]]) > 0, q_block=2, kv_block=3)
    pairs = np.asarray(listed.pairs(4, 8))[0, 0]
    first, second = [1, 1, 1, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]
    np.testing.assert_array_equal(pairs, np.asarray([first, first, second, second]) > 0)


def test_patterns_of_given_inputs():
    call = inputs()
    for op in (Window(left=3, right=1), Full(causal=True)):
        got = op.pattern_of(call["query"], call["key"])
        np.testing.assert_array_equal(got, np.broadcast_to(op.pattern(45, 45, 4), (2, 1, 45, 45)))
    with refuses(NotImplementedError, "Linformer", "no pairs"):
        Linformer(rank=6, max_len=48).pattern_of(call["query"], call["key"])


def test_kernels_take_no_lists():
    for name in ("pallas", "splash", "cudnn"):
        with refuses(NotImplementedError, name, "depend on data"):
            TopBlocks(implementation=name)(**as_jax(inputs()))
