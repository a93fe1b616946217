"""What is hidden moves nothing: NaN and infinity in keys, values, queries and gradients, behind every kind of mask."""

import dataclasses

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import BOTH, as_jax, inputs, one_of_each, padding, parameters, rows

from xformer.attention import BigBird, Full, Linformer, Window

LENGTH, SEEN = 16, 8  # the first half must not notice what stands in the second
HALVES = (np.arange(LENGTH) >= SEEN).astype(np.int32)[None]
APART = (HALVES[0][:, None] == HALVES[0][None])[None, None]
HIDING = {
    "general-mask": (Full(), {"mask": APART}),
    "segments": (Full(), {"segment_ids": HALVES}),
    "window": (Window(left=2, right=2), {"segment_ids": HALVES}),
    "causal": (Full(causal=True), {}),
    "bigbird": (BigBird(block_size=2, num_random_blocks=1), {"mask": APART}),
    "bias": (Full(), {"mask": APART, "bias": np.where(APART, 0, np.nan).astype(np.float32)}),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("name", HIDING)
def test_what_is_hidden_moves_no_output_and_no_gradient(name, implementation):
    op, options = HIDING[name]
    op = dataclasses.replace(op, implementation=implementation)
    arrays = [jnp.asarray(x) for x in inputs(q_len=LENGTH, batch=1, heads=2, kv_heads=2).values()]
    arrays.append(jnp.asarray(np.random.default_rng(9).normal(size=arrays[0].shape).astype(np.float32)))
    if name == "causal":  # later keys are hidden from earlier rows; earlier keys hear later rows' gradients
        arrays[3] = arrays[3].at[:, SEEN:].set(0)

    @jax.jit
    def attend_and_pull(q, k, v, cotangent):
        out, pull = jax.vjp(lambda q, k, v: op(q, k, v, **options), q, k, v)
        return out, pull(cotangent)

    out, gradients = attend_and_pull(*arrays)
    for index in range(3 if name == "causal" else 4):
        for bad in (np.nan, np.inf):
            changed = list(arrays)
            changed[index] = changed[index].at[:, SEEN + 3, :, 1].set(bad)
            got, got_gradients = attend_and_pull(*changed)
            np.testing.assert_array_equal(got[:, :SEEN], out[:, :SEEN])
            if name != "causal":
                for a, b in zip(got_gradients, gradients, strict=True):
                    np.testing.assert_allclose(a[:, :SEEN], b[:, :SEEN], rtol=1e-5, atol=1e-6)
                assert not all(np.isfinite(x).all() for x in got_gradients), "what is visible shows in the gradient"
            if index < 3:
                assert not np.isfinite(got[:, SEEN:]).all(), "what is visible shows"


def test_the_case_of_the_issue():
    q, _, v = (jnp.asarray(x) for x in inputs(q_len=8, batch=1, heads=2, kv_heads=2).values())
    mask = jnp.broadcast_to(jnp.arange(8) < 4, (1, 1, 8, 8))
    want = Full()(q, q, v, mask=mask)
    np.testing.assert_array_equal(Full()(q, q, v.at[:, 4:].set(jnp.nan), mask=mask), want)


@pytest.mark.sampled(10)
@rows(where=one_of_each, implementations=BOTH)
def test_nan_behind_a_padding_mask(row):
    """In every variant, Linformer too; and a NaN in the output's gradient of one example leaves the others alone."""
    call = as_jax(inputs(q_len=40))
    params, mask = parameters(row.op, call), padding([31, 13], 40)
    run = lambda *qkv: conformance.attend(row.op, params, dict(zip(call, qkv, strict=True)) | {"mask": mask})
    attend_and_pull = jax.jit(lambda qkv, d_out: (run(*qkv), jax.vjp(run, *qkv)[1](d_out)))
    cotangent = jnp.asarray(conformance.random_cotangent(call))
    out, gradients = attend_and_pull(tuple(call.values()), cotangent)
    hidden = ~mask[:, 0, 0, :, None, None]
    bad = call["query"], *(jnp.where(hidden, jnp.nan, call[name]) for name in ("key", "value"))
    got, got_gradients = attend_and_pull(bad, cotangent)
    np.testing.assert_allclose(got, out, rtol=1e-6, atol=1e-6)
    for a, b in zip(got_gradients, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(attend_and_pull(bad, cotangent.at[1, 3].set(jnp.nan))[1], gradients, strict=True):
        np.testing.assert_allclose(a[0], b[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("bias", [-1e30, -3e38, float(np.finfo(np.float32).min)])
def test_a_bias_is_a_number(bias, implementation):
    """The same bias on every key changes nothing, however low; only masks hide."""
    q, k, v = (jnp.asarray(x) for x in inputs(q_len=8, batch=1, heads=2, kv_heads=2).values())
    out = Full(implementation=implementation)(q, k, v, bias=jnp.full((1, 1, 8, 8), bias))
    np.testing.assert_allclose(out, jnp.broadcast_to(v.mean(1, keepdims=True), out.shape), rtol=1e-5, atol=1e-6)


def test_linformer_refuses_what_it_cannot_hide():
    x = jnp.ones((1, 8, 2, 4))
    with conformance.refuses(NotImplementedError, "segment_ids", "slots"):
        Linformer(rank=4, max_len=8, projection="mean")(x, x, x, segment_ids=jnp.zeros((1, 8), jnp.int32))
