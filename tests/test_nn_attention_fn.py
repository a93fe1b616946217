"""AttentionFn through the stock NNX layer: same numbers as the op, its parameters trained, nothing dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xformer.attention import BigBird, Full, Linformer, MusicRelative, Shaw, T5Bias, Window
from xformer.nn import AttentionFn

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 11, 4, 6
WIDTH = HEADS * HEAD_DIM
BIGBIRD = BigBird(block_size=2, num_random_blocks=1, num_window_blocks=3, num_global_blocks=2)
PAIR_OPS = {
    "full": Full(),
    "window": Window(left=2, right=3),
    "bigbird": BIGBIRD,
    "full_shaw": Full(position=Shaw(max_distance=3, values=True)),
    "window_music": Window(left=3, right=2, position=MusicRelative(max_len=16)),
    "bigbird_t5": BigBird(block_size=2, num_random_blocks=1, position=T5Bias(num_buckets=8, max_distance=16)),
}
OPS = {**PAIR_OPS, "linformer": Linformer(rank=3, max_len=16)}
HAVE_PARAMS = ("full_shaw", "window_music", "bigbird_t5", "linformer")


def make_layer(op, seed=0, num_kv_heads=None, **kwargs):
    fn = AttentionFn(op, num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=num_kv_heads, rngs=nnx.Rngs(seed))
    kwargs = {"decode": False, "num_kv_heads": num_kv_heads, "rngs": nnx.Rngs(seed + 1), **kwargs}
    return nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=fn, **kwargs)


def make_x(seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, LENGTH, WIDTH))


def key_mask(dtype=bool):
    lengths = np.array([LENGTH, 7])
    return jnp.asarray(np.arange(LENGTH) < lengths[:, None], dtype)[:, None, None, :]


def own_params(fn):
    return nnx.to_pure_dict(nnx.state(fn)).get("params", {})


@pytest.mark.parametrize(("num_kv_heads", "mask_dtype"), [(None, jnp.float32), (2, bool)])
@pytest.mark.parametrize("name", ["bigbird", "full_shaw", "linformer"])
def test_stock_layer_gives_the_op_itself(name, num_kv_heads, mask_dtype):
    x, mask = make_x(), key_mask(mask_dtype)
    layer = make_layer(OPS[name], num_kv_heads=num_kv_heads)
    params = own_params(layer.attention_fn)
    assert bool(params) == (name in HAVE_PARAMS)
    expected = layer.out(OPS[name](layer.query(x), layer.key(x), layer.value(x), mask=mask, params=params))
    got = nnx.jit(lambda layer, x, mask: layer(x, mask=mask))(layer, x, mask)
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("name", ["window_music", "linformer"])
def test_every_parameter_gets_a_gradient(name):
    x, layer = make_x(), make_layer(OPS[name])
    grads = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(x, mask=key_mask()) ** 2)))(layer)
    for path, grad in nnx.to_flat_state(grads):
        assert np.isfinite(grad[...]).all(), path
        # A key bias adds the same to all scores of a query unless position terms read it; it may have no gradient.
        assert path == ("key", "bias") or np.abs(grad[...]).max() > 0, path


@pytest.mark.parametrize("name", ["full_shaw", "linformer"])
def test_saved_parameters_come_back(name):
    x, layer, fresh = make_x(), make_layer(OPS[name]), make_layer(OPS[name], seed=7)
    saved = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    assert jax.tree.leaves(saved["attention_fn"])
    assert np.abs(fresh(x) - layer(x)).max() > 1e-3
    state = nnx.state(fresh, nnx.Param)
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(fresh, state)
    np.testing.assert_array_equal(fresh(x), layer(x))


def test_one_attention_fn_in_two_layers_is_one_set_of_parameters():
    x = make_x()
    fn = AttentionFn(OPS["linformer"], num_heads=HEADS, head_dim=HEAD_DIM, rngs=nnx.Rngs(0))
    layers = nnx.List(
        nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=fn, decode=False, rngs=nnx.Rngs(i)) for i in (1, 2)
    )

    def loss(layers):
        return jnp.sum(layers[1](layers[0](x)) ** 2)

    grads = nnx.jit(nnx.grad(loss))(layers)
    assert jax.tree.leaves(grads[0]["attention_fn"]) and "attention_fn" not in grads[1]
    before = loss(layers)
    nnx.update(layers, jax.tree.map(lambda p, g: p - 1e-3 * g, nnx.state(layers, nnx.Param), grads))
    assert layers[0].attention_fn is layers[1].attention_fn
    assert loss(layers) < before


def test_causal_flag_reaches_the_op():
    x = make_x()
    for name in ("window", "full_shaw"):
        layer = make_layer(OPS[name])
        moved = layer(x.at[:, 6].add(1.0), is_causal=True) - layer(x, is_causal=True)
        assert (moved[:, :6] == 0).all() and np.abs(moved[:, 6]).max() > 0, name
    with pytest.raises(NotImplementedError):
        make_layer(OPS["linformer"])(x, is_causal=True)


def test_half_precision_follows_the_layer():
    x = make_x()
    for name in ("full_shaw", "linformer"):
        out = make_layer(OPS[name], dtype=jnp.float16)(x, mask=key_mask())
        assert out.dtype == jnp.float16, name
        np.testing.assert_allclose(out.astype(jnp.float32), make_layer(OPS[name])(x, mask=key_mask()), atol=0.02)


def test_decoding_step_by_step_equals_the_causal_forward():
    x, layer = make_x(), make_layer(Full())
    expected = layer(x, is_causal=True)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x_t: layer(x_t, decode=True))
    for t in range(LENGTH):
        np.testing.assert_allclose(step(layer, x[:, t : t + 1])[:, 0], expected[:, t], atol=2e-6)


def test_decoding_is_refused_by_a_held_op_that_needs_the_query_position():
    x, layer = make_x(), make_layer(OPS["full_shaw"])
    layer.init_cache(x.shape)
    with pytest.raises(ValueError, match="query_offset"):
        layer(x[:, :1], decode=True)


def sown(layer, x, **kwargs):
    out, sown = nnx.capture(layer, nnx.Intermediate)(x, sow_weights=True, **kwargs)
    (weights,) = sown["attention_weights"].get_value()
    return out, weights


@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_sown_weights_are_those_that_flax_sows(num_kv_heads):
    x, mask = make_x(), key_mask()
    layer = make_layer(Full(), num_kv_heads=num_kv_heads)
    out, weights = sown(layer, x, mask=mask)
    np.testing.assert_array_equal(out, layer(x, mask=mask))
    layer.attention_fn = nnx.dot_product_attention
    np.testing.assert_allclose(weights, sown(layer, x, mask=mask)[1], atol=1e-6)


@pytest.mark.parametrize("name", ["window", "full_shaw", "bigbird_t5"])
def test_sown_weights_are_those_of_the_pattern_and_give_the_output(name):
    op, x, mask = PAIR_OPS[name], make_x(), key_mask()
    layer = make_layer(op, num_kv_heads=2)
    out, weights = sown(layer, x, mask=mask)
    np.testing.assert_allclose(out, layer(x, mask=mask), atol=2e-6)
    assert weights.shape == (BATCH, HEADS, LENGTH, LENGTH)
    allowed = op.pattern(LENGTH, LENGTH, HEADS) & np.asarray(mask)
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(allowed, weights.shape))
    np.testing.assert_allclose(weights.sum(-1), allowed.any(-1) * np.ones((BATCH, HEADS, LENGTH)), atol=1e-5)
    if name != "full_shaw":  # whose output has a term without the values
        value = jnp.repeat(layer.value(x), 2, axis=-2)
        np.testing.assert_allclose(layer.out(jnp.einsum("bhqk,bkhd->bqhd", weights, value)), out, atol=5e-6)


def test_sown_weights_come_before_dropout_and_need_token_pairs():
    x, layer = make_x(), make_layer(Full(), dropout_rate=0.5, keep_rngs=False)
    _, weights = sown(layer, x, deterministic=False, rngs=nnx.Rngs(dropout=0))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    with pytest.raises(NotImplementedError, match="token pair"):
        sown(make_layer(OPS["linformer"]), x)


def test_explicit_arguments_reach_the_op():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 5, HEADS, HEAD_DIM)) for i in range(3))
    op = OPS["full_shaw"]
    fn = AttentionFn(op, num_heads=HEADS, head_dim=HEAD_DIM, rngs=nnx.Rngs(0))
    params = jax.tree.map(lambda p: 2 * p, own_params(fn))
    options = {
        "bias": jax.random.normal(jax.random.key(3), (1, 1, 1, 5)),
        "segment_ids": jnp.array([[0, 0, 0, 1, 1]]),
        "query_offset": 0,
        "scale": 0.3,
        "is_causal": True,
    }
    np.testing.assert_array_equal(fn(q, k, v, params=params, **options), op(q, k, v, params=params, **options))
    for name, option in options.items():
        without = {key: value for key, value in options.items() if key != name}
        if name != "query_offset":
            assert np.abs(fn(q, k, v, **options) - fn(q, k, v, **without)).max() > 1e-4, (name, option)
    assert np.abs(fn(q, k, v, params=params) - fn(q, k, v)).max() > 1e-4


def test_sizes_are_needed_only_where_there_are_parameters():
    assert not jax.tree.leaves(nnx.state(AttentionFn(BIGBIRD)))
    for name in HAVE_PARAMS:
        for missing in ("num_heads", "head_dim", "rngs"):
            kwargs = {"num_heads": HEADS, "head_dim": HEAD_DIM, "rngs": nnx.Rngs(0)}
            del kwargs[missing]
            with pytest.raises(ValueError, match=f"{missing}=None"):
                AttentionFn(OPS[name], **kwargs)


def test_the_op_knows_its_max_len():
    kwargs = {"num_heads": HEADS, "head_dim": HEAD_DIM, "rngs": nnx.Rngs(0)}
    for name in ("linformer", "window_music"):
        shapes = [jax.tree.map(jnp.shape, own_params(AttentionFn(OPS[name], max_len=n, **kwargs))) for n in (None, 16)]
        assert shapes[0] == shapes[1]
        with pytest.raises(ValueError, match="max_len=8"):
            AttentionFn(OPS[name], max_len=8, **kwargs)


def test_what_is_no_op_is_refused():
    with pytest.raises(ValueError, match="op must be"):
        AttentionFn(nnx.dot_product_attention)
