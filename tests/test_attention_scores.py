"""Soft caps, sinks, scales by head and values of another depth, each alone and in every kind of call."""

import dataclasses
import math

import conformance
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    padding,
    parameters,
    refuses,
    rows,
)
from flax import nnx

import xformer.nn
import xformer.nn.linen
from xformer import cost
from xformer.attention import BigBird, Full, Linformer, Options, Shape, Shaw, Window

SINKS = np.asarray([0.5, -1.0, 2.0, 0.0], np.float32)
SCALE = np.asarray([0.3, 0.5, 0.7, 0.9], np.float32)
ALONE = {"softcap": {"softcap": 0.8}, "sinks": {"sinks": SINKS}, "scale": {"scale": SCALE}}
PAIRS = rows(causal=(False, True), implementations=BOTH, where=lambda case: case.pairs and one_of_each(case))


def check(row, call, tolerance=3e-5):
    params, cotangent = parameters(row.op, call), conformance.random_cotangent(call)
    out, *gradients = forward_and_gradients(row.op, params, as_jax(call), cotangent)
    close(out, expected(row, params, call))
    conformance.check_gradients(row, params, call, cotangent, gradients, tolerance)
    return out, gradients[1]


@pytest.mark.sampled(6)
@PAIRS
@pytest.mark.parametrize("extra", ALONE)
def test_each_alone_with_a_padding_mask(row, extra):
    check(row, inputs() | ALONE[extra] | {"mask": padding([LENGTH - 9, 0], LENGTH)})


@pytest.mark.sampled(2)
@PAIRS
def test_values_deeper_and_shallower_than_keys(row):
    for value_dim in (3, 9):
        out, _ = check(row, inputs(value_dim=value_dim))
        assert out.shape == (2, LENGTH, HEADS, value_dim)


@pytest.mark.sampled(2)
@rows(implementations=BOTH, where=lambda case: case.pairs and one_of_each(case))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(row, dtype):
    call = inputs(value_dim=6) | {"mask": padding([LENGTH - 20, 0], LENGTH), "softcap": 2.0}
    call = {n: jnp.asarray(x, dtype) if n in conformance.FLOATS else x for n, x in as_jax(call).items()}
    call |= {"sinks": jnp.asarray(SINKS), "scale": jnp.asarray(SCALE)}
    rounded = {n: np.asarray(x, np.float32) if n in conformance.FLOATS else x for n, x in call.items()}
    cotangent = conformance.random_cotangent(call)
    params = parameters(row.op, call)
    out, *gradients = forward_and_gradients(row.op, params, call, cotangent)
    assert out.dtype == dtype and not np.any(np.asarray(out, np.float32)[1])
    tolerance = {"float16": 6e-3, "bfloat16": 5e-2}[dtype]
    close(out, expected(row, params, rounded), tolerance)
    conformance.check_gradients(row, params, rounded, cotangent, gradients, 2 * tolerance)


@pytest.mark.sampled(5)
@PAIRS
def test_a_query_with_nothing_but_a_sink_gives_zeros_and_no_gradient(row):
    call = inputs() | {"sinks": SINKS, "mask": np.zeros((2, 1, 1, LENGTH), bool)}
    out, gradients = check(row, call)
    assert not np.any(out) and not any(np.any(x) for x in gradients.values())


@pytest.mark.parametrize("implementation", BOTH)
def test_a_sink_is_one_more_key_with_a_value_of_zero(implementation):
    op, call = Full(implementation=implementation), inputs(batch=1)
    wider = {name: np.concatenate([x, np.zeros_like(x[:, :1])], 1) for name, x in call.items() if name != "query"}
    bias = np.zeros((1, HEADS, LENGTH, LENGTH + 1), np.float32)
    bias[..., -1] = SINKS[:, None]
    want = forward(op, {}, as_jax({"query": call["query"], "bias": bias, **wider}))
    close(forward(op, {}, as_jax(call | {"sinks": SINKS})), np.asarray(want, np.float64))
    nothing = forward(op, {}, as_jax(call | {"sinks": np.full(HEADS, -np.inf, np.float32)}))
    close(nothing, np.asarray(forward(op, {}, as_jax(call)), np.float64))


@pytest.mark.parametrize("implementation", BOTH)
def test_what_is_hidden_stays_hidden_under_a_softcap(implementation):
    """A hidden NaN or infinity meets no derivative of the cap; a visible one shows."""
    op, call = Window(left=3, right=0, implementation=implementation), inputs() | {"softcap": 1.0, "sinks": SINKS}
    cotangent = conformance.random_cotangent(call)
    want = forward(op, {}, as_jax(call), (("is_causal", True),))
    spoilt = {name: x.copy() for name, x in call.items() if name in ("key", "value")}
    spoilt["key"][:, -1], spoilt["value"][:, -1] = np.nan, np.inf
    spoilt = call | spoilt
    cotangent[:, -1] = 0
    out, _, moved = forward_and_gradients(op, {}, as_jax(spoilt), cotangent, (("is_causal", True),))
    np.testing.assert_array_equal(out[:, :-1], want[:, :-1])
    assert np.isnan(out[:, -1]).all()
    assert np.isfinite(moved["query"][:, :-1]).all() and np.isfinite(moved["key"][:, :-4]).all()


