"""The Vision Transformer: patches, positions in two dimensions, every attention variant, refusals."""

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xformer.attention import ATTENTIONS, Layers, Shaw2D, build
from xformer.models import VisionTransformer
from xformer.nn import LearnedGrid, PatchEmbedding, SinusoidalGrid

HEIGHT, WIDTH, CHANNELS, PATCH = 12, 8, 3, 2
ROWS, COLUMNS = HEIGHT // PATCH, WIDTH // PATCH


def make(attention="full", *, position=None, pooling="mean", patch_size=PATCH, causal=False, **options):
    if isinstance(attention, str):
        section = {
            "name": attention,
            **({"position": position} if position else {}),
            **({"causal": True} if causal else {}),
        }
        attention = build(
            section, VisionTransformer.num_positions(HEIGHT * WIDTH * CHANNELS, pooling, patch_size, CHANNELS)
        )
    sizes = {"num_layers": 2, "width": 16, "num_heads": 2, "mlp_dim": 24, "rngs": nnx.Rngs(0), **options}
    return VisionTransformer(
        5, HEIGHT, WIDTH, CHANNELS, attention=attention, patch_size=patch_size, pooling=pooling, **sizes
    )


run = nnx.jit(lambda model, x: model(x))


def images(batch=2, seed=0):
    return jax.random.normal(jax.random.key(seed), (batch, HEIGHT, WIDTH, CHANNELS))


def test_patches_are_a_convolution_whose_stride_is_its_size():
    layer = PatchEmbedding(PATCH, CHANNELS, 7, rngs=nnx.Rngs(0))
    kernel = layer.projection.kernel[...].reshape(PATCH, PATCH, CHANNELS, 7)
    layout = ("NHWC", "HWIO", "NHWC")
    want = jax.lax.conv_general_dilated(images(), kernel, (PATCH, PATCH), "VALID", dimension_numbers=layout)
    np.testing.assert_allclose(layer(images()), want.reshape(2, ROWS * COLUMNS, 7), atol=1e-5)


@pytest.mark.parametrize("prefix", [0, 1])
def test_sinusoids_of_a_grid_tell_row_and_column(prefix):
    found = np.asarray(SinusoidalGrid(COLUMNS, prefix, 10)(prefix + ROWS * COLUMNS))
    assert (found[:prefix] == 0).all()

    def one(place, width):
        angles = [place / 10000 ** (2 * (i // 2) / width) for i in range(width)]
        return [np.cos(angle) if i % 2 else np.sin(angle) for i, angle in enumerate(angles)]

    for place, vector in enumerate(found[prefix:]):
        row, column = divmod(place, COLUMNS)
        np.testing.assert_allclose(vector, one(row, 5) + one(column, 5), atol=1e-6)


def test_learned_positions_of_a_grid_are_one_each():
    layer = LearnedGrid(3, 2, 1, 4, scale=False, rngs=nnx.Rngs(0))
    want = [*layer.prefix[...], *(layer.grid[row, column] for row in range(3) for column in range(2))]
    np.testing.assert_array_equal(layer(7), want)
    np.testing.assert_allclose(LearnedGrid(3, 2, 1, 4, rngs=nnx.Rngs(0))(7), 2 * layer(7), rtol=1e-6)
    with conformance.refuses(ValueError, "length must be at most 7", "8"):
        layer(8)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_variant_stands_in_its_slot(name, pooling):
    """Traced forward and backward: the gradient reaches every parameter's shape, none is missing."""
    share_qk = ATTENTIONS[name].SHARES_QK
    build_it = lambda: make(name, pooling=pooling, position_embedding="learned", share_qk=share_qk)
    graph, params, rest = nnx.split(nnx.eval_shape(build_it), nnx.Param, ...)
    loss = lambda params, rest, x: nnx.merge(graph, params, rest)(x).sum()
    found = jax.eval_shape(jax.grad(loss), params, rest, images())
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_positions_by_row_and_column_are_those_of_the_image(pooling):
    """The model's own grid is not square: what `for_length` would choose is refused, with what is right."""
    position = {"name": "shaw_2d", "columns": COLUMNS, "num_prefix_tokens": int(pooling == "cls")}
    model = make("window", position=position, pooling=pooling, position_embedding="none")
    assert jnp.isfinite(run(model, images())).all()
    for wrong, key, needed in (({"columns": 3}, "columns", COLUMNS), ({"num_prefix_tokens": 2}, "num_prefix", "class")):
        with conformance.refuses(ValueError, f"attention.position.{key}", str(needed), str(next(iter(wrong.values())))):
            make("window", position=position | wrong, pooling=pooling)
    stack = Layers((build({"name": "full"}), build({"name": "full", "position": {"name": "shaw_2d", "columns": 9}})))
    with conformance.refuses(ValueError, "attention.layers[1].position.columns must be 4"):
        make(stack, pooling=pooling)


def test_a_relative_model_knows_nothing_but_distances_in_the_grid():
    """Without absolute positions an image and its copy moved by whole patches differ, through the pooled sum, only at
    the edges; a model without any positions does not tell patches apart at all."""
    x = images(1)
    tiles = x.reshape(1, ROWS, PATCH, COLUMNS, PATCH, CHANNELS)
    shuffled = tiles[:, np.random.default_rng(0).permutation(ROWS)].reshape(x.shape)
    bag = make(position_embedding="none")
    np.testing.assert_allclose(run(bag, x), run(bag, shuffled), atol=1e-5)
    relative = make(position={"name": "shaw_2d", "columns": COLUMNS}, position_embedding="none")
    assert jnp.abs(run(relative, x) - run(relative, shuffled)).max() > 1e-3


def test_scanned_layers_equal_unrolled_ones():
    unrolled, scanned = (make("bigbird", position_embedding="learned", scan_layers=scan) for scan in (False, True))
    np.testing.assert_allclose(run(unrolled, images()), run(scanned, images()), atol=2e-5)


def test_bfloat16_stays_close_and_gives_float32():
    logits = run(make(dtype=jnp.bfloat16), images())
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, run(make(), images()), atol=0.05)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"patch_size": 3}, ["patch_size", "12", "8", "3"]),
        ({"patch_size": 0}, ["patch_size", "0"]),
        ({"pooling": "first"}, ["pooling", "'mean' or 'cls'", "'first'"]),
        ({"pooling": "cls", "causal": True}, ["pooling", "causal"]),
        ({"position_embedding": "rotary"}, ["position_embedding", "'rotary'"]),
        ({"position_embedding": "learned", "position_offset": 2}, ["position_offset must be 0", "2"]),
    ],
)
def test_refuses(given, words):
    with conformance.refuses(ValueError, *words):
        make(**given)


@pytest.mark.parametrize(
    "wrong", [jnp.zeros((2, 8, 12, 3)), jnp.zeros((2, 12, 8)), jnp.zeros((2, 12, 8, 3), jnp.uint8)]
)
def test_refuses_other_images(wrong):
    with conformance.refuses(ValueError, "images must be floats [batch, 12, 8, 3]", str(wrong.dtype)):
        make()(wrong)


def test_the_grid_of_a_square_image_is_chosen():
    for pooling in ("mean", "cls"):
        positions = VisionTransformer.num_positions(28 * 28 * 3, pooling, 4, 3)
        assert build({"name": "full", "position": "shaw_2d"}, positions).position == Shaw2D(
            columns=7, num_prefix_tokens=int(pooling == "cls"), max_distance=6
        )
