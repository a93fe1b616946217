"""The NNX layers: each against its formula or against Flax's own layer with the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xformer.attention import Full, Linformer, Shaw, Window
from xformer.nn import (
    AttentionFn,
    EncoderBlock,
    FeedForward,
    LearnedPositions,
    MultiHeadAttention,
    SinusoidalPositions,
    TokenEmbedding,
    masked_mean,
)
from xformer.nn.norm import LayerNorm

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 12, 4


def make_x(seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, LENGTH, WIDTH))


MASK = jnp.arange(LENGTH) < jnp.array([[LENGTH], [4]])


@pytest.mark.parametrize("num_kv_heads", [None, 2])
@pytest.mark.parametrize(
    "attention_fn", [Full(), AttentionFn(Full()), nnx.dot_product_attention], ids=["op", "module", "flax"]
)
def test_multi_head_attention_equals_flax_with_the_same_parameters(attention_fn, num_kv_heads):
    kwargs = {"num_kv_heads": num_kv_heads, "rngs": nnx.Rngs(1)}
    layer = MultiHeadAttention(HEADS, WIDTH, attention_fn=attention_fn, **kwargs)
    stock = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **kwargs)
    nnx.update(stock, nnx.state(layer, nnx.Param))
    x = make_x()
    np.testing.assert_allclose(layer(x, MASK), stock(x, mask=MASK[:, None, None]), atol=2e-6)
    np.testing.assert_allclose(layer(x), stock(x), atol=2e-6)


def test_multi_head_attention_shares_a_given_module_and_wraps_a_bare_op():
    op = Linformer(rank=2, max_len=8)
    fn = AttentionFn(op, num_heads=HEADS, head_dim=3, rngs=nnx.Rngs(0))
    layers = [MultiHeadAttention(HEADS, WIDTH, attention_fn=a, rngs=nnx.Rngs(1)) for a in (fn, fn, op, op)]
    assert layers[0].attention_fn is layers[1].attention_fn
    assert isinstance(layers[2].attention_fn, AttentionFn)
    assert layers[2].attention_fn is not layers[3].attention_fn
    assert jax.tree.leaves(nnx.state(layers[2].attention_fn, nnx.Param))


def test_multi_head_attention_refuses_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="num_heads must divide width, got num_heads=5 and width=12"):
        MultiHeadAttention(5, WIDTH, attention_fn=Full(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads"):
        MultiHeadAttention(HEADS, WIDTH, attention_fn=Full(), num_kv_heads=3, rngs=nnx.Rngs(0))


def test_attention_dropout_differs_between_examples_and_needs_rngs():
    layer = MultiHeadAttention(HEADS, WIDTH, attention_fn=Full(), dropout_rate=0.5, rngs=nnx.Rngs(0))
    x = jnp.broadcast_to(make_x()[:1], (BATCH, LENGTH, WIDTH))
    out = layer(x, deterministic=False, rngs=nnx.Rngs(dropout=0))
    assert np.abs(out[0] - out[1]).max() > 1e-3
    np.testing.assert_array_equal(layer(x)[0], layer(x)[1])
    with pytest.raises(ValueError, match="needs rngs"):
        layer(x, deterministic=False)


def test_no_bias_means_no_bias():
    layer = MultiHeadAttention(HEADS, WIDTH, attention_fn=Full(), use_bias=False, rngs=nnx.Rngs(0))
    assert {path[-1] for path, _ in nnx.to_flat_state(nnx.state(layer))} == {"kernel"}
    np.testing.assert_array_equal(layer(jnp.zeros((1, 3, WIDTH))), 0)


def test_feed_forward_is_its_formula_at_every_position():
    layer, x = FeedForward(WIDTH, 20, rngs=nnx.Rngs(0)), make_x()
    hidden = jax.nn.gelu(x @ layer.expand.kernel[...] + layer.expand.bias[...])
    np.testing.assert_allclose(layer(x), hidden @ layer.contract.kernel[...] + layer.contract.bias[...], atol=2e-6)
    moved = layer(x.at[:, 2].add(1.0)) - layer(x)
    np.testing.assert_array_equal(np.abs(moved).max(axis=(0, 2)) > 0, np.arange(LENGTH) == 2)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_block_is_its_formula(norm):
    block = EncoderBlock(
        WIDTH, HEADS, 20, attention_fn=Full(position=Shaw(max_distance=2)), norm=norm, rngs=nnx.Rngs(0)
    )
    x = make_x()
    first, second = block.attention_norm, block.feed_forward_norm
    if norm == "pre":
        middle = x + block.attention(first(x), MASK)
        expected = middle + block.feed_forward(second(middle))
    else:
        middle = first(x + block.attention(x, MASK))
        expected = second(middle + block.feed_forward(middle))
    np.testing.assert_allclose(block(x, MASK), expected, atol=1e-6)
    if norm == "post":
        np.testing.assert_allclose(block(x, MASK).mean(-1), 0, atol=1e-5)
        np.testing.assert_allclose(block(x, MASK).std(-1), 1, atol=1e-3)


def test_block_refuses_an_unknown_norm():
    with pytest.raises(ValueError, match="norm must be 'pre' or 'post', got 'rms'"):
        EncoderBlock(WIDTH, HEADS, 20, attention_fn=Full(), norm="rms", rngs=nnx.Rngs(0))


def test_block_dropout_acts_on_both_branches():
    block = EncoderBlock(WIDTH, HEADS, 20, attention_fn=Window(left=1, right=1), dropout_rate=0.5, rngs=nnx.Rngs(0))
    out = block(make_x(), deterministic=False, rngs=nnx.Rngs(dropout=0))
    assert np.abs(out - block(make_x())).max() > 1e-2
    np.testing.assert_array_equal(out, block(make_x(), deterministic=False, rngs=nnx.Rngs(dropout=0)))


def test_sinusoidal_positions_are_those_of_the_paper():
    table = SinusoidalPositions(6)(50)
    assert table.dtype == np.float32
    for position in (0, 1, 49):
        angles = [position / 10000 ** (2 * i / 6) for i in range(3)]
        expected = [f(angle) for angle in angles for f in (np.sin, np.cos)]
        np.testing.assert_allclose(table[position], expected, atol=1e-6)
    np.testing.assert_array_equal(SinusoidalPositions(5)(20), SinusoidalPositions(5)(50)[:20])


def test_learned_positions_end_at_max_len():
    positions = LearnedPositions(5, WIDTH, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(positions(3), positions(5)[:3])
    table = LearnedPositions(500, 64, rngs=nnx.Rngs(0))(500)
    np.testing.assert_allclose(table.std(), 1, atol=0.02)
    with pytest.raises(ValueError, match="at most max_len 5, got 6"):
        positions(6)


def test_embedded_tokens_have_unit_variance_and_the_compute_dtype():
    embed = TokenEmbedding(500, 64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    out = embed(jnp.arange(500)[None])
    assert out.dtype == jnp.bfloat16 and out.shape == (1, 500, 64) and embed.table.dtype == jnp.float32
    np.testing.assert_allclose(out.astype(jnp.float32).std(), 1, atol=0.02)
    assert np.isnan(embed(jnp.array([500]))).all()


def test_masked_mean_counts_real_tokens_only():
    x, mask = make_x(), MASK.at[1].set(False)
    np.testing.assert_allclose(masked_mean(x, MASK)[1], x[1, :4].mean(0), atol=1e-6)
    np.testing.assert_allclose(masked_mean(x, None), x.mean(1), atol=1e-6)
    np.testing.assert_array_equal(masked_mean(x, mask)[1], 0)


def test_layer_norm_keeps_a_small_variance_about_a_large_mean():
    x = jnp.array([1449, 1449.25, 1449.5, 1449.75])
    expected = np.array([-1.342, -0.447, 0.447, 1.342])
    norm = LayerNorm(4, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(norm(x), expected, atol=1e-3)
    np.testing.assert_allclose(jax.jit(norm)(x), expected, atol=1e-3)
    gradient = jax.grad(lambda x: jnp.sum(norm(x) * jnp.arange(4.0)))(x)
    exact = jax.grad(lambda x: jnp.sum((x - x.mean()) / jnp.sqrt(x.var() + 1e-6) * jnp.arange(4.0)))(x - 1449)
    np.testing.assert_allclose(gradient, exact, atol=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [jnp.array([-1, -100, 257, 2**31 - 1]), np.array([-1, 2**32 + 1, -(2**40) + 3, 2**63 - 1])],
    ids=["32", "64"],
)
def test_every_id_out_of_range_is_nan_and_moves_no_gradient(wrong):
    embed = TokenEmbedding(257, 4, rngs=nnx.Rngs(0))
    assert np.isnan(embed(wrong)).all()
    right = np.isfinite(embed(np.array([0, 256], wrong.dtype)))
    assert right.all()
    graph, state = nnx.split(embed)
    gradient = jax.grad(lambda state: jnp.nansum(nnx.merge(graph, state)(wrong)))(state)
    assert not np.any(jax.tree.leaves(gradient)[0])


def test_ids_that_are_no_integers_are_refused():
    embed = TokenEmbedding(257, 4, rngs=nnx.Rngs(0))
    for wrong in (jnp.array([0.7]), np.array([True])):
        with pytest.raises(ValueError, match="tokens must be integer ids, got dtype"):
            embed(wrong)
