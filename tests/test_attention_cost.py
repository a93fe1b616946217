"""No length x length array, cost exact against the counter, one trace a shape, no state."""

import dataclasses
import functools
import math
import re

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import BOTH, as_jax, close, expected, forward, inputs, parameters, rows
from jax.extend import core

from xformer import cost
from xformer.attention import (
    BigBird,
    Full,
    Linear,
    Linformer,
    Local,
    Longformer,
    MusicRelative,
    Performer,
    Reformer,
    Retention,
    Routing,
    Shape,
    Shaw,
    Sinkhorn,
    Sparse,
    T5Bias,
    Window,
)

LONG = {
    "full": Full(),
    "full-causal": Full(causal=True),
    "full-shaw": Full(position=Shaw(max_distance=16, values=True)),
    "full-music": Full(position=MusicRelative(max_len=4096)),
    "full-t5": Full(position=T5Bias()),
    "window": Window(left=100, right=30),
    "window-music": Window(left=100, right=0, causal=True, position=MusicRelative(max_len=4096)),
    "bigbird": BigBird(),
    "bigbird-causal": BigBird(causal=True),
    "bigbird-shaw": BigBird(position=Shaw(max_distance=16, values=True)),
    "linformer": Linformer(rank=64, max_len=4096),
    "local": Local(block_size=64),
    "longformer": Longformer(window=128, dilation=3),
    "sparse": Sparse(stride=64),
    "sparse-fixed": Sparse(stride=64, kind="fixed", position=T5Bias()),
    "linear": Linear(),
    "performer-causal": Performer(num_features=16, causal=True),
    "retention": Retention(),
    "reformer": Reformer(),
    "reformer-causal": Reformer(num_hashes=1, causal=True),
    "routing": Routing(),
    "sinkhorn": Sinkhorn(),
}


def sizes(jaxpr):
    """Shapes of every array that a jaxpr makes or closes over, loop bodies and called functions included."""
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            yield getattr(var.aval, "shape", ())
        for parameter in eqn.params.values():
            for inner in parameter if isinstance(parameter, list | tuple) else [parameter]:
                if isinstance(inner, core.ClosedJaxpr):
                    yield from (np.shape(const) for const in inner.consts)
                    inner = inner.jaxpr
                if isinstance(inner, core.Jaxpr):
                    yield from sizes(inner)
    for var in (*jaxpr.constvars, *(v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, core.Literal))):
        yield var.aval.shape


def largest(op, length, gradient):
    """Elements of the biggest array in the jaxpr of a call (or its gradient) with a padding mask, batch and heads 1."""
    spec = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 1, length), jnp.bool_)
    params = jax.eval_shape(lambda: op.init(jax.random.key(0), Shape(1, length, length, 1, 4)))
    run = lambda q, k, v, mask, params: conformance.attend(op, params, {"query": q, "key": k, "value": v, "mask": mask})
    if gradient:
        run = jax.grad(lambda *a, run=run: run(*a).sum(), argnums=(0, 1, 2, 4))
    closed = jax.make_jaxpr(run)(spec, spec, spec, mask, params)
    shapes = [*sizes(closed.jaxpr), *(np.shape(const) for const in closed.consts)]
    assert not any(sum(size >= length for size in shape) > 1 for shape in shapes), "an array with the length twice"
    return max(map(math.prod, shapes))


@pytest.mark.sampled(14)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("name", LONG)
def test_memory_is_linear_in_the_length(name, implementation, gradient):
    """The biggest array is well below length^2, and grows no faster than the length from 2048 to 4096."""
    op = dataclasses.replace(LONG[name], implementation=implementation)
    short, long = (largest(op, length, gradient) for length in (2048, 4096))
    assert short < 2048**2 / 2, f"{short} elements"
    assert long <= 2.1 * short, f"{short} elements at 2048 become {long} at 4096"


SHAPES = (
    Shape(2, 45, 45, 4, 4, 2),
    Shape(1, 65, 65, 2, 4, 1),
    Shape(1, 2049, 2049, 2, 8, 1),
    Shape(1, 1, 1, 2, 8),
    Shape(2, 64, 64, 2, 4),
    Shape(1, 640, 640, 1, 4),
)


