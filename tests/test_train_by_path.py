"""Frozen parameters stay as they are, and layers below move less."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from xformer import experiment
from xformer.attention import Full, Layers, Linformer
from xformer.models import MODELS
from xformer.train import by_path, optimizers
from xformer.tree_paths import Blocks

SIZES = {"num_layers": 3, "width": 8, "num_heads": 2, "mlp_dim": 8, "norm": "post", "position_embedding": "learned"}


def params_of(attention=Full(), **options):  # noqa: B008, an op is a constant
    model = MODELS["classifier"](11, 3, 5, attention=attention, rngs=nnx.Rngs(0), **SIZES | options)
    return nnx.state(model, nnx.Param)


def steps(params, count=2, **section):
    """The parameters after some steps with a gradient of one."""
    optimizer, _ = optimizers.build(num_steps=10, **section)
    state = optimizer.init(params)
    for _ in range(count):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def moved(before, after):
    change = jax.tree.map(lambda x, y: np.abs(np.asarray(y - x)), before, after)
    return {by_path.path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(change)}


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "optax:adabelief"])
def test_frozen_parameters_do_not_move(name):
    params = params_of()
    decays = {"weight_decay": 0.1} if name in ("adamw", "sgd", "lion") else {}
    change = moved(params, steps(params, name=name, freeze=("embed", r"blocks/[01]/attention/value"), **decays))
    still = {path for path, x in change.items() if not x.any()}
    values = {f"blocks/{layer}/attention/value/{part}" for layer in (0, 1) for part in ("kernel", "bias")}
    assert still == {"embed/table", *values}


def test_frozen_gradients_count_in_no_norm():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    section = {"name": "sgd", "learning_rate": 1.0, "clip_norm": 1.0}
    change = moved(params, steps(params, 1, freeze=("a",), **section))
    np.testing.assert_allclose(change["b"], 0.5**0.5, rtol=1e-6)


@pytest.mark.parametrize("scan", [False, True])
def test_layers_below_move_less(scan):
    params = params_of(scan_layers=scan)
    section = {"name": "sgd", "learning_rate": 1.0}
    change = moved(params, steps(params, 1, layer_decay=0.5, **section))
    expected = {"classify/kernel": 1.0, "embed/table": 0.5**4, "positions/table": 0.5**4}
    for path, factor in expected.items():
        np.testing.assert_allclose(change[path], factor, rtol=1e-5)
    for layer in range(3):
        name = "blocks/attention/value/kernel" if scan else f"blocks/{layer}/attention/value/kernel"
        x = change[name][layer] if scan else change[name]
        np.testing.assert_allclose(x, 0.5 ** (3 - layer), rtol=1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_layers_of_alternating_ops_and_shared_parameters_move_as_their_own_layer(scan):
    """Of two stacked blocks number k holds layers k and k + 2; what they share moves as the last of them."""
    ops = Layers((Linformer(rank=2, max_len=5), Full()))
    model = MODELS["classifier"](
        11, 3, 5, attention=ops, rngs=nnx.Rngs(0), **SIZES | {"num_layers": 4}, scan_layers=scan,
        share_attention_params=True,
    )  # fmt: skip
    params = nnx.state(model, nnx.Param)
    blocks = Blocks(4, 2, scanned=scan, shared=True)
    section = {"name": "sgd", "learning_rate": 1.0, "layer_decay": 0.5, "blocks": blocks}
    change = moved(params, steps(params, 1, **section))
    for layer in range(4):
        at = layer % 2 if scan else layer
        x = change[f"blocks/{at}/attention/value/kernel"]
        np.testing.assert_allclose(x[layer // 2] if scan else x, 0.5 ** (4 - layer), rtol=1e-5)
    shared = [x for path, x in change.items() if path.startswith("blocks/0/attention/attention_fn/")]
    assert shared and all(np.allclose(x, 0.5**2) for x in shared)  # of layers 0 and 2
    np.testing.assert_allclose(change["embed/table"], 0.5**5, rtol=1e-5)


def test_a_config_says_how_its_layers_lie():
    """The optimizer of an experiment decays stacked layers of two ops one by one."""
    ops = [{"name": "window", "left": 1, "right": 1}, {"name": "full"}]
    config = {
        "name": "decayed",
        "attention": {"name": "layers", "layers": ops},
        "model": {**SIZES, "num_layers": 4, "scan_layers": True},
        "task": {"name": "imdb", "max_len": 5, "vocab": "bytes"},
        "optimizer": {"name": "sgd", "learning_rate": 1.0, "layer_decay": 0.5},
        "train": {"num_steps": 1, "batch_size": 1},
    }
    made = experiment.build(config)
    params = params_of(attention=made.attention, scan_layers=True, num_layers=4)
    updates, _ = made.optimizer.update(jax.tree.map(jnp.ones_like, params), made.optimizer.init(params), params)
    found = np.asarray(updates["blocks"][1]["attention"]["value"]["bias"][...])
    np.testing.assert_allclose(-found[:, 0, 0], [0.5**3, 0.5], rtol=1e-5)  # layers 1 and 3


def test_a_decay_of_one_changes_nothing():
    params = params_of()
    for one, two in zip(jax.tree.leaves(steps(params, layer_decay=1.0)), jax.tree.leaves(steps(params)), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"layer_decay": 0.0}, "layer_decay must be above 0 and at most 1, or None, got 0.0"),
        ({"layer_decay": 1.5}, "layer_decay must be above 0"),
        ({"freeze": ("(",)}, "freeze must hold regular expressions, got '('"),
        ({"freeze": ("head/",)}, "freeze: got 'head/', which begins the path of no parameter; takes"),
        ({"freeze": ("embed", "")}, "freeze: got ('embed', ''), which leaves no parameter to train"),
    ],
)
def test_what_is_refused(section, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        steps(params_of(), **section)
