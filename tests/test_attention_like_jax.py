"""`dot_product_attention` gives what `jax.nn.dot_product_attention` gives, wherever a query sees anything."""

import conformance
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from conformance import BOTH, close, inputs, parameters, refuses
from hypothesis import strategies as st

from xformer import cost
from xformer.attention import (
    BigBird,
    Full,
    Linformer,
    Shape,
    Shaw,
    Window,
    dot_product_attention,
)


@pytest.mark.parametrize("implementation", BOTH)
@conformance.drawn(8)
@hypothesis.given(data=st.data())
def test_equals_jax_on_drawn_calls(implementation, data):
    """Masks, biases, causal cuts, windows and lengths alone and combined, equal lengths or not, with the residual."""
    draw = lambda strategy, name: data.draw(strategy, name)
    batch, kv_heads, group = (
        draw(st.integers(1, 2), "batch"),
        draw(st.integers(1, 2), "kv"),
        draw(st.integers(1, 2), "g"),
    )
    q_len = draw(st.integers(1, 40), "q_len")
    kv_len = draw(st.sampled_from([q_len, 7, 33]), "kv_len")
    rng = np.random.default_rng(draw(st.integers(0, 99), "seed"))
    call = inputs(q_len=q_len, kv_len=kv_len, batch=batch, heads=kv_heads * group, kv_heads=kv_heads, seed=1)
    heads = kv_heads * group
    options = {"is_causal": draw(st.booleans(), "causal"), "scale": draw(st.sampled_from([None, 0.3]), "scale")}
    options["local_window_size"] = draw(st.sampled_from([None, 3, (5, 0), (0, 2)]), "window")
    if draw(st.booleans(), "bias"):
        options["bias"] = rng.normal(size=(1, heads, q_len, kv_len)).astype(np.float32)
    kind = draw(st.sampled_from([None, (batch, 1, 1, kv_len), (1, heads, q_len, kv_len)]), "mask")
    if kind:
        options["mask"] = rng.random(kind) < 0.8
    for name, length in (("query_seq_lengths", q_len), ("key_value_seq_lengths", kv_len)):
        if draw(st.booleans(), name):
            options[name] = rng.integers(1, length + 1, batch).astype(np.int32)
    check(call, options, implementation)


def check(call, options, implementation):
    def both(function, **own):
        return jax.jit(lambda arrays: function(*arrays, **options, return_residual=True, **own))(tuple(call.values()))

    out, residual = both(dot_product_attention, implementation=implementation)
    want, want_residual = both(jax.nn.dot_product_attention)
    sees = np.asarray(want_residual) > -1e30
    np.testing.assert_array_equal(np.isfinite(residual), sees)
    assert residual.dtype == want_residual.dtype and out.dtype == want.dtype and out.shape == want.shape
    close(np.asarray(out)[sees], np.asarray(want)[sees])
    close(np.asarray(residual)[sees], np.asarray(want_residual)[sees])
    assert not np.any(np.asarray(out)[~sees])


def test_without_a_batch_axis_and_in_half_precision():
    call = {name: jnp.asarray(x[0], jnp.bfloat16) for name, x in inputs().items()}
    options = {"is_causal": True, "query_seq_lengths": np.asarray([40], np.int32), "bias": np.ones((1, 1, 45, 45))}
    ours, theirs = (f(*call.values(), **options) for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert ours.shape == theirs.shape == (45, 4, 4) and ours.dtype == theirs.dtype == jnp.bfloat16
    close(ours, np.asarray(theirs, np.float64), 2e-2)


def test_gradients_equal_those_of_jax():
    call, rng = inputs(), np.random.default_rng(0)
    bias = rng.normal(size=(1, 4, 45, 45)).astype(np.float32)
    lengths = {
        "key_value_seq_lengths": np.asarray([45, 20], np.int32),
        "query_seq_lengths": np.asarray([30, 45], np.int32),
    }
    cotangent = conformance.random_cotangent(call)
    arrays = *call.values(), bias

    def gradients(function):
        loss = lambda *arrays: (function(*arrays, is_causal=True, **lengths) * cotangent).sum()
        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays)

    got, want = gradients(dot_product_attention), gradients(jax.nn.dot_product_attention)
    jax.tree.map(lambda a, b: close(a, np.asarray(b, np.float64)), got, want)


