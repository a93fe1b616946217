"""Relative positions by row and column: equal to the naive gather under every variant that has token pairs."""

import dataclasses

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import CASES, Row, as_jax, close, expected, forward, inputs, parameters
from flax import nnx
from test_attention_values import check

from xformer.attention import Full, Shape, Shaw2D, Sparse, Window, build
from xformer.cost import count
from xformer.nn import MultiHeadAttention

CLASS_TOKEN = Shaw2D(columns=7, num_prefix_tokens=1, max_distance=3)
BARE = Shaw2D(columns=5, max_distance=12, values=False)
PAIRED = [case for case in CASES if "shaw" in case.positions]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("position", [CLASS_TOKEN, BARE], ids=["class token", "bare"])
@pytest.mark.parametrize("case", PAIRED, ids=lambda case: case.name)
def test_equals_the_reference_with_every_argument(case, position, implementation):
    op = dataclasses.replace(case.op, position=position, implementation=implementation)
    row = Row(case.name, case, op)
    check(row, conformance.everything(row))


@pytest.mark.parametrize("name", ["full", "window"])
def test_a_causal_op_that_starts_later(name):
    case = next(case for case in CASES if case.name == name)
    row = Row(name, case, dataclasses.replace(case.op, position=CLASS_TOKEN, causal=True))
    call = inputs(q_len=3, kv_len=40)
    params = parameters(row.op, call)
    for offset in (20, jnp.int32(20)):
        close(forward(row.op, params, as_jax(call) | {"query_offset": offset}), expected(row, params, call, 20))


def test_given_positions_count_row_by_row():
    """Tokens in another order, told where they stand, give the same outputs in that order."""
    op, call = Full(position=CLASS_TOKEN), as_jax(inputs(batch=1))
    params, order = parameters(op, call), np.random.default_rng(0).permutation(conformance.LENGTH)
    moved = {name: x[:, order] for name, x in call.items()} | {"positions": jnp.asarray(order, jnp.int32)[None]}
    close(forward(op, params, moved), forward(op, params, call)[:, order])


@pytest.mark.parametrize("op", [Full(), Window(left=9, right=9), Sparse(stride=8)], ids=str)
def test_cost_is_what_is_computed(op):
    op, shape = dataclasses.replace(op, position=CLASS_TOKEN, implementation="xla"), Shape(2, 50, 50, 2, 8)
    arrays = [jax.ShapeDtypeStruct((2, 50, 2, 8), jnp.float32)] * 3
    params = jax.eval_shape(lambda: op.init(jax.random.key(0), shape))
    assert op.cost(shape).flops == count(lambda params, *x: op(*x, params=params), params, *arrays).flops


@pytest.mark.parametrize("op", [Full(causal=True), Window(left=4, right=0, causal=True)], ids=["full", "window"])
def test_step_by_step_gives_the_whole_sequence_at_once(op):
    """A window must not keep its last tokens alone: where they stand in the grid would be lost."""
    op = dataclasses.replace(op, position=Shaw2D(columns=3, num_prefix_tokens=1, max_distance=2))
    layer = MultiHeadAttention(2, 8, attention_fn=op, rngs=nnx.Rngs(0))
    x, step = jax.random.normal(jax.random.key(0), (2, 11, 8)), nnx.jit(lambda layer, x, c: layer(x, cache=c))
    cache, outputs = layer.init_cache(2, 12), []
    for start, stop in [(0, 5), *((index, index + 1) for index in range(5, 11))]:
        out, cache = step(layer, x[:, start:stop], cache)
        outputs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), layer(x), atol=3e-6)


def test_the_grid_is_chosen_by_the_length():
    assert Shaw2D.for_length(64) == Shaw2D(columns=8, num_prefix_tokens=0, max_distance=7)
    assert Shaw2D.for_length(65) == Shaw2D(columns=8, num_prefix_tokens=1, max_distance=7)
    assert Shaw2D.for_length(41, columns=4) == Shaw2D(columns=4, num_prefix_tokens=1, max_distance=9)
    assert Shaw2D.for_length(40, columns=4, max_distance=2) == Shaw2D(columns=4, max_distance=2)
    assert build({"name": "full", "position": "shaw_2d"}, 65).position == Shaw2D.for_length(65)
    assert Shaw2D.for_length(40) == Shaw2D(columns=6, max_distance=5)


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"columns": 0}, "columns"), ({"num_prefix_tokens": -1}, "num_prefix_tokens"), ({"max_distance": 0}, "max_dist"),
     ({"values": 1}, "values")],
)  # fmt: skip
def test_refuses(fields, word):
    with conformance.refuses(ValueError, f"Shaw2D.{word}", str(next(iter(fields.values())))):
        Shaw2D(**fields)
