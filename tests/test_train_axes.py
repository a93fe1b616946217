"""Attention and scanned layers on every pair of mesh axes: the losses of one device, dropout on."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_fake import LENGTH, VOCAB, compile_cache, make_trainer  # noqa: F401

from xformer.attention import BigBird
from xformer.models import EncoderClassifier
from xformer.train import Diverged
from xformer.train.settings import AXES

pytestmark = pytest.mark.usefixtures("compile_cache")
OP = BigBird(block_size=1, num_random_blocks=1, num_global_blocks=1)


def make_model(rngs, **kwargs):
    options = {"num_layers": 2, "width": 8, "num_heads": 4, "mlp_dim": 8, "scan_layers": True} | kwargs
    return EncoderClassifier(VOCAB, 2, LENGTH, attention=OP, **options, rngs=rngs)


def losses(workdir, mesh, **kwargs):
    """The parameters after two steps; the losses and gradient norms of the steps, and the loss of an evaluation."""
    make = lambda rngs: make_model(rngs, dropout_rate=0.2, attention_dropout_rate=0.2, **kwargs)
    trainer = dataclasses.replace(make_trainer(workdir, mesh=mesh), model_fn=make)
    engine = trainer.engine
    state, batches, found = engine.init(), engine.train_batches(trainer.data, 0), []
    for _ in range(2):
        state, report = engine.step(state, next(batches))
        found += [report["sums"]["loss"][0], report["health"]["grad_norm"]]
    found.append(engine.evaluate((state.params, state.rest), trainer.data, "test")["loss"])
    return state.params, [float(x) for x in found]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, compile_cache):  # noqa: F811
    return losses(tmp_path_factory.mktemp("one"), {"data": 1})[1]


@pytest.mark.full
@pytest.mark.parametrize("axes", [("data",), *itertools.combinations(AXES, 2)], ids="-".join)
def test_the_losses_of_one_device(tmp_path, one_device, axes):
    mesh = {"data": 8} if axes == ("data",) else {axes[0]: 4, axes[1]: 2}
    params, found = losses(tmp_path, mesh)
    np.testing.assert_allclose(found, one_device, rtol=2e-5)
    cut = {axis for leaf in jax.tree.leaves(params) for axis in jax.tree.leaves(tuple(leaf.sharding.spec))}
    assert cut & set(axes) == set(axes) & {"fsdp", "tensor"}


@pytest.mark.full
def test_bfloat16_on_a_mesh_keeps_float32_parameters(tmp_path, one_device):
    params, found = losses(tmp_path, {"fsdp": 2, "sequence": 2}, dtype=jnp.bfloat16)
    np.testing.assert_allclose(found, one_device, rtol=0.05)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}


@pytest.mark.full
def test_the_layer_of_a_nan_is_named_on_a_mesh(tmp_path):
    """Scanned, recomputed, in micro-batches: still the first layer where it appears."""

    def make(rngs):
        model = make_model(rngs, remat=True)
        kernel = model.blocks.feed_forward.expand.kernel
        kernel[...] = kernel[...].at[1].set(jnp.inf)
        return model

    trainer = make_trainer(tmp_path, mesh={"data": 2, "tensor": 2}, accumulate=2)
    with pytest.raises(
        Diverged, match=r"at step 1; .*first seen in the output of blocks/1/feed_forward/expand \(Linear\)"
    ):
        dataclasses.replace(trainer, model_fn=make).fit()
