"""The convolutional baseline: what it gives and refuses, that its FLOPs are counted, and that it has no attention."""

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xformer import comparison, cost, experiment
from xformer.config import read
from xformer.models import ConvNet
from xformer.schema import ConfigError


def make(**options):
    return ConvNet(5, 12, 8, 3, **{"widths": (4, 6), "num_blocks": 2, "rngs": nnx.Rngs(0), **options})


def images(batch=2):
    return jax.random.normal(jax.random.key(0), (batch, 12, 8, 3))


def test_an_examples_logits_are_its_own():
    run = nnx.jit(lambda model, x: model(x))
    model, x = make(), images(3)
    logits = run(model, x)
    assert logits.shape == (3, 5) and logits.dtype == jnp.float32
    np.testing.assert_allclose(run(model, x[1:2]), logits[1:2], atol=1e-5)


def test_its_flops_are_those_of_its_products():
    """Two blocks of two convolutions a stage, the stem, one of stride 2 and the last layer: 2 a multiply-add.

    Products with the zeros around an image are counted.
    """
    model = make()
    places, halved, around = 12 * 8, 6 * 4, 9
    convolutions = places * around * (3 * 4 + 4 * 4 * 4) + halved * around * (4 * 6 + 4 * 6 * 6)
    assert cost.count(lambda x: model(x), images(1)).flops == 2 * (convolutions + 6 * 5)


def test_about_the_flops_of_the_vision_transformer_beside_it():
    """The comparison in configs/compare_images.py is at equal compute."""

    def flops(arg):
        built = experiment.build(read(f"configs/images.py:{arg}"))
        model = nnx.eval_shape(lambda: built.model_fn(**built.task.sizes())(nnx.Rngs(0)))
        graph, state = nnx.split(model)
        return cost.count(lambda state, x: nnx.merge(graph, state)(x), state, jnp.zeros((1, *built.task.shape))).flops

    assert 0.9 < flops("convnet") / flops("full") < 1.1


def test_the_comparison_has_the_convolutional_network_beside_the_variants():
    part = comparison.load_comparison("configs/compare_images.py", ["train.num_steps=10"])
    runs = {variant: run for variant, seed, run in comparison.comparison_runs(part) if seed == 0}
    assert part.seeds == (0, 1, 2) and {"full", "shaw_2d", "bigbird", "linformer", "convnet"} <= runs.keys()
    assert runs["convnet"].model == experiment.build(read("configs/images.py:convnet")).config.model
    assert {variant for variant, run in runs.items() if run.model != runs["full"].model} == {"convnet"}


def test_it_has_no_attention():
    config = read("configs/images.py:convnet")
    built = experiment.build(config)
    assert built.attention is None and experiment.build(built.config).config == built.config
    with conformance.refuses(ConfigError, "attention: got 'full'", "convnet has no attention"):
        experiment.build({**config, "attention": {"name": "full"}})


@pytest.mark.parametrize(
    ("given", "words"),
    [({"widths": ()}, ["widths", "()"]), ({"widths": (4, 0)}, ["widths[1]", "0"]), ({"num_blocks": 0}, ["num_blocks"]),
     ({"dropout_rate": 1.5}, ["dropout_rate", "1.5"])],
)  # fmt: skip
def test_refuses(given, words):
    with conformance.refuses(ValueError, *words):
        make(**given)


def test_refuses_other_images():
    with conformance.refuses(ValueError, "images must be floats [batch, 12, 8, 3]", "uint8"):
        make()(jnp.zeros((2, 12, 8, 3), jnp.uint8))
