"""MultiHeadAttention to another sequence, and step by step with a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xformer.attention import ALiBi, BigBird, Full, Local, MusicRelative, Rotary, Shaw, T5Bias, Window
from xformer.nn import AttentionFn, MultiHeadAttention

BATCH, LENGTH, MAX_LEN, WIDTH, HEADS = 2, 14, 16, 12, 4
POSITIONS = {
    "none": None,
    "shaw": Shaw(max_distance=3),
    "t5": T5Bias(num_buckets=8, max_distance=16),
    "alibi": ALiBi(),
    "rotary": Rotary(),
    "music": MusicRelative(max_len=MAX_LEN),
}
OPS = {
    "full": Full(causal=True),
    "window": Window(left=4, right=0, causal=True),
    "local": Local(block_size=4, causal=True),
    "bigbird": BigBird(block_size=2, num_random_blocks=1, num_window_blocks=1, num_global_blocks=1, causal=True),
}


def make_layer(op, **kwargs):
    return MultiHeadAttention(HEADS, WIDTH, attention_fn=op, **{"head_dim": 6, "rngs": nnx.Rngs(1), **kwargs})


def make_x(length=LENGTH, seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, length, WIDTH))


def with_position(name, position):
    return type(OPS[name])(**{**vars(OPS[name]), "position": POSITIONS[position]})


def stepper(layer):
    graph, state = nnx.split(layer)
    step = jax.jit(lambda state, x, cache, mask=None: nnx.merge(graph, state)(x, mask, cache=cache))
    return lambda *args: step(state, *args)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("position", list(POSITIONS))
@pytest.mark.parametrize("name", list(OPS))
def test_step_by_step_gives_the_whole_sequence_at_once(name, position):
    layer, x = make_layer(with_position(name, position), num_kv_heads=2), make_x()
    whole, step = nnx.jit(lambda layer, x: layer(x))(layer, x), stepper(layer)
    cache, outputs = layer.init_cache(BATCH, MAX_LEN), []
    for start, stop in [(0, 6), *((index, index + 1) for index in range(6, LENGTH))]:
        out, cache = step(x[:, start:stop], cache)
        outputs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, atol=3e-6)
    # A window keeps what it can still see; absolute positions that have an end must all be kept.
    capacity = 4 if name in ("window", "local") and position != "music" else MAX_LEN
    assert cache.key.shape == cache.value.shape == (BATCH, capacity, 2, 6) and cache.length == LENGTH


@pytest.mark.parametrize("name", list(OPS))
def test_prompts_of_different_lengths_decode_as_each_alone(name):
    layer, x = make_layer(with_position(name, "t5")), make_x()
    whole, step, real = layer(x), stepper(layer), np.array([6, 3])
    mask = jnp.arange(6) < real[:, None]
    garbage = jnp.where(mask[:, :, None], x[:, :6], jnp.nan)  # what is not real is forgotten, whatever it holds
    out, cache = step(garbage, layer.init_cache(BATCH, MAX_LEN), mask)
    np.testing.assert_allclose(out[1, :3], whole[1, :3], atol=3e-6)
    for index in range(5):
        tokens = jnp.stack([x[row, real[row] + index] for row in range(BATCH)])[:, None]
        out, cache = step(tokens, cache)
        for row in range(BATCH):
            np.testing.assert_allclose(out[row, 0], whole[row, real[row] + index], atol=3e-6)
    np.testing.assert_array_equal(cache.length, real + 5)


@pytest.mark.parametrize("name", ["full", "window"])
def test_tokens_beyond_the_cache_are_refused_or_nan(name):
    layer, x = make_layer(OPS[name]), make_x(6)
    cache = layer.init_cache(BATCH, 5)
    with pytest.raises(ValueError, match=r"cache: 0 \+ 6 tokens, made for max_len 5"):
        layer(x, cache=cache)
    out, _ = stepper(layer)(x, cache)
    assert np.isfinite(out[:, :5]).all() and np.isnan(out[:, 5]).all()


def test_what_a_cache_can_not_serve_is_said():
    x, layer = make_x(), make_layer(OPS["full"])
    cache = layer.init_cache(BATCH, MAX_LEN)
    for kwargs, names in (
        ({"context": x}, "context"),
        ({"query_offset": 3}, "query_offset"),
        ({"segment_ids": jnp.zeros((BATCH, LENGTH), int), "query_offset": 3}, "segment_ids, query_offset"),
    ):
        with pytest.raises(ValueError, match=f"a call with a cache takes no {names}$"):
            layer(x, cache=cache, **kwargs)
    with pytest.raises(ValueError, match="a cache needs a causal op, got Window"):
        make_layer(Window(left=2, right=2)).init_cache(BATCH, MAX_LEN)
    with pytest.raises(ValueError, match=r"needs an xformer\.attention op as attention_fn"):
        make_layer(nnx.dot_product_attention).init_cache(BATCH, MAX_LEN)


def test_a_cache_has_the_dtype_of_the_layer_and_one_shape_for_all_steps():
    layer = make_layer(OPS["window"], dtype=jnp.bfloat16)
    cache, x = layer.init_cache(BATCH, MAX_LEN), make_x()

    def body(cache, token):
        out, cache = layer(token[:, None], cache=cache)
        return cache, out[:, 0]

    cache, outputs = jax.lax.scan(body, cache, jnp.moveaxis(x, 1, 0))
    assert cache.key.dtype == outputs.dtype == jnp.bfloat16
    np.testing.assert_allclose(jnp.moveaxis(outputs, 0, 1).astype(jnp.float32), layer(x).astype(jnp.float32), atol=0.03)


def test_keys_and_values_of_another_sequence_with_its_own_mask():
    layer, x, context = make_layer(Full()), make_x(5), make_x(9, seed=1)
    mask = jnp.arange(9) < jnp.array([[9], [4]])
    out = layer(x, mask, context=context)
    expected = Full()(layer.query(x), layer.key(context), layer.value(context), mask=mask[:, None, None])
    np.testing.assert_allclose(out, layer.out(expected), atol=1e-6)
    np.testing.assert_allclose(layer(x[1:], context=context[1:, :4]), out[1:], atol=2e-6)
    moved = layer(x, mask, context=context.at[1, 6].set(jnp.nan))
    np.testing.assert_array_equal(moved, out)


def test_positions_of_another_sequence_need_an_offset():
    layer, x, context = make_layer(Window(left=2, right=2)), make_x(5), make_x(9, seed=1)
    with pytest.raises(ValueError, match="give query_offset"):
        layer(x, context=context)
    out = layer(x, context=context, query_offset=3)
    np.testing.assert_allclose(layer(x[:, 1:2], context=context[:, 2:7], query_offset=2), out[:, 1:2], atol=2e-6)


def test_segments_do_not_see_each_other():
    layer, x = make_layer(Full()), make_x(8)
    segments = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 2, 2]])
    out = layer(x, segment_ids=segments)
    np.testing.assert_allclose(out[:1, :3], layer(x[:1, :3]), atol=2e-6)
    np.testing.assert_allclose(out[1:, 6:], layer(x[1:, 6:]), atol=2e-6)


def test_head_dim_apart_from_the_width():
    layer = make_layer(Full(position=Shaw(max_distance=2)), head_dim=5, num_kv_heads=2)
    assert layer.query.kernel.shape == (WIDTH, HEADS, 5) and layer.value.kernel.shape == (WIDTH, 2, 5)
    assert layer.out.kernel.shape == (HEADS, 5, WIDTH)
    assert isinstance(layer.attention_fn, AttentionFn) and layer.attention_fn.params["position"]["key"].shape == (5, 5)
    assert layer(make_x()).shape == (BATCH, LENGTH, WIDTH)
    stock = nnx.MultiHeadAttention(HEADS, WIDTH, qkv_features=HEADS * 5, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0))
    plain = make_layer(Full(), head_dim=5, num_kv_heads=2)
    nnx.update(stock, nnx.state(plain, nnx.Param))
    np.testing.assert_allclose(plain(make_x()), stock(make_x()), atol=2e-6)
    assert make_layer(Full(), head_dim=None).query.kernel.shape == (WIDTH, HEADS, WIDTH // HEADS)
    with pytest.raises(ValueError, match="num_heads must divide width, got num_heads=4 and width=10; or give head_dim"):
        MultiHeadAttention(4, 10, attention_fn=Full(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="head_dim must be an integer of at least 1, got 0"):
        make_layer(Full(), head_dim=0)
