"""Kernels that others ship: splash attention for TPUs, interpreted on the CPU, and cuDNN, whose part JAX plays here."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import inputs, padding, refuses

from xformer.attention import ALiBi, BigBird, Full, Options, Shape, Window
from xformer.attention import call as calls
from xformer.attention.kernels import choose, cudnn, interpreted


def call_of(op, query, key, value, mask=None, **options):
    """The call as an implementation gets it, and the `Call` itself."""
    call = calls.normalize(query, key, value, Options(mask=mask, **options))
    return op._split(call, {}), call


def same(run, want, call, dtype, tolerance):
    """Output and gradients of two functions of query, key and value."""
    arrays = [jnp.asarray(call[name], dtype) for name in ("query", "key", "value")]
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=call["query"].shape), dtype)
    results = []
    for function in (run, want):
        out, pull = jax.vjp(jax.jit(function), *arrays)
        results.append((out, *pull(cotangent)))
    for name, x, y in zip(("output", "query", "key", "value"), *results, strict=True):
        x, y = (np.asarray(x, np.float64) for x in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)
    return [np.asarray(x) for x in results[0]]


SPLASH = {
    "window": (Window(left=9, right=2), {"mask": padding([30, 0], 45)}, {}, jnp.float32),
    "softcap": (Full(causal=True), {"softcap": 1.5}, {"batch": 1}, jnp.float32),
    "segments": (Full(causal=True), {"segment_ids": np.repeat([[0, 1, 1], [3, 2, 3]], 15, axis=1)}, {}, jnp.float32),
    "bigbird": (BigBird(block_size=64, num_random_blocks=1, num_window_blocks=1, num_global_blocks=1, causal=True), {},
                {"q_len": 200, "batch": 1}, jnp.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLASH)
def test_splash_equals_the_reference(name):
    """Forward and gradients, with grouped heads, odd lengths, and an example that is nothing but padding."""
    op, options, sizes, dtype = SPLASH[name]
    call = inputs(head_dim=64, **sizes)
    named = [dataclasses.replace(op, implementation=x) for x in ("splash", "reference")]
    with interpreted():
        got = same(*(lambda *a, op=op: op(*a, **options) for op in named), call, dtype,
                   2e-5 if dtype == jnp.float32 else 6e-2)  # fmt: skip
    if name == "window":
        assert all((x[1] == 0).all() for x in got)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_splash_lowers_for_tpus(gradient):
    op = BigBird(block_size=64, implementation="splash")
    query, key = (jax.ShapeDtypeStruct((2, 600, heads, 64), jnp.bfloat16) for heads in (4, 2))
    mask = jax.ShapeDtypeStruct((2, 1, 1, 600), jnp.bool_)
    run = lambda q, k, v, mask: op(q, k, v, mask=mask).astype(jnp.float32).sum()
    run = jax.grad(run, argnums=(0, 1, 2)) if gradient else run
    with interpreted():
        exported = jax.export.export(jax.jit(run), platforms=["tpu"])(query, key, key, mask)
    assert exported.mlir_module().count("@tpu_custom_call(") == (3 if gradient else 1)


def test_splash_refuses_what_it_cannot_do():
    with interpreted():
        for op, options, words in (
            (Full(position=ALiBi()), {"head_dim": 64}, ["ALiBi"]),
            (Full(), {"head_dim": 24}, ["head_dim", "64", "24"]),
        ):
            with refuses(NotImplementedError, "splash", *words):
                dataclasses.replace(op, implementation="splash")(**inputs(**options))


CUDNN = {
    "full": (Full(), None),
    "padded": (Full(), "holes"),
    "causal": (Full(causal=True), None),
    "causal-window": (Window(left=5, right=9, causal=True), None),
}


@pytest.mark.parametrize("name", CUDNN)
def test_what_is_asked_of_cudnn_is_the_reference(name):
    """Padding may stand anywhere; the last example is nothing but padding. XLA computes what cuDNN would."""
    op, holes = CUDNN[name]
    mask = None
    if holes:
        mask = np.random.default_rng(2).random((2, 1, 1, 45)) < 0.6
        mask[1] = False
    run = lambda *a: cudnn.attend(*call_of(op, *a, mask=mask)[0], backend="xla")
    got = same(run, lambda *a: dataclasses.replace(op, implementation="reference")(*a, mask=mask),
               inputs(head_dim=8), jnp.float32, 2e-5)  # fmt: skip
    if holes:
        assert all((x[1] == 0).all() for x in got)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_cudnn_lowers_for_gpus(padded, monkeypatch):
    """Forward and gradient become cuDNN's two calls. JAX asks for cuDNN's version, which this machine does not have."""
    inside = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(inside, "check_cudnn_version", lambda: 91000)
    spec = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((2, 1, 1, 64), jnp.bool_) if padded else None
    run = lambda q, k, v, mask: cudnn.attend(*call_of(Full(), q, k, v, mask)[0]).astype(jnp.float32).sum()
    run = jax.jit(jax.grad(run, argnums=(0, 1, 2)))
    text = run.trace(spec, spec, spec, mask).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text


def test_cudnn_refuses_what_it_cannot_do():
    half = {name: jnp.asarray(x, jnp.bfloat16) for name, x in inputs(head_dim=8).items()}
    for op, call, options, words in (
        (Full(), inputs(head_dim=12), {}, ["float32", "head_dim", "12"]),
        (Window(left=3, right=3), half, {}, ["no other pattern"]),
        (BigBird(block_size=4), half, {}, ["no other pattern"]),
        (Full(causal=True), half, {"mask": padding([45, 3], 45)}, ["padding mask with a causal"]),
        (Full(causal=True), half, {"query_offset": 1}, ["offset"]),
        (Full(), half, {"segment_ids": np.zeros((2, 45), int)}, ["segments"]),
    ):
        split, _ = call_of(op, **call, **options)
        with refuses(NotImplementedError, "cudnn", *words):
            choose("cudnn", *split, anywhere=True)
    assert choose("cudnn", *call_of(Full(), **half)[0], anywhere=True) == "cudnn"
    assert Full(implementation="cudnn").cost(Shape(1, 64, 64, 1, 64)).flops == 4 * 64**3
