"""Every variant x position x implementation equals its float64 reference, forward and gradient."""

import conformance
import hypothesis
import jax
import numpy as np
import pytest
import references
from conformance import (
    BOTH,
    HEADS,
    LENGTH,
    as_jax,
    close,
    expected,
    forward,
    forward_and_gradients,
    inputs,
    one_of_each,
    parameters,
    rows,
    sampled,
)
from hypothesis import strategies as st

from xformer.nn.params import has_params

LENGTHS = (1, 2, 3, 63, 64, 65, 127, 130, 200, 640)


def check(row, call, options=()):
    params = parameters(row.op, call)
    cotangent = conformance.random_cotangent(call)
    out, *gradients = forward_and_gradients(row.op, params, as_jax(call), cotangent, options)
    assert out.shape == cotangent.shape and out.dtype == np.float32
    close(out, expected(row, params, call))
    conformance.check_gradients(row, params, call, cotangent, gradients)


@pytest.mark.sampled(6)
@rows(positions=True, causal=(False, True), implementations=BOTH)
def test_equals_the_reference_with_every_argument(row):
    check(row, conformance.everything(row))


@pytest.mark.sampled(8)
@rows(causal=(False, True), where=one_of_each)
def test_equals_the_reference_with_no_argument(row):
    check(row, inputs(seed=1))


@pytest.mark.sampled(12)
@rows(implementations=("xla",), where=lambda case: case.pairs)
@sampled("length", LENGTHS, keep=(1, 64, 65, 200))
def test_any_length(row, length):
    row = conformance.reaching(row, length)
    call = inputs(q_len=length, batch=1, heads=2, kv_heads=1, head_dim=2, seed=length)
    params = parameters(row.op, call)
    close(forward(row.op, params, as_jax(call)), expected(row, params, call))


@pytest.mark.sampled(3)
@rows(causal=(False, True), where=lambda case: case.pairs)
@pytest.mark.parametrize("length", [65, 640])
def test_the_best_implementation_at_short_and_long_lengths(row, length):
    row = conformance.reaching(row, length)
    call = inputs(q_len=length, batch=1, heads=2, kv_heads=1, head_dim=2, seed=length)
    params = parameters(row.op, call)
    close(forward(row.op, params, as_jax(call)), expected(row, params, call))


@pytest.mark.sampled(6)
@rows(where=lambda case: not case.pairs and getattr(case.op, "sharing", "none") == "none")
@sampled("length", [1, 7, 8, 9, 48], keep=(1, 9, 48))
def test_any_length_up_to_the_maximum(row, length):
    check(row, inputs(q_len=length, batch=1, seed=length))


@pytest.mark.sampled(2)
@rows(positions=True, implementations=("xla",), where=lambda case: case.name in ("full", "bigbird"))
def test_keys_in_several_chunks(row):
    """The online softmax carries its sums from one chunk of keys to the next only above 1,024 keys in a row.

    The last queries: BigBird's last block, which sees everything.
    """
    kv_len, at = 1500, 1492
    row = conformance.reaching(row, kv_len)
    call = inputs(q_len=8, kv_len=kv_len, batch=1, heads=2, kv_heads=1, head_dim=2, seed=5)
    call["query"] *= 3
    params, cotangent = parameters(row.op, call), conformance.random_cotangent(call)
    out, *gradients = forward_and_gradients(row.op, params, as_jax(call), cotangent, (("query_offset", at),))
    close(out, expected(row, params, call, at))
    conformance.check_gradients(row, params, call, cotangent, gradients, offset=at)


@pytest.mark.sampled(2)
@rows(causal=(False, True), implementations=("xla",), where=lambda case: case.pairs)
def test_long_gradients_cross_many_tiles(row):
    check(conformance.reaching(row, 700), inputs(q_len=700, batch=1, heads=2, kv_heads=1, seed=2))


@pytest.mark.sampled(1)
@rows(positions=True, implementations=("xla",), where=lambda case: case.name == "full")
def test_long_gradients_of_every_position_term(row):
    check(conformance.reaching(row, 700), inputs(q_len=700, batch=1, heads=2, kv_heads=1, seed=2))


