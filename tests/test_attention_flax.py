"""Ops inside Flax's own layers: NNX and Linen, with and without parameters."""

import conformance
import flax.linen as nn
import jax
import numpy as np
import pytest
from conformance import HEAD_DIM, HEADS, KV_HEADS, as_jax, close, expected, inputs, parameters, refuses, rows
from flax import nnx

import xformer.nn
import xformer.nn.linen

LENGTH, WIDTH = 29, HEADS * HEAD_DIM
X = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH)).astype(np.float32)
MASK = conformance.padding([LENGTH, 11], LENGTH)


def nnx_layer(attention_fn, **fields):
    return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0), **fields)


def run(layer, x=X, **options):
    """The layer's output, compiled."""
    graph, state = nnx.split(layer)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x, **options))(state, x)


def check_nnx_layer(row):
    """The layer's output is the reference's on the layer's own projections, mask and grouped heads included."""
    shape = {"num_heads": HEADS, "head_dim": HEAD_DIM, "num_kv_heads": KV_HEADS, "max_len": None}
    fn = xformer.nn.AttentionFn(row.op, **shape, rngs=nnx.Rngs(1))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(fn, nnx.Param)).get("params", {}))
    layer = nnx_layer(fn if params else row.op, num_kv_heads=KV_HEADS)
    call = {name: np.asarray(getattr(layer, name)(X)) for name in ("query", "key", "value")}
    assert call["key"].shape[-2] == KV_HEADS
    heads = expected(row, params, call | {"mask": MASK})
    close(run(layer, mask=MASK), np.einsum("blhd,hdw->blw", heads, layer.out.kernel[...]), 5e-5)


@pytest.mark.sampled(5)
@rows(causal=(False, True))
def test_nnx_layer(row):
    check_nnx_layer(row)


@rows(positions=True, where=lambda case: case.name == "full")
def test_nnx_layer_under_every_position(row):
    check_nnx_layer(row)


@pytest.mark.sampled(3)
@rows()
def test_nnx_layer_equals_its_functional_core_under_jit_and_grad(row):
    fn = xformer.nn.AttentionFn(row.op, num_heads=HEADS, head_dim=HEAD_DIM, rngs=nnx.Rngs(1))
    layer = nnx_layer(fn)
    graph, state = nnx.split(layer)
    loss = lambda state: (nnx.merge(graph, state)(X, mask=MASK) ** 2).sum()
    value, gradients = jax.jit(jax.value_and_grad(loss, allow_int=True))(state)
    assert np.isfinite(value)
    leaves = jax.tree.leaves(gradients)
    assert leaves and all(np.isfinite(x).all() for x in leaves)
    held = jax.tree.leaves(nnx.state(layer, nnx.Param).get("attention_fn", {}))
    assert len(held) == len(jax.tree.leaves(parameters(row.op, inputs(kv_heads=HEADS))))
    if held:
        assert all(np.any(x) for x in jax.tree.leaves(gradients["attention_fn"]))


@pytest.mark.sampled(1)
@rows(where=lambda case: case.pairs and case.masks and case.keys)
def test_nnx_layer_equals_dense_attention_under_the_pattern(row):
    """Flax's own attention under the op's pattern as a mask gives the same layer output.

    Not where a query sees nothing: there Flax averages all values, and we give zeros.
    """
    pairs = np.asarray(MASK & row.op.pattern(LENGTH, LENGTH, HEADS)[None])
    want = nnx_layer(nnx.dot_product_attention)(X, mask=pairs)
    sees = pairs.any(-1).all(1)
    close(run(nnx_layer(row.op), mask=MASK)[sees], np.asarray(want)[sees], 5e-5)


