"""Layers that see all tokens as one axis: the same numbers, on CPUs alone, and nothing moved between devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xformer.attention import Full
from xformer.nn import EncoderBlock, tokens

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 16, 16))


def block(**options):
    made = EncoderBlock(16, 4, 24, attention_fn=Full(), num_kv_heads=2, rngs=nnx.Rngs(0), **options)
    return nnx.split(made)


def run(graph, state, x, key=None):
    """The block's output; with a key, in training."""
    training = {} if key is None else {"deterministic": False, "rngs": nnx.Rngs(dropout=key)}
    return nnx.merge(graph, state)(x, jnp.arange(x.shape[1])[None] < jnp.array([[16], [9], [16], [1]]), **training)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_one_axis_of_tokens_gives_the_same_numbers_gradients_and_dropout(norm, monkeypatch):
    graph, state = block(norm=norm, dropout_rate=0.3, attention_dropout_rate=0.2)

    def both(state, x, key):
        out, back = jax.vjp(lambda state, x: run(graph, state, x, key), state, x)
        return out, back(jnp.cos(out))

    found = {}
    for flat in (True, False):
        monkeypatch.setattr(tokens, "is_flat", lambda x, flat=flat: flat)
        traced = jax.jit(lambda *args: both(*args)).trace(state, X, KEY)
        assert ("f32[64,24]" in str(traced.jaxpr)) == flat
        found[flat] = traced.lower().compile()(state, X, KEY)
    for one, two in zip(*map(jax.tree.leaves, found.values()), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_forward_mode(monkeypatch):
    graph, state = block()
    monkeypatch.setattr(tokens, "is_flat", lambda x: True)
    layers = nnx.merge(graph, state)
    for layer in (layers.feed_forward, layers.attention.query):  # norms and attention have a derivative of their own
        out, change = jax.jvp(layer, (X,), (X,))
        step = (layer(X * 1.001) - layer(X * 0.999)) / 0.002
        assert out.shape == change.shape
        np.testing.assert_allclose(change, step, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_see_batch_and_length(platform, monkeypatch):
    """What is traced there has no array of tokens: it is what it was before there was `is_flat`."""
    graph, state = block()
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert "[64," not in str(jax.make_jaxpr(lambda state, x: run(graph, state, x))(state, X))


def test_devices_that_share_out_examples_move_no_tokens():
    """What they exchange is what they do where layers keep batch and length apart."""
    assert collectives() == collectives(keep=True)


def test_sequences_that_are_cut_stay_as_they_are():
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert not tokens.is_flat(X)
    explicit = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    assert not tokens.is_flat(jax.device_put(X, NamedSharding(explicit, P("data"))))
    assert tokens.is_flat(X)


def collectives(keep=False):
    """Kinds of what devices exchange in a block's gradient, sorted, but for sums of gradients."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    graph, state = block()

    def gradient(state, x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.grad(lambda state, x: run(graph, state, x).sum(), argnums=(0, 1))(state, x)

    with pytest.MonkeyPatch.context() as patch:
        if keep:
            patch.setattr(tokens, "is_flat", lambda x: False)
        where = NamedSharding(mesh, P("data"))
        args = state, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=where)
        program = jax.jit(gradient, out_shardings=(None, where)).lower(*args).compile().as_text()
    kinds = "all-gather|all-to-all|collective-permute|reduce-scatter"
    return sorted(re.findall(rf"= \S+ ({kinds})", program))
