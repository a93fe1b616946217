"""The Linen AttentionFn through the stock Linen layer."""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_nn_attention_fn import (
    BATCH,
    HAVE_PARAMS,
    HEAD_DIM,
    HEADS,
    LENGTH,
    OPS,
    PAIR_OPS,
    WIDTH,
    key_mask,
    make_x,
)
from xformer.nn.linen import AttentionFn


def make_layer(op, **kwargs):
    return nn.MultiHeadDotProductAttention(HEADS, attention_fn=AttentionFn(op=op), **kwargs)


class Project(nn.Module):
    """The stock layer's projections alone, to call an op between them by hand."""

    names: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        return [nn.DenseGeneral((HEADS, HEAD_DIM), name=name)(x) for name in self.names]


@pytest.mark.parametrize(("name", "mask_dtype"), [("bigbird", bool), ("full_shaw", jnp.float32), ("linformer", bool)])
def test_stock_layer_gives_the_op_itself(name, mask_dtype):
    x, mask, layer = make_x(), key_mask(mask_dtype), make_layer(OPS[name])
    params = layer.init(jax.random.key(0), x)["params"]
    assert ("attention_fn" in params) == (name in HAVE_PARAMS)
    names = ("query", "key", "value")
    q, k, v = Project(names).apply({"params": {name: params[name] for name in names}}, x)
    attended = OPS[name](q, k, v, mask=mask, params=params.get("attention_fn"))
    out = nn.DenseGeneral(WIDTH, axis=(-2, -1))
    expected = out.apply({"params": params["out"]}, attended)
    got = jax.jit(layer.apply)({"params": params}, x, mask=mask)
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("name", ["full_shaw", "linformer"])
def test_op_parameters_get_gradients_and_come_back_from_bytes(name):
    x, layer = make_x(), make_layer(OPS[name])
    variables = layer.init(jax.random.key(0), x)
    grads = jax.jit(jax.grad(lambda v: jnp.sum(layer.apply(v, x, mask=key_mask()) ** 2)))(variables)
    for grad in jax.tree.leaves(grads["params"]["attention_fn"]):
        assert np.isfinite(grad).all() and np.abs(grad).max() > 0
    blank = layer.init(jax.random.key(1), x)
    restored = flax.serialization.from_bytes(blank, flax.serialization.to_bytes(variables))
    np.testing.assert_array_equal(layer.apply(restored, x), layer.apply(variables, x))


@pytest.mark.parametrize("name", ("linformer", "window_music"))
def test_parameters_made_at_one_length_serve_another(name):
    x, layer = make_x(), make_layer(OPS[name])
    variables = layer.init(jax.random.key(0), x)
    assert layer.apply(variables, x[:, :5]).shape == (BATCH, 5, WIDTH)
    with pytest.raises(ValueError, match="max_len=8"):
        AttentionFn(op=OPS[name], max_len=8).init(jax.random.key(0), *[jnp.ones((1, 4, HEADS, HEAD_DIM))] * 3)


class TwoLayers(nn.Module):
    """One AttentionFn in two layers."""

    def setup(self):
        self.attention_fn = AttentionFn(op=OPS["linformer"])
        self.first = nn.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn)
        self.second = nn.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn)

    def __call__(self, x):
        return self.second(self.first(x))


class Compact(nn.Module):
    """Two layers with an AttentionFn each, of this module or of the layers."""

    owner: dict

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            attention_fn = AttentionFn(op=OPS["linformer"], **self.owner)
            x = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)(x)
        return x


def test_inside_a_compact_module_the_parameters_stand_where_the_docstring_says():
    for owner, inside in (({}, False), ({"parent": None}, True)):
        params = Compact(owner).init(jax.random.key(0), make_x())["params"]
        assert ("AttentionFn_0" in params and "AttentionFn_1" in params) == (not inside)
        assert ("attention_fn" in params["MultiHeadDotProductAttention_0"]) == inside


def test_one_attention_fn_in_two_layers_is_one_set_of_parameters():
    params = TwoLayers().init(jax.random.key(0), make_x())["params"]
    assert set(params) == {"attention_fn", "first", "second"}
    assert "attention_fn" not in params["first"] and "attention_fn" not in params["second"]


@pytest.mark.parametrize("name", ["full", "window_music"])
def test_sown_weights_are_those_of_the_pattern(name):
    x, mask, layer = make_x(), key_mask(), make_layer(PAIR_OPS[name])
    variables = layer.init(jax.random.key(0), x)
    out, sown = layer.apply(variables, x, mask=mask, sow_weights=True, mutable=["intermediates"])
    np.testing.assert_allclose(out, layer.apply(variables, x, mask=mask), atol=2e-6)
    (weights,) = sown["intermediates"]["attention_weights"]
    allowed = PAIR_OPS[name].pattern(LENGTH, LENGTH, HEADS) & np.asarray(mask)
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(allowed, weights.shape))
    if name == "full":
        stock = nn.MultiHeadDotProductAttention(HEADS)
        _, sown = stock.apply(variables, x, mask=mask, sow_weights=True, mutable=["intermediates"])
        np.testing.assert_allclose(weights, sown["intermediates"]["attention_weights"][0], atol=1e-6)


def test_sowing_needs_token_pairs():
    with pytest.raises(NotImplementedError, match="token pair"):
        make_layer(OPS["linformer"]).init(jax.random.key(0), make_x(), sow_weights=True)


def test_decoding_step_by_step_equals_the_causal_forward():
    x, layer = make_x(), make_layer(OPS["full"], decode=True)
    variables = layer.init(jax.random.key(0), x)
    causal = make_layer(OPS["full"]).apply({"params": variables["params"]}, x, mask=nn.make_causal_mask(x[..., 0]))
    step = jax.jit(lambda variables, x_t: layer.apply(variables, x_t, mutable=["cache"]))
    for t in range(LENGTH):
        out, cache = step(variables, x[:, t : t + 1])
        np.testing.assert_allclose(out[:, 0], causal[:, t], atol=2e-6)
        variables = {**variables, **cache}