@pytest.mark.sampled(4)
@rows(positions=True, where=lambda case: case.pairs)
def test_forward_mode_of_the_reference_implementation(row):
    """`implementation="reference"` differentiates forward: a custom VJP alone would refuse."""
    row = conformance.with_fields(row, implementation="reference")
    call = conformance.everything(row)
    params = parameters(row.op, call)
    rng = np.random.default_rng(9)
    tangents = {name: rng.normal(size=call[name].shape).astype(np.float32) for name in conformance.FLOATS}
    rest = {name: x for name, x in call.items() if name not in tangents}
    run = lambda *floats: conformance.attend(row.op, params, dict(zip(tangents, floats, strict=True)) | rest)
    _, moved = jax.jit(lambda *t: jax.jvp(run, tuple(call[name] for name in tangents), t))(*tangents.values())
    step = 1e-30
    shifted = {name: call[name] + 1j * step * tangents[name].astype(np.float64) for name in tangents}
    close(moved, np.imag(expected(row, params, call | shifted)) / step, 1e-4)


@pytest.mark.sampled(5)
@rows(where=lambda case: not case.pairs)
def test_forward_mode_where_there_are_no_pairs(row):
    row = conformance.with_fields(row, implementation="reference")
    call = inputs()
    params = parameters(row.op, call)
    tangent = conformance.random_cotangent(call)
    run = lambda query: conformance.attend(row.op, params, call | {"query": query})
    _, moved = jax.jit(lambda t: jax.jvp(run, (call["query"],), (t,)))(tangent)
    want = references.derivative(lambda q: expected(row, params, call | {"query": q}), call["query"], tangent)
    close(moved, want, 1e-4)


@pytest.mark.sampled(6)
@rows(where=lambda case: case.pairs and not has_params(case.op))  # those of each key head have its shape
def test_grouped_heads_read_the_right_group(row):
    """Query head h reads key and value head h // group: repeating them changes nothing."""
    call = as_jax(inputs(seed=4))
    repeated = {name: x.repeat(HEADS // x.shape[-2], axis=-2) for name, x in call.items()}
    close(forward(row.op, {}, call), np.asarray(forward(row.op, {}, repeated)))


@pytest.mark.sampled(5)
@rows(where=one_of_each)
def test_leading_batch_axes(row):
    """`[*batch, length, heads, head_dim]` with two batch axes."""
    call = inputs(batch=4, seed=6)
    params = parameters(row.op, call)
    want = np.asarray(forward(row.op, params, as_jax(call)))
    two = {name: x.reshape(2, 2, *x.shape[1:]) for name, x in call.items()}
    close(forward(row.op, params, as_jax(two)), want.reshape(2, 2, *want.shape[1:]))


@pytest.mark.sampled(1)
@rows(causal=(False, True), where=lambda case: getattr(case.op, "sharing", "none") == "none")
@conformance.drawn(5)
@hypothesis.given(data=st.data())
def test_drawn_calls_equal_the_reference(row, data):
    kv_heads = data.draw(st.sampled_from([1, 2, 3]), "kv_heads")
    call = inputs(
        q_len=data.draw(st.integers(1, min(90, row.case.max_len)), "length"),
        batch=data.draw(st.integers(1, 3), "batch"),
        heads=kv_heads * data.draw(st.integers(1, 3), "group"),
        kv_heads=kv_heads,
        head_dim=2 * data.draw(st.integers(1, 4), "half_dim"),
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    batch, length, heads, _ = call["query"].shape
    kind = data.draw(st.sampled_from(["none", "padding", "full"]), "mask")
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "mask_seed"))
    if kind == "padding" or (kind == "full" and not (row.case.pairs and row.case.masks)):
        call["mask"] = rng.random((batch, 1, 1, length)) < 0.7
    elif kind == "full":
        shape = (batch, data.draw(st.sampled_from([1, heads]), "mask_heads"), length, length)
        dtype = data.draw(st.sampled_from(["bool", "float32", "int8"]), "dtype")
        call["mask"] = (rng.random(shape) < 0.5).astype(dtype)
    params = parameters(row.op, call)
    out = forward(row.op, params, as_jax(call))
    close(out, expected(row, params, call))


@pytest.mark.sampled(4)
@rows(where=lambda case: not case.local)
def test_lengths_may_differ_where_nothing_depends_on_positions(row):
    """Cross attention, with a padding mask."""
    call = inputs(q_len=9, kv_len=LENGTH) | {"mask": conformance.padding([LENGTH, 11], LENGTH)}
    check(row, call)