def test_weights_with_a_sink_sum_to_less_than_one():
    call = as_jax(inputs())
    weights = Full().attention_weights(*call.values(), Options(sinks=jnp.asarray(SINKS), softcap=1.0))
    sums = np.asarray(weights.sum(-1))
    assert (sums < 1).all() and (sums > 0).all()
    np.testing.assert_allclose(
        np.einsum("bhqk,bkhd->bqhd", weights, np.repeat(call["value"], 2, 2)),
        Full()(**call, sinks=jnp.asarray(SINKS), softcap=1.0), rtol=1e-4, atol=1e-5,
    )  # fmt: skip


@pytest.mark.sampled(2)
@rows(where=one_of_each)
def test_values_of_another_depth_through_both_adapters(row):
    op = dataclasses.replace(row.op, position=Shaw(max_distance=3)) if "shaw" in row.case.positions else row.op
    call = inputs(value_dim=6)
    sizes = {"num_heads": HEADS, "head_dim": conformance.HEAD_DIM, "num_kv_heads": conformance.KV_HEADS}
    fn = xformer.nn.AttentionFn(op, **sizes, value_dim=6, rngs=nnx.Rngs(0))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(fn, nnx.Param)).get("params", {}))
    constants = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(fn, xformer.nn.Constant)))
    want = expected(conformance.with_fields(row, **_position(op)), params | constants, call)
    close(fn(**as_jax(call)), want)
    linen = xformer.nn.linen.AttentionFn(op=op)
    variables = linen.init(jax.random.key(0), **as_jax(call))
    assert jax.tree.map(jnp.shape, variables.get("params", {})) == jax.tree.map(np.shape, params)
    close(linen.apply({"params": params} | constants, **as_jax(call)), want)
    assert isinstance(linen, nn.Module)


def _position(op):
    return {"position": op.position} if hasattr(op, "position") else {}


@pytest.mark.sampled(20)
@rows(implementations=(None, *BOTH), where=lambda case: case.deep_values)
def test_cost_with_values_of_another_depth(row):
    """Exact against the counter; softcap and sinks are no matrix products."""
    extras = {"softcap": 2.0, "sinks": jnp.asarray(SINKS[:2])} if row.case.pairs else {}
    for position in (None, Shaw(max_distance=3)) if "shaw" in row.case.positions else (None,):
        op = dataclasses.replace(row.op, position=position) if position else row.op
        shape = Shape(2, 45, 45, 2, 4, 1, value_dim=7)
        params = jax.eval_shape(lambda op=op, shape=shape: op.init(jax.random.key(0), shape))
        array = lambda *sizes: jax.ShapeDtypeStruct((2, 45, *sizes), jnp.float32)
        run = lambda q, k, v, params, op=op: conformance.attend(
            op, params, {"query": q, "key": k, "value": v, **extras}
        )
        counted, said = cost.count(run, array(2, 4), array(1, 4), array(1, 7), params), op.cost(shape)
        assert (said.flops, said.bytes, said.uncounted) == (counted.flops, counted.bytes, ())


def test_a_number_for_scale_and_an_array_of_it_agree():
    call = as_jax(inputs())
    for op in (Full(), BigBird(block_size=8), Linformer(rank=6, max_len=48)):
        params = parameters(op, inputs())
        want = conformance.attend(op, params, call, scale=0.3)
        for scale in (jnp.asarray(0.3), jnp.full(HEADS, 0.3)):
            close(conformance.attend(op, params, call, scale=scale), np.asarray(want, np.float64))


@pytest.mark.parametrize("softcap", [0, -1.0, math.nan, math.inf, True, "2", np.ones(2)])
def test_a_softcap_that_is_none_is_refused(softcap):
    with refuses(ValueError, "softcap must be a finite number above 0", "got"):
        Full()(**as_jax(inputs()), softcap=softcap)


@pytest.mark.parametrize("sinks", [1.0, np.zeros(3, np.float32), np.zeros((1, 4), np.float32), np.zeros(4, np.int32)])
def test_sinks_of_another_shape_or_dtype_are_refused(sinks):
    with refuses(ValueError, "sinks must be a floating point array [num_heads] = [4]", "got"):
        Full()(**as_jax(inputs()), sinks=sinks)


def test_variants_without_pairs_refuse_with_the_reason():
    call, op = as_jax(inputs()), Linformer(rank=6, max_len=48, projection="mean")
    for extra in ({"softcap": 2.0}, {"sinks": jnp.asarray(SINKS)}):
        with refuses(NotImplementedError, "Linformer", *extra, "no token pairs"):
            op(**call, **extra)
    one_kernel = Linformer(rank=6, max_len=48, sharing="key_value", projection="conv")
    with refuses(NotImplementedError, "depth 6", "depth 4", "one kernel"):
        one_kernel(**as_jax(inputs(value_dim=6)), params={"shared": jnp.ones((1, 8, 4, 4))})


@pytest.mark.parametrize(
    ("extra", "word"), [({"softcap": 1.0}, "softcap"), ({"sinks": SINKS}, "sinks"), ({"value": 6}, "as deep as")]
)
def test_kernels_say_what_they_lack(extra, word):
    call = as_jax(inputs(value_dim=extra.pop("value", None)))
    for implementation in ("pallas", "splash", "cudnn"):
        if (implementation, word) == ("splash", "softcap"):
            continue  # which it has
        with refuses(NotImplementedError, implementation, word):
            Full(implementation=implementation)(**call, **extra)
