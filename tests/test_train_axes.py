"""Attention, scanned layers and recomputation on every pair of mesh axes: the losses of one device, dropout on."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from train_fake import LENGTH, VOCAB, compile_cache, make_trainer  # noqa: F401

from xformer.attention import BigBird
from xformer.models import EncoderClassifier
from xformer.train.settings import AXES

pytestmark = pytest.mark.usefixtures("compile_cache")
OP = BigBird(block_size=1, num_random_blocks=1, num_global_blocks=1)
MODEL = {"num_layers": 2, "width": 8, "num_heads": 4, "mlp_dim": 8, "scan_layers": True, "remat": True}


def losses(workdir, mesh):
    """Losses and gradient norms of two steps, and the loss of an evaluation batch."""
    trainer = make_trainer(workdir, mesh=mesh)
    rates = {"dropout_rate": 0.2, "attention_dropout_rate": 0.2}
    make = lambda rngs: EncoderClassifier(VOCAB, 2, LENGTH, attention=OP, **MODEL, **rates, rngs=rngs)
    engine = dataclasses.replace(trainer, model_fn=make)._engine()
    state, batches, found = engine.init(), engine.train_batches(trainer.data, 0), []
    for _ in range(2):
        state, report = engine.step(state, next(batches))
        found += [report["sums"]["loss"][0], report["health"]["grad_norm"]]
    found.append(engine.evaluate((state.params, state.rest), trainer.data, "test")["loss"])
    return state, [float(x) for x in found]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, compile_cache):  # noqa: F811
    return losses(tmp_path_factory.mktemp("one"), {"data": 1})[1]


@pytest.mark.parametrize("axes", [("data",), *itertools.combinations(AXES, 2)], ids="-".join)
def test_the_losses_of_one_device(tmp_path, one_device, axes):
    mesh = {"data": 8} if axes == ("data",) else {axes[0]: 4, axes[1]: 2}
    state, found = losses(tmp_path, mesh)
    np.testing.assert_allclose(found, one_device, rtol=2e-5)
    cut = {axis for leaf in jax.tree.leaves(state.params) for axis in jax.tree.leaves(tuple(leaf.sharding.spec))}
    assert cut & set(axes) == set(axes) & {"fsdp", "tensor"}