@pytest.mark.parametrize("implementation", BOTH)
def test_the_gradient_of_the_residual(implementation):
    """Also for a query that sees nothing: no gradient, and no NaN."""
    call = inputs(batch=1) | {"mask": np.random.default_rng(0).random((1, 4, 45, 45)) < 0.5}
    call["mask"][:, :, 5] = False
    sinks = np.asarray([0.3, -0.5, 0.0, 1.0], np.float32)
    weights = np.random.default_rng(1).normal(size=(1, 45, 4)).astype(np.float32)
    weights[:, 5] = 0

    def loss(query, key, sinks, *, extra):
        options = {"mask": call["mask"], "implementation": implementation, **extra}
        out, lse = dot_product_attention(query, key, call["value"], return_residual=True, sinks=sinks, **options)
        return (jnp.where(weights == 0, 0, lse) * weights).sum() + (out**2).sum()

    def reference(query, key, sinks, extra):
        options = {"mask": call["mask"], "sinks": sinks, **extra}
        out, lse = references.attend(query, key, call["value"], with_lse=True, **options)
        return (np.where(weights == 0, 0, lse) * weights).sum() + (out**2).sum()

    points = call["query"], call["key"], sinks
    for extra in ({}, {"softcap": 1.0}):
        gradients = jax.jit(jax.grad(lambda *a, extra=extra: loss(*a, extra=extra), (0, 1, 2)))(*points)
        rng = np.random.default_rng(2)
        for place, gradient in enumerate(gradients):
            direction = rng.normal(size=gradient.shape)
            at = lambda x, place=place, extra=extra: reference(*points[:place], x, *points[place + 1 :], extra)
            want = references.derivative(at, points[place], direction)
            assert abs(np.vdot(gradient, direction) - want) < 1e-4 * (np.linalg.norm(gradient) + 0.1), place


def test_other_ops_decide_which_pairs():
    call = inputs(q_len=96)
    op = BigBird(block_size=8)
    close(dot_product_attention(*call.values(), op=op), np.asarray(op(*call.values()), np.float64))
    lengths = np.asarray([60, 33], np.int32)
    got = dot_product_attention(*call.values(), op=op, key_value_seq_lengths=lengths, is_causal=True)
    padding = conformance.padding(lengths, 96)
    close(got, np.asarray(op(*call.values(), mask=padding, is_causal=True), np.float64))
    linformer = Linformer(rank=6, max_len=96, projection="mean")
    got = dot_product_attention(*call.values(), op=linformer, key_value_seq_lengths=lengths)
    close(got, np.asarray(linformer(*call.values(), mask=padding), np.float64))
    shaw = Full(position=Shaw(max_distance=3))
    params = parameters(shaw, call)
    got = dot_product_attention(*call.values(), op=shaw, local_window_size=(4, 1), params=params)
    window = Window(left=4, right=1, position=shaw.position)
    close(got, np.asarray(window(*call.values(), params=params), np.float64))


def test_a_window_visits_only_its_tiles():
    shape = jax.ShapeDtypeStruct((1, 2048, 1, 8), jnp.float32)
    run = lambda *arrays: dot_product_attention(*arrays, local_window_size=32)
    assert cost.count(run, shape, shape, shape).flops == Window(32, 32).cost(Shape(1, 2048, 2048, 1, 8)).flops


@pytest.mark.parametrize("window", [-1, (1, -2), (1, 2, 3), 1.5, True])
def test_windows_that_are_none_are_refused(window):
    with refuses(ValueError, "local_window_size", "got"):
        dot_product_attention(*inputs().values(), local_window_size=window)


def test_what_an_op_cannot_honour_is_refused():
    call = inputs().values()
    with refuses(ValueError, "local_window_size", "pattern of its own"):
        dot_product_attention(*call, op=BigBird(), local_window_size=4)
    with refuses(ValueError, "query_seq_lengths must be an int array [batch] = [2]", "[3]"):
        dot_product_attention(*call, query_seq_lengths=np.ones(3, np.int32))
    with refuses(ValueError, "key_value_seq_lengths", "float32"):
        dot_product_attention(*call, key_value_seq_lengths=np.ones(2, np.float32))
    linformer = Linformer(rank=6, max_len=48, projection="mean")
    with refuses(NotImplementedError, "Linformer", "query_seq_lengths"):
        dot_product_attention(*call, op=linformer, query_seq_lengths=np.ones(2, np.int32))
    with refuses(NotImplementedError, "Linformer", "pairs"):
        dot_product_attention(*call, op=linformer, return_residual=True)
    for name in ("pallas", "splash", "cudnn"):
        with refuses(NotImplementedError, name, "log-sum-exp"):
            dot_product_attention(*call, implementation=name, return_residual=True)
