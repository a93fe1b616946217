"""float16 and bfloat16 stay close to float32: softmax in float32, mask constants that fit, no overflow."""

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    BOTH,
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
)

TOLERANCES = {"float16": 6e-3, "bfloat16": 5e-2}


def narrow(call, dtype):
    """Query, key, value (and bias) rounded to `dtype`."""
    return {n: jnp.asarray(x, dtype) if n in conformance.FLOATS else x for n, x in as_jax(call).items()}


def as_float32(call):
    return {n: np.asarray(x, np.float32) if n in conformance.FLOATS else x for n, x in call.items()}


def check_narrow(row, dtype):
    """One example half padded, one fully: outputs and gradients finite and near the reference on the rounded inputs."""
    call = narrow(inputs() | {"mask": conformance.padding([LENGTH - 20, 0], LENGTH)}, dtype)
    params = parameters(row.op, call)
    cotangent = conformance.random_cotangent(call)
    out, *gradients = forward_and_gradients(row.op, params, call, cotangent)
    assert out.dtype == dtype and out.shape == call["query"].shape
    rounded = as_float32(call)
    close(out, expected(row, params, rounded), TOLERANCES[dtype])
    assert not np.any(np.asarray(out, np.float32)[1])
    conformance.check_gradients(row, params, rounded, cotangent, gradients, 2 * TOLERANCES[dtype])


@pytest.mark.sampled(2)
@rows(positions=True, implementations=("xla",))
def test_bfloat16_under_every_position(row):
    check_narrow(row, "bfloat16")


@pytest.mark.sampled(3)
@rows(implementations=BOTH)
def test_float16_with_a_padding_mask(row):
    check_narrow(row, "float16")


@pytest.mark.sampled(5)
@rows(implementations=("reference",), where=one_of_each)
def test_bfloat16_of_the_reference_implementation(row):
    check_narrow(row, "bfloat16")


@pytest.mark.sampled(5)
@rows(implementations=BOTH, where=lambda case: case.normalized and one_of_each(case))
def test_large_float16_scores_do_not_overflow(row):
    """q . k of 90,000 is above float16's largest number but not above what softmax in float32 can take."""
    call = inputs(head_dim=8, batch=1)
    call["query"] = np.sign(call["query"]) * 100.0
    call["key"] = np.sign(call["key"]) * 120.0
    call = narrow(call, "float16")
    params = jax.tree.map(lambda x: x * 0.1, parameters(row.op, call))
    out, _, gradients = forward_and_gradients(row.op, params, call, conformance.random_cotangent(call))
    close(out, expected(row, params, as_float32(call)), 2e-2)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in gradients.values())


@pytest.mark.sampled(4)
@rows(where=one_of_each)
def test_dtype_casts_the_inputs_and_is_the_output_dtype(row):
    call = as_jax(inputs())
    params = parameters(row.op, call)
    out = forward(row.op, params, call, (("dtype", jnp.bfloat16),))
    assert out.dtype == jnp.bfloat16
    same = forward(row.op, params, narrow(call, "bfloat16"))
    close(out, np.asarray(same, np.float64), 1e-2)
    up = forward(row.op, params, narrow(call, "bfloat16"), (("dtype", jnp.float32),))
    assert up.dtype == jnp.float32
    close(up, expected(row, params, as_float32(narrow(call, "bfloat16"))))


@pytest.mark.sampled(5)
@rows(where=one_of_each)
def test_precision_is_taken(row):
    call = as_jax(inputs())
    params = parameters(row.op, call)
    out = forward(row.op, params, call, (("precision", jax.lax.Precision.HIGHEST),))
    close(out, expected(row, params, call))


@pytest.mark.sampled(5)
@rows(where=lambda case: case.pairs)
def test_additive_masks_of_the_dtypes_lowest_number(row):
    """A bias of finfo.min (what Flax and others add for padding) hides the key and gives no NaN, also for every key."""
    call = narrow(inputs(), "float16")
    lowest = np.finfo(np.float16).min
    bias = np.zeros((2, 1, 1, LENGTH), np.float16)
    bias[:, ..., 20:] = lowest
    params = parameters(row.op, call)
    out = forward(row.op, params, call | {"bias": jnp.asarray(bias)})
    assert np.isfinite(np.asarray(out, np.float32)).all()
    close(out, expected(row, params, as_float32(call | {"bias": bias})), 2e-2)
