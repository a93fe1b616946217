"""The same numbers on any layout: devices, axes, jit and pmap, also across a restart."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from train_fake import compile_cache, make_trainer, rows  # noqa: F401

from xformer.attention import Full
from xformer.models import MODELS
from xformer.nn import MultiHeadAttention
from xformer.train import Interrupted, TrainConfig
from xformer.train.parallel import make_layout, partition
from xformer.tree_paths import path_name

pytestmark = pytest.mark.usefixtures("compile_cache")
STEPS = {"num_steps": 5, "log_every": 1, "eval_every": 5, "checkpoint_every": 5}


def losses(workdir):
    return [(row["loss"], row["grad_norm"], row["param_norm"]) for row in rows(workdir, "train")]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, compile_cache):  # noqa: F811
    """Losses and norms of five steps on one device, without and with dropout."""
    found = {}
    for rate in (0.0, 0.2):
        workdir = tmp_path_factory.mktemp("one-device")
        make_trainer(workdir, dropout_rate=rate, **STEPS).fit()
        found[rate] = losses(workdir)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("parallel", "mesh", "accumulate", "dropout_rate"),
    [
        ("jit", {"data": -1}, 1, 0.2),
        ("jit", {"data": 4, "fsdp": 2}, 1, 0.2),
        ("jit", {"fsdp": 2, "tensor": 4}, 1, 0.2),
        ("jit", {"data": 4, "sequence": 2}, 1, 0.2),
        ("jit", {"data": 2, "fsdp": 2}, 2, 0.0),
        ("pmap", {"data": -1}, 1, 0.0),
        ("pmap", {"data": 2}, 4, 0.0),
    ],
)
def test_same_losses_on_every_layout(tmp_path, one_device, parallel, mesh, accumulate, dropout_rate):
    settings = {"parallel": parallel, "mesh": mesh, "accumulate": accumulate, "dropout_rate": dropout_rate}
    make_trainer(tmp_path, **settings, **STEPS).fit()
    np.testing.assert_allclose(losses(tmp_path), one_device[dropout_rate], rtol=2e-5)


def test_pmap_drops_out_differently_on_each_device(tmp_path):
    trainer = make_trainer(tmp_path, parallel="pmap", mesh={"data": 2}, dropout_rate=0.5, batch_size=2)
    engine = trainer.engine
    batch = {name: np.repeat(x[:1], 2, axis=0) for name, x in next(engine.train_batches(trainer.data, 0)).items()}
    _, both = engine.step(engine.init(), batch)
    batch["weights"] = np.array([1, 0], np.float32)
    _, first = engine.step(engine.init(), batch)
    assert float(both["sums"]["loss"][0]) != pytest.approx(2 * float(first["sums"]["loss"][0]), rel=1e-4)


def test_a_checkpoint_goes_on_elsewhere(tmp_path, one_device):
    """Eight devices, then two under pmap, then one: as if it had been one all along."""
    for stop, layout in [
        (2, {"mesh": {"data": 4, "fsdp": 2}}),
        (4, {"mesh": {"data": 2}, "parallel": "pmap"}),
    ]:
        with pytest.raises(Interrupted):
            make_trainer(tmp_path, dropout_rate=0.0, stop_at_step=stop, **layout, **STEPS).fit()
    make_trainer(tmp_path, dropout_rate=0.0, **STEPS).fit()
    np.testing.assert_allclose(losses(tmp_path), one_device[0.0], rtol=2e-5)


def test_parameters_and_moments_are_sharded_by_the_rules(tmp_path):
    state = make_trainer(tmp_path, mesh={"fsdp": 2, "tensor": 4}).engine.init()
    assert state.params["layers"][0]["kernel"].sharding.spec == P(None, "fsdp")
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (8, 8)]
    assert len(moments) == 4 and all(leaf.sharding.spec == P(None, "fsdp") for leaf in moments)
    assert state.params["norm"]["scale"].sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("blocks/0/attention/query/kernel", (16, 4, 8), P("fsdp", "tensor", None)),
        ("mu/blocks/0/attention/out/kernel", (4, 8, 16), P("tensor", None, "fsdp")),
        ("blocks/attention/key/kernel", (3, 16, 4, 8), P(None, "fsdp", "tensor", None)),  # stacked layers
        ("blocks/0/attention/value/bias", (3, 8), P(None, None)),  # 3 heads can't be cut in 4
        ("blocks/0/feed_forward/expand/kernel", (16, 32), P("fsdp", "tensor")),
        ("classify/kernel", (16, 3), P(None, None)),
        ("embed/table", (11, 16), P(None, "fsdp")),
        ("norm/scale", (16,), P()),
    ],
)
def test_rules(path, shape, spec):
    assert partition(path, shape, {"data": 1, "fsdp": 2, "tensor": 4, "sequence": 1}) == spec


def test_the_rules_find_every_projection_of_a_layer():
    layer = nnx.eval_shape(lambda: MultiHeadAttention(4, 16, attention_fn=Full(), rngs=nnx.Rngs(0)))
    layout = make_layout(TrainConfig(num_steps=1, batch_size=8, mesh={"fsdp": 2, "tensor": 4}))
    found = layout.shardings(nnx.state(layer, nnx.Param))
    specs = {path_name(path): x.spec for path, x in jax.tree_util.tree_leaves_with_path(found)}
    for name in ("query", "key", "value"):
        assert specs[f"{name}/kernel"] == P("fsdp", "tensor", None)
        assert specs[f"{name}/bias"] == P("tensor", None)
    assert specs["out/kernel"] == P("tensor", None, "fsdp")


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_where_parameters_are_cut_they_are_gathered_and_no_activations(mesh):
    """Read in the compiled gradient of a model: `fsdp` cuts a batch, and parameters by another dimension."""
    layout = make_layout(TrainConfig(num_steps=1, batch_size=8, mesh=mesh))
    make = lambda: MODELS["decoder"](13, 24, attention=Full(), num_layers=2, width=32, num_heads=4, mlp_dim=48,
                                     rngs=nnx.Rngs(0))  # fmt: skip
    graphdef, state = nnx.split(nnx.eval_shape(make))
    shardings = layout.shardings(state)
    state = jax.tree.map(lambda x, cut: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut), state, shardings)
    tokens = jax.ShapeDtypeStruct((8, 24), jnp.int32, sharding=layout.batch_sharding((8, 24)))
    loss = lambda state, inputs: nnx.merge(graphdef, state)(inputs).hidden.sum()
    compiled = layout.wrap(jax.grad(loss), out=shardings).lower(state, tokens).compile()
    moves = re.findall(r"= (.+) (all-\S+?|collective-permute|reduce-scatter)(?:-start)?\(", compiled.as_text())
    sizes = {tuple(map(int, dims.split(","))) for shape, _ in moves for dims in re.findall(r"\[([\d,]+)\]", shape)}
    assert (32, 48 // mesh.get("tensor", 1)) in sizes  # a layer's parameters
    tokens = {8, 192} if "tensor" not in mesh else {96, 192}  # sums over `tensor` are of a device's own 48
    assert not [size for size in sizes if math.prod(size) >= 192 and tokens & {*size}], sizes


def test_evaluation_padding_repeats_rows_with_weight_zero():
    layout = make_layout(TrainConfig(num_steps=1, batch_size=8, mesh={"data": 4}))
    padded = layout.pad({"inputs": np.arange(10).reshape(5, 2), "weights": np.ones(5, np.float32)})
    np.testing.assert_array_equal(padded["weights"], [1, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(padded["inputs"][5:], [[8, 9]] * 3)
