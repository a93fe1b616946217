"""LSTM layers against Flax's own, what padding may change, and runs of a model without attention."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_comparison
from flax import nnx

import xformer
from xformer import cost, schema
from xformer.commands import compare, comparison_plan, comparison_runs, inspect
from xformer.config import load_experiment
from xformer.models import BiLSTM
from xformer.nn import AttentionPooling, BidirectionalLSTM
from xformer.report import results

BATCH, LENGTH, WIDTH, HIDDEN = 3, 7, 5, 4
LENGTHS = np.array([7, 4, 1])
MASK = jnp.arange(LENGTH) < LENGTHS[:, None]


def embedded(seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, LENGTH, WIDTH))


def make_model(**options):
    options = {"num_layers": 2, "width": WIDTH, "hidden_dim": HIDDEN, "rngs": nnx.Rngs(0), **options}
    return BiLSTM(11, 3, LENGTH, **options)


def tokens(seed=0):
    return jnp.where(MASK, jax.random.randint(jax.random.key(seed), (BATCH, LENGTH), 1, 11), 0)


call = nnx.jit(lambda model, *args: model(*args))


def test_outputs_and_states_are_those_of_flax():
    layer = BidirectionalLSTM(WIDTH, HIDDEN, rngs=nnx.Rngs(0))
    flax = nnx.Bidirectional(nnx.RNN(layer.forward.cell), nnx.RNN(layer.backward.cell), return_carry=True)
    x = embedded()
    (forward, backward), expected = nnx.jit(lambda flax, *x: flax(x[0], seq_lengths=x[1]))(flax, x, jnp.array(LENGTHS))
    found, (own_forward, own_backward) = call(layer, x, MASK)
    np.testing.assert_allclose(found, jnp.where(MASK[..., None], expected, 0), atol=1e-6)
    for own, theirs in ((own_forward, forward), (own_backward, backward)):
        for state, other in zip(own, theirs, strict=True):
            np.testing.assert_allclose(state, other, atol=1e-6)


def test_pooling_weights_are_a_softmax_over_real_tokens():
    pool, x = AttentionPooling(WIDTH, rngs=nnx.Rngs(0)), embedded()
    weights = pool.weights(x, MASK)
    hidden = np.tanh(np.asarray(x) @ pool.hidden.kernel[...] + pool.hidden.bias[...]) @ pool.query.kernel[...]
    for row, length in enumerate(LENGTHS):
        expected = np.exp(hidden[row, :length, 0])
        np.testing.assert_allclose(weights[row, :length], expected / expected.sum(), rtol=1e-5)
        np.testing.assert_array_equal(weights[row, length:], 0)
        np.testing.assert_allclose(pool(x, MASK)[row], np.asarray(weights[row]) @ np.asarray(x[row]), rtol=1e-5)
    assert not np.any(pool.weights(x, jnp.zeros_like(MASK)))


@pytest.mark.parametrize("pooling", ["attention", "mean"])
def test_padding_changes_nothing(pooling):
    model = make_model(pooling=pooling)
    logits = call(model, tokens(), MASK)
    assert logits.shape == (BATCH, 3) and logits.dtype == jnp.float32
    np.testing.assert_array_equal(call(model, jnp.where(MASK, tokens(), 7), MASK), logits)
    np.testing.assert_allclose(call(model, tokens()[1:2, :4]), logits[1:2], atol=1e-6)
    assert np.abs(call(model, tokens().at[1, 0].add(1), MASK) - logits)[1].max() > 1e-4
    loss = lambda model: model(tokens(), jnp.zeros_like(MASK)).sum()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.jit(nnx.grad(loss))(model)))


def test_recomputed_gates_give_the_same_gradients():
    grads = [
        nnx.jit(nnx.grad(lambda model: model(tokens(), MASK)[0, 0]))(make_model(remat=remat)) for remat in (False, True)
    ]
    for kept, recomputed in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(recomputed, kept, atol=1e-6)


def test_products_are_counted_through_the_recurrence():
    gates = lambda width: 2 * 2 * LENGTH * 4 * HIDDEN * (width + HIDDEN)  # of both directions
    pooled = 2 * LENGTH * ((2 * HIDDEN) ** 2 + 2 * HIDDEN + 2 * HIDDEN) + 2 * 2 * HIDDEN * 3
    model = make_model()
    counted = cost.count(lambda x: model(x, MASK), tokens())
    assert counted.flops == BATCH * (gates(WIDTH) + gates(2 * HIDDEN) + pooled) and not counted.uncounted


def test_half_precision_is_near():
    logits, half = (call(make_model(dtype=dtype), tokens(), MASK) for dtype in (jnp.float32, jnp.bfloat16))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, logits, atol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_dim": 0}, "hidden_dim must be an integer of at least 1, got 0"),
        ({"pooling": "max"}, "pooling must be 'attention' or 'mean', got 'max'"),
        ({"dropout_rate": 1.0}, "dropout_rate must be at least 0 and below 1, got 1.0"),
    ],
)
def test_wrong_arguments_are_one_line(options, message):
    with pytest.raises(ValueError) as error:
        make_model(**options)
    assert str(error.value) == message


WITHOUT = {"attention": {"name": "none"}, "model": {"name": "bilstm", "width": 8, "hidden_dim": 4}}


def test_sizes_of_other_models_are_one_line_and_no_warning(capsys):
    one, other = ["train.mesh={'data': 1}"], [f"{key}={value}" for key, value in WITHOUT.items()]
    given = {"full": one, "wide": [*one, "model.width=128"], "bilstm": [*one, *other]}
    built = {name: load_experiment("demo:full", overrides) for name, overrides in given.items()}
    runs = {name: comparison_plan.Planned("", name, 0, made.config, Path(name)) for name, made in built.items()}
    comparison_runs._compare_sizes(runs, built, None)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: wide has ") and "full" in first
    assert re.fullmatch(r"parameters of other models beside the first variant's: bilstm \(bilstm\) -\d+%", second)


@pytest.mark.full
def test_a_comparison_sets_it_beside_attention(tmp_path, capsys):
    path = tiny_comparison.write(tmp_path / "config.py", variants={"bilstm": WITHOUT}, seeds=(0,))
    compare.command([f"--config={path}", f"--workdir={tmp_path / 'runs'}", "--config.variants=full,bilstm"])
    found = {run["variant"]: run for run in map(json.loads, (tmp_path / "runs/results.jsonl").read_text().splitlines())}
    assert found["bilstm"]["attention"] == "none" and found["bilstm"]["model"]["name"] == "bilstm"
    assert found["bilstm"]["flops_per_step"] > 0 and not found["bilstm"]["flops_uncounted"]
    assert {row["variant"] for row in json.loads((tmp_path / "runs/costs.json").read_text())["rows"]} == {"full"}
    assert results.load(tmp_path / "runs").reference == "full"
    (folder,) = (path.parent for path in (tmp_path / "runs").glob("**/config.json") if "bilstm" in str(path))
    run = xformer.load(folder)
    assert run.model.max_len == 16


def test_inspect_has_no_pattern_to_draw(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_comparison.BASE | WITHOUT))
    inspect.command([f"--config={config}"])
    shown = capsys.readouterr().out
    assert "no attention" in shown and "sequential products" in shown
    with pytest.raises(schema.ConfigError) as error:
        inspect.command([f"--config={config}", f"--out={tmp_path / 'pattern.png'}"])
    assert str(error.value).endswith("pattern.png', but model bilstm has no attention to draw")
