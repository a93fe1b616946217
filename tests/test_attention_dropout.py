"""Dropout acts on the attention weights of every variant, keeps their mean, and is off when deterministic."""

import conformance
import jax
import numpy as np
import pytest
from conformance import (
    BOTH,
    HEADS,
    LENGTH,
    as_jax,
    close,
    forward,
    forward_and_gradients,
    inputs,
    parameters,
    refuses,
    rows,
)

KEY = jax.random.key(0)


def dropped(row, params, call, key=KEY, rate=0.5, broadcast=True):
    options = (("deterministic", False), ("dropout_rate", rate), ("broadcast_dropout", broadcast))
    return np.asarray(forward(row.op, params, as_jax(call) | {"dropout_rng": key}, options))


@pytest.mark.sampled(1)
@rows(where=lambda case: case.dropout)
def test_acts_repeats_and_differs_by_key(row):
    call = inputs()
    params = parameters(row.op, call)
    plain = np.asarray(forward(row.op, params, as_jax(call)))
    one = dropped(row, params, call)
    assert np.isfinite(one).all() and np.abs(one - plain).max() > 0.05
    np.testing.assert_array_equal(one, dropped(row, params, call))
    assert np.abs(one - dropped(row, params, call, jax.random.key(1))).max() > 0.05


@pytest.mark.sampled(2)
@rows(implementations=BOTH, where=lambda case: case.pairs)
def test_weights_are_dropped_whole_and_scaled(row):
    """With equal scores and one-hot values the output is the weights: each is zero or weight / keep probability."""
    length, rate = 40, 0.25
    call = inputs(q_len=length, batch=1, head_dim=length)
    call["query"] = np.zeros_like(call["query"])
    call["value"] = np.broadcast_to(np.eye(length, dtype=np.float32)[None, :, None], call["value"].shape)
    params = parameters(row.op, call)
    weights = dropped(row, params, call, rate=rate)
    plain = np.asarray(forward(row.op, params, as_jax(call)))
    kept = weights > 0
    assert not kept[plain == 0].any()
    close(weights[kept], plain[kept] / (1 - rate))
    share = kept[plain > 0].mean()
    assert abs(share - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / (plain > 0).sum()) * np.sqrt(HEADS)


@pytest.mark.sampled(4)
@rows(where=lambda case: case.dropout and not case.pairs)
def test_mean_over_keys_is_the_undropped_output(row):
    call = inputs(q_len=20, batch=1, seed=1)
    params = parameters(row.op, call)
    options = (("deterministic", False), ("dropout_rate", 0.3))
    one = lambda key: conformance.attend(row.op, params, as_jax(call) | {"dropout_rng": key}, **dict(options))
    run = jax.jit(jax.vmap(one))
    draws = np.asarray(run(jax.random.split(KEY, 800)), np.float64)
    plain = np.asarray(forward(row.op, params, as_jax(call)))
    error = draws.std(axis=0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - plain) < 6 * error + 1e-5).all()


@pytest.mark.sampled(1)
@rows(implementations=BOTH, where=lambda case: case.dropout and conformance.one_of_each(case))
def test_broadcast_shares_the_mask_between_examples(row):
    call = inputs(batch=1)
    params = parameters(row.op, call)
    twins = {name: np.concatenate([x, x]) for name, x in call.items()}
    shared = dropped(row, params, twins, broadcast=True)
    close(shared[0], shared[1], 1e-6)
    own = dropped(row, params, twins, broadcast=False)
    assert np.abs(own[0] - own[1]).max() > 0.05


@pytest.mark.sampled(3)
@rows(where=conformance.one_of_each)
def test_off_when_deterministic_or_at_rate_zero(row):
    call = inputs()
    params = parameters(row.op, call)
    plain = forward(row.op, params, as_jax(call))
    with_key = as_jax(call) | {"dropout_rng": KEY}
    for options in ({"dropout_rate": 0.9, "deterministic": True}, {"dropout_rate": 0.0, "deterministic": False}):
        np.testing.assert_array_equal(plain, forward(row.op, params, with_key, tuple(options.items())))
    without_key = forward(row.op, params, as_jax(call), tuple(options.items()))
    np.testing.assert_array_equal(plain, without_key)


@rows()
def test_dropout_without_a_key_or_with_an_impossible_rate_is_refused(row):
    call = as_jax(inputs())
    params = parameters(row.op, call)
    with refuses(ValueError, "dropout_rng"):
        conformance.attend(row.op, params, call, dropout_rate=0.5, deterministic=False)
    for rate in (-0.1, 1.5):
        with refuses(ValueError, "dropout_rate"):
            conformance.attend(row.op, params, call, dropout_rng=KEY, dropout_rate=rate, deterministic=False)


@rows(where=lambda case: not case.dropout)
def test_what_has_no_weights_to_drop_says_so(row):
    call = as_jax(inputs())
    with refuses(NotImplementedError, type(row.op).__name__, "dropout_rate", "drop outputs of the layer"):
        conformance.attend(row.op, {}, call, dropout_rng=KEY, dropout_rate=0.5, deterministic=False)


@pytest.mark.sampled(2)
@rows(positions=True, implementations=("xla",), where=lambda case: case.dropout)
def test_gradient_meets_the_same_mask_as_the_output(row):
    """<c, out(v)> is linear in the values, so the gradient gives it exactly; scores by central differences."""
    call = inputs(q_len=33, seed=2)
    params = parameters(row.op, call)
    options = (("deterministic", False), ("dropout_rate", 0.4), ("broadcast_dropout", False))
    cotangent = conformance.random_cotangent(call)
    run = lambda call: forward_and_gradients(row.op, params, as_jax(call) | {"dropout_rng": KEY}, cotangent, options)
    _, _, gradients = run(call)
    rng = np.random.default_rng(3)
    for name in ("query", "key", "value") if row.case.smooth else ("value",):
        direction, step = rng.normal(size=call[name].shape).astype(np.float32), 1e-2
        ahead, behind = (run(call | {name: call[name] + sign * step * direction})[0] for sign in (1, -1))
        want = np.vdot(cotangent, (np.asarray(ahead, np.float64) - np.asarray(behind, np.float64)) / (2 * step))
        got = np.vdot(np.asarray(gradients[name], np.float64), direction)
        assert abs(got - want) <= 2e-3 * np.linalg.norm(gradients[name]), name


@rows(where=lambda case: case.name in ("full", "bigbird"))
def test_padded_rows_stay_zero_under_dropout(row):
    call = inputs() | {"mask": conformance.padding([LENGTH, 0], LENGTH)}
    out = dropped(row, {}, call)
    assert np.isfinite(out).all() and not out[1].any()
