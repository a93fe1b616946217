"""Projections of their own for what global tokens attend to: the layer's formula, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from conformance import close, padding, refuses, sampled
from flax import nnx

from xformer.attention import Full, Longformer, Shaw
from xformer.models import EncoderClassifier
from xformer.nn import MultiHeadAttention

LENGTH, WIDTH, HEADS = 19, 8, 2
GLOBAL = np.zeros((2, LENGTH), bool)
GLOBAL[0, [0, 11]] = GLOBAL[1, [2, 3, 7]] = True
REAL = np.arange(LENGTH) < np.array([[LENGTH], [13]])


def make(op, seed=0, **options):
    return MultiHeadAttention(HEADS, WIDTH, attention_fn=op, global_projections=True, rngs=nnx.Rngs(seed), **options)


def make_x():
    return jax.random.normal(jax.random.key(1), (2, LENGTH, WIDTH))


def project(layer, x):
    """A LinearGeneral layer by hand."""
    kernel, bias = np.asarray(layer.kernel[...], np.float64), np.asarray(layer.bias[...], np.float64)
    return np.tensordot(np.asarray(x, np.float64), kernel, 1) + bias


def formula(layer, x, *, tokens, segments=None):
    """Beltagy et al. 2020, section 3.1: Q_s, K_s, V_s for the window and for keys; Q_g, K_g, V_g for global rows."""
    op, own = layer.attention_fn.op, layer.of_global
    options = {"mask": padding([LENGTH, 13], LENGTH), "segment_ids": segments}
    params = jax.tree.map(np.asarray, layer.attention_fn.own_params())
    shared = [project(one, x) for one in (layer.query, layer.key, layer.value)]
    out = references.longformer(op, params, *shared, global_tokens=tokens, **options)
    whole = Full(position=op.position, causal=op.causal)
    rows = references.full(whole, params, *(project(one, x) for one in (own.query, own.key, own.value)), **options)
    held = np.arange(LENGTH)[None] < op.num_global_tokens if tokens is None else tokens
    out = np.where(held[:, :, None, None], rows, out)
    kernel = np.asarray(layer.out.kernel[...], np.float64)
    return np.tensordot(out, kernel, 2) + np.asarray(layer.out.bias[...], np.float64)


@sampled("causal", [False, True], keep=[False])
@sampled("position", [None, Shaw(3)], keep=[Shaw(3)])
@sampled("most", [None, 64, 3, 2], keep=[None, 3])
def test_the_layer_is_its_formula(most, position, causal):
    """The first tokens, or those of each example: gathered, or every query visited where there are too many."""
    layer, x = make(Longformer(4, 2, 2, most or 64, position=position, causal=causal)), make_x()
    tokens = None if most is None else GLOBAL
    segments = np.sort(np.random.default_rng(0).integers(0, 2, (2, LENGTH)), axis=1)
    given = None if tokens is None else jnp.asarray(tokens)
    run = nnx.jit(lambda layer, x: layer(x, jnp.asarray(REAL), global_tokens=given, segment_ids=jnp.asarray(segments)))
    got, want = np.asarray(run(layer, x)), formula(layer, x, tokens=tokens, segments=segments)
    close(got[REAL], want[REAL])


def test_gradients_reach_every_projection_of_a_model():
    """In a scanned and rematerialised model, whose loss is the same as unrolled."""
    losses = []
    for scan in (True, False):
        model = EncoderClassifier(
            11, 3, LENGTH, attention=Longformer(4), num_layers=2, width=WIDTH, num_heads=HEADS, mlp_dim=8,
            global_projections=True, scan_layers=scan, remat=scan, rngs=nnx.Rngs(0),
        )  # fmt: skip
        inputs = jax.random.randint(jax.random.key(2), (2, LENGTH), 1, 11)
        loss = lambda model, inputs=inputs: jnp.square(model(inputs, global_tokens=jnp.asarray(GLOBAL))).sum()
        value, gradients = nnx.jit(nnx.value_and_grad(loss))(model)
        losses.append(value)
        for path, gradient in nnx.to_flat_state(gradients):
            if "of_global" in path and path[-1] == "kernel":
                assert np.abs(gradient[...]).max() > 0, path
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_dropout_acts_on_global_rows_too():
    layer = make(Longformer(4, num_global_tokens=1), dropout_rate=0.5)
    outs = [layer(make_x(), deterministic=False, rngs=nnx.Rngs(dropout=seed))[:, 0] for seed in (0, 1)]
    assert np.abs(outs[0] - outs[1]).max() > 1e-3
    none = make(Longformer(4, num_global_tokens=0))
    plain = MultiHeadAttention(HEADS, WIDTH, attention_fn=Longformer(4, num_global_tokens=0), rngs=nnx.Rngs(1))
    nnx.update(plain, nnx.filter_state(nnx.state(none), lambda path, _: "of_global" not in path))
    np.testing.assert_array_equal(none(make_x()), plain(make_x()))  # without global tokens they have no part


@pytest.mark.parametrize("option", ["share_qk", "qk_norm"])
def test_what_cannot_go_together_is_refused(option):
    with refuses(ValueError, "global_projections", "Longformer", "Full"):
        make(Full())
    with refuses(ValueError, "global_projections", option):
        make(Longformer(4), **{option: True})
    layer, x = make(Longformer(4, causal=True)), make_x()
    with refuses(ValueError, "global_projections", "context"):
        layer(x, context=x)
    with refuses(ValueError, "global_projections", "query_offset"):
        layer(x, query_offset=3)
    with refuses(ValueError, "global_projections"):
        layer.init_cache(2, LENGTH)
