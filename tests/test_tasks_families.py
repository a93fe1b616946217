"""Each family against its formulas, written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xformer.tasks import Classification, MultiLabel, Regression, TokenClassification


def totals(metrics):
    return {
        name: (float((entry[0] * entry[1]).sum()), float(entry[1].sum())) if isinstance(entry, tuple)
        else np.asarray(entry, np.float64)
        for name, entry in metrics.items()
    }  # fmt: skip


def f1(hits, false_alarms, misses):
    total = 2 * hits + false_alarms + misses
    return 2 * hits / total if total else 0.0


def test_multi_label():
    logits = jnp.array([[2.0, -1.0, 0.5], [-3.0, 4.0, -0.5], [1.0, 1.0, -1.0], [9.0, 9.0, 9.0]])
    targets = jnp.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]], bool)
    batch = {"targets": targets, "weights": jnp.array([1.0, 1.0, 1.0, 0.0])}
    found = MultiLabel().finish(totals(MultiLabel().metrics(logits, batch)))
    real, held = np.asarray(logits[:3], np.float64), np.asarray(targets[:3])
    likelihood = np.where(held, 1 / (1 + np.exp(-real)), 1 / (1 + np.exp(real)))
    # Label 0 and 1 are right everywhere; label 2 has one false alarm and never occurs.
    scores = [f1(2, 0, 0), f1(2, 0, 0), f1(0, 1, 0)]
    assert found["loss"] == pytest.approx(-np.log(likelihood).mean(), rel=1e-6)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["macro_f1"] == pytest.approx(np.mean(scores)) and found["micro_f1"] == pytest.approx(f1(4, 1, 0))


def test_multi_label_targets_may_be_numbers_but_only_0_and_1():
    batch = {"targets": jnp.array([[1.0, 0.0]]), "weights": jnp.ones(1)}
    assert MultiLabel().metrics(jnp.ones((1, 2)), batch)["accuracy"][0] == 0
    with pytest.raises(ValueError, match=r"targets must be 0 or 1, got 0\.5"):
        MultiLabel().metrics(jnp.ones((1, 2)), batch | {"targets": jnp.array([[1.0, 0.5]])})
    traced = jax.jit(MultiLabel().metrics)(jnp.ones((1, 2)), batch | {"targets": jnp.array([[1.0, 0.5]])})
    assert np.isnan(traced["loss"][0]).all() and np.isnan(traced["f1"]).all()
    with pytest.raises(ValueError, match=r"targets must be \[batch, labels\] as outputs \(1, 3\), got \(1, 2\)"):
        MultiLabel().metrics(jnp.ones((1, 3)), batch)


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_regression(shape):
    outputs = jnp.array([1.0, 2.0, 4.0, jnp.nan]).reshape(shape)
    batch = {"targets": jnp.array([1.0, 3.0, 2.0, 7.0]), "weights": jnp.array([1.0, 1.0, 1.0, 0.0])}
    found = Regression().finish(totals(Regression().metrics(outputs, batch)))
    squares = 0 + 1 + 4
    assert found["loss"] == pytest.approx(squares / 3) and found["mean_absolute_error"] == pytest.approx(1.0)
    assert found["r2"] == pytest.approx(1 - squares / 2)  # the targets' squared distances from 2 sum up to 2
    scaled = Regression().metrics(outputs, batch | {"scale": jnp.full(4, 10.0), "center": jnp.full(4, 5.0)})
    assert Regression().finish(totals(scaled))["mean_absolute_error"] == pytest.approx(10.0)
    records = Regression().records(outputs, batch | {"scale": jnp.full(4, 10.0), "center": jnp.full(4, 5.0)})
    assert records["targets"][:3].tolist() == [15, 35, 25] and records["predictions"][:3].tolist() == [15, 25, 45]


def test_regression_of_one_number_only():
    batch = {"targets": jnp.full(3, 2.0), "weights": jnp.ones(3)}
    score = lambda outputs: Regression().finish(totals(Regression().metrics(outputs, batch)))["r2"]
    assert score(jnp.full(3, 2.0)) == 1 and score(jnp.array([2.0, 2.0, 3.0])) == 0


@pytest.mark.parametrize("wrong", [jnp.array([1.0, jnp.nan]), jnp.array([1.0, jnp.inf])])
def test_regression_refuses_what_is_not_finite(wrong):
    with pytest.raises(ValueError, match="targets must be finite"):
        Regression().metrics(jnp.zeros(2), {"targets": wrong, "weights": jnp.ones(2)})


def test_regression_refuses_several_outputs():
    with pytest.raises(ValueError, match=r"outputs must be one number for each of \(2,\), got \(2, 3\)"):
        Regression().metrics(jnp.zeros((2, 3)), {"targets": jnp.zeros(2), "weights": jnp.ones(2)})


def test_token_classification():
    random = np.random.default_rng(0)
    logits = random.normal(size=(3, 5, 4)).astype(np.float32)
    targets = np.array([[0, 1, -1, 2, -1], [2, 2, 2, 0, 1], [1, 1, 1, 1, 1]])
    weights = np.array([1.0, 1.0, 0.0], np.float32)
    metrics = TokenClassification().metrics(
        jnp.asarray(logits), {"targets": jnp.asarray(targets), "weights": jnp.asarray(weights)}
    )
    assert metrics["loss"][1].tolist() == [3, 5, 0]
    found = TokenClassification().finish(totals(metrics))
    counted = [(row, place) for row in (0, 1) for place in range(5) if targets[row, place] >= 0]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    guesses = logits.argmax(-1)
    assert found["loss"] == pytest.approx(-np.mean([log_probs[(*at, targets[at])] for at in counted]), rel=1e-5)
    assert found["accuracy"] == pytest.approx(np.mean([guesses[at] == targets[at] for at in counted]))
    scores = []
    for one in range(4):
        pairs = [(guesses[at] == one, targets[at] == one) for at in counted]
        if any(guess or held for guess, held in pairs):
            scores.append(
                f1(sum(g and h for g, h in pairs), sum(g > h for g, h in pairs), sum(g < h for g, h in pairs))
            )
    assert found["macro_f1"] == pytest.approx(np.mean(scores))


def test_token_weights_are_taken_too():
    logits, targets = jnp.zeros((1, 3, 2)).at[0, 0, 1].set(5.0), jnp.array([[0, 1, 1]])
    metrics = TokenClassification().metrics(logits, {"targets": targets, "weights": jnp.array([[0.0, 1.0, 1.0]])})
    assert metrics["loss"][1].tolist() == [2] and float(metrics["loss"][0][0]) == pytest.approx(np.log(2))


def test_a_token_target_that_is_no_class():
    batch = {"targets": jnp.array([[0, 5]]), "weights": jnp.ones(1)}
    with pytest.raises(ValueError, match="targets must be from 0 to 1, got 5"):
        TokenClassification().metrics(jnp.zeros((1, 2, 2)), batch)
    assert np.isnan(jax.jit(TokenClassification().metrics)(jnp.zeros((1, 2, 2)), batch)["loss"][0]).all()
    with pytest.raises(ValueError, match=r"targets must be \[batch, length\] as outputs \(1, 3, 2\), got \(1, 2\)"):
        TokenClassification().metrics(jnp.zeros((1, 3, 2)), batch)


def test_guesses():
    labels = np.array([2, 2, 0])
    np.testing.assert_allclose(np.exp(Classification().guess(labels, 3)), [2 / 6, 1 / 6, 3 / 6], rtol=1e-6)
    np.testing.assert_allclose(np.exp(TokenClassification().guess(np.array([1, -1, -1]), 2)), [1 / 3, 2 / 3], rtol=1e-6)
    held = np.array([[True, False], [True, False]])
    np.testing.assert_allclose(jax.nn.sigmoid(MultiLabel().guess(held, 2)), [3 / 4, 1 / 4], rtol=1e-6)
    assert Regression().guess(np.array([1.0, 3.0]), 1, center=1.0, scale=2.0).tolist() == [0.5]