@pytest.mark.sampled(2)
@rows(where=lambda case: case.causal)
def test_nnx_layer_is_causal_passes_through(row):
    """`is_causal=True` of Flax's layer equals the op's own field."""
    causal = conformance.with_fields(row, causal=True).op
    fn = lambda op: xformer.nn.AttentionFn(op, num_heads=HEADS, head_dim=HEAD_DIM, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(run(nnx_layer(fn(row.op)), is_causal=True), run(nnx_layer(fn(causal))))


@pytest.mark.sampled(3)
@rows()
def test_linen_layer(row):
    check_linen_layer(row)


@pytest.mark.sampled(2)
@rows(positions=True, where=lambda case: case.name == "full")
def test_linen_layer_under_every_position(row):
    check_linen_layer(row)


def check_linen_layer(row):
    """Linen passes only the keywords in the signature: the mask must arrive, parameters sit under `attention_fn`."""
    has_params = bool(parameters(row.op, inputs(kv_heads=HEADS)))
    fn = xformer.nn.linen.AttentionFn(op=row.op) if has_params else row.op
    layer = nn.MultiHeadDotProductAttention(num_heads=HEADS, qkv_features=WIDTH, attention_fn=fn)
    variables = layer.init(jax.random.key(0), X, X, mask=MASK)
    assert ("attention_fn" in variables["params"]) == has_params
    apply = jax.jit(lambda x: layer.apply(variables, x, x, mask=MASK))
    out = apply(X)
    changed = np.array(X)
    changed[1, 11:] += 5.0
    close(apply(changed)[1, :11], np.asarray(out)[1, :11], 1e-5)
    project = lambda name: np.einsum("blw,whd->blhd", X, variables["params"][name]["kernel"])
    call = {name: project(name) for name in ("query", "key", "value")} | {"mask": MASK}
    heads = expected(row, variables["params"].get("attention_fn", {}), call)
    close(out, np.einsum("blhd,hdw->blw", heads, variables["params"]["out"]["kernel"]), 5e-5)


@pytest.mark.sampled(3)
@rows(where=lambda case: case.dropout and conformance.one_of_each(case))
@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_dropout_through_flax(row, library):
    """Attention dropout of the layer reaches the op, and evaluation turns it off."""
    if library == "nnx":
        fn = xformer.nn.AttentionFn(row.op, num_heads=HEADS, head_dim=HEAD_DIM, rngs=nnx.Rngs(1))
        layer = nnx_layer(fn, dropout_rate=0.5)
        call = lambda deterministic, seed: layer(X, deterministic=deterministic, rngs=nnx.Rngs(dropout=seed))
    else:
        fn = xformer.nn.linen.AttentionFn(op=row.op)
        linen = nn.MultiHeadDotProductAttention(num_heads=HEADS, dropout_rate=0.5, attention_fn=fn)
        variables = linen.init(jax.random.key(0), X, X, deterministic=True)
        apply = jax.jit(linen.apply, static_argnames="deterministic")
        call = lambda deterministic, seed: apply(
            variables, X, X, deterministic=deterministic, rngs={"dropout": jax.random.key(seed)}
        )
    np.testing.assert_array_equal(call(True, 0), call(True, 1))
    assert np.abs(np.asarray(call(False, 0)) - np.asarray(call(False, 1))).max() > 1e-2


def test_weights_are_sown_by_attention_fn_and_refused_by_the_core():
    for case in conformance.CASES:
        call = as_jax(inputs(q_len=9, kv_heads=HEADS))
        params = parameters(case.op, call)
        with refuses((NotImplementedError, ValueError), "AttentionFn"):
            conformance.attend(case.op, params, call, module=nnx.Module())


@rows(where=lambda case: case.pairs and case.name != "full")
def test_decode_in_stock_flax_needs_the_position(row):
    """Flax's cache calls with one query and no offset: a local op can't know where it is, and says so."""
    fn = xformer.nn.AttentionFn(row.op, num_heads=HEADS, head_dim=HEAD_DIM, rngs=nnx.Rngs(1))
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, decode=True, attention_fn=fn, rngs=nnx.Rngs(0))
    layer.init_cache((2, LENGTH, WIDTH))
    with refuses(ValueError, "query_offset"):
        layer(X[:, :1])