def counted(op, shape):
    """What the counter sees in a plain call of this shape."""
    at = lambda length, heads: jax.ShapeDtypeStruct((shape.batch, length, heads, shape.head_dim), jnp.float32)
    params = jax.eval_shape(lambda: op.init(jax.random.key(0), shape))
    key = at(shape.kv_len, shape.kv_heads)
    run = lambda query, key, value, params: conformance.attend(op, params, {"query": query, "key": key, "value": value})
    return cost.count(run, at(shape.q_len, shape.num_heads), key, key, params)


@pytest.mark.sampled(9)
@rows(positions=True, causal=(False, True), implementations=(None, *BOTH))
def test_closed_form_cost_equals_the_counter(row):
    shapes = SHAPES if getattr(row.op, "position", None) is None else SHAPES[:3]
    for shape in shapes:
        if shape.kv_len > row.case.max_len:
            continue
        op = conformance.reaching(row, shape.q_len).op
        want, got = counted(op, shape), op.cost(shape)
        assert not want.uncounted and not got.uncounted, (want.uncounted, got.uncounted)
        assert (got.flops, got.bytes) == (want.flops, want.bytes), shape
        assert got.params == sum(math.prod(x.shape) for x in jax.tree.leaves(op.init(jax.random.key(0), shape)))


def test_cost_of_cross_attention():
    shape = Shape(2, 9, 45, 4, 4, 2)
    for op in (Full(), Linformer(rank=6, max_len=48)):
        assert op.cost(shape).flops == counted(op, shape).flops


def test_sparse_costs_grow_with_the_length_and_full_with_its_square():
    for op, low, high in ((Full(), 3.9, 4.1), (Window(left=64, right=64), 1.9, 2.1), (BigBird(), 1.9, 2.3)):
        short, long = (op.cost(Shape(1, n, n, 2, 16)).flops for n in (8192, 16384))
        assert low <= long / short <= high, op


@pytest.mark.sampled(24)
@rows(positions=True)
def test_one_trace_a_shape(row):
    """Equal ops made anew, and other contents, share one trace; so do pickled fields."""
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(op, params, call):
        traces.append(op)
        return conformance.attend(op, params, call)

    trace = lambda op, *arrays: jax.eval_shape(lambda *arrays: run(op, *arrays), *arrays)
    for seed in range(3):
        call = inputs(seed=seed, q_len=24)
        trace(dataclasses.replace(row.op), parameters(row.op, call), as_jax(call))
    assert len(traces) == 1
    trace(row.op, parameters(row.op, inputs(q_len=23)), as_jax(inputs(q_len=23)))
    assert len(traces) == 2


@pytest.mark.sampled(3)
@rows(where=lambda case: case.pairs)
def test_no_state_in_the_op(row):
    """Fault 8: a short batch between two equal long ones; and the op is unchanged by calls."""
    before = repr(row.op)
    long, short = as_jax(inputs(batch=3)), as_jax(inputs(batch=1, q_len=9))
    params = parameters(row.op, long)
    first = forward(row.op, params, long)
    close(forward(row.op, params, short), expected(row, params, short))
    np.testing.assert_array_equal(first, forward(row.op, params, long))
    assert repr(row.op) == before


def test_layers_share_one_program():
    """Random blocks are operands: the jaxprs of two layers differ in nothing but constants."""
    op = BigBird(block_size=8, num_random_blocks=2, implementation="xla")
    call = as_jax(inputs(q_len=200))
    one, two = (jax.make_jaxpr(lambda call, op=op: op(**call))(call) for op in (op.at_layer(0), op.at_layer(1)))
    assert str(one.jaxpr) == str(two.jaxpr)


@pytest.mark.parametrize(
    ("op", "tile"),
    [
        (Window(left=64, right=64), 64),
        (Window(left=64, right=64, causal=True), 64),
        (Window(left=0, right=0), 32),  # each query tile sees one key tile alone
    ],
    ids=str,
)
def test_gradients_of_keys_are_summed_in_place(op, tile):
    """A step of the loop over query tiles must not copy all keys: that made windows quadratic in the length."""
    x, totals = jax.ShapeDtypeStruct((1, 2048, 2, 8), jnp.float32), f"f32[1,{2048 // tile},2,8,{tile}]"
    gradient = jax.jit(jax.grad(lambda q, k, v: op(q, k, v).sum(), (0, 1, 2)))
    program = gradient.lower(x, x, x).compile().as_text()
    assert totals in program  # [batch, key tiles, heads, head_dim, tile]
    assert len(re.findall(rf"{re.escape(totals)}\S* copy\(", program)) <= 2
