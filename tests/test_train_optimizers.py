"""Every field of the optimizer section acts, or is refused."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xformer.train import optimizers


def schedule_of(name, peak=2.0, warmup_steps=4, num_steps=12, **kwargs):
    schedule = optimizers.learning_rate_schedule(name, peak, warmup_steps, num_steps, **kwargs)
    return np.array([schedule(step) for step in range(num_steps)])


@pytest.mark.parametrize("name", ["constant", "cosine", "rsqrt"])
def test_warmup_is_linear_to_the_peak(name):
    np.testing.assert_allclose(schedule_of(name)[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)


def test_schedules_after_the_warmup():
    np.testing.assert_allclose(schedule_of("constant")[4:], 2.0)
    steps = np.arange(4, 12)
    np.testing.assert_allclose(schedule_of("rsqrt")[4:], 2.0 * np.sqrt(4 / (steps + 1)), rtol=1e-6)
    half_cosine = 0.5 * (1 + np.cos(np.pi * (steps - 4) / 8))
    np.testing.assert_allclose(schedule_of("cosine")[4:], 2.0 * half_cosine, rtol=1e-5)
    np.testing.assert_allclose(schedule_of("cosine", end_factor=0.1)[4:], 2.0 * (0.1 + 0.9 * half_cosine), rtol=1e-5)


@pytest.mark.parametrize("name", ["constant", "cosine", "rsqrt"])
def test_no_warmup_starts_at_the_peak(name):
    assert schedule_of(name, warmup_steps=0)[0] == 2.0


@pytest.mark.parametrize("name", ["constant", "cosine", "rsqrt"])
def test_warmup_longer_than_the_run_only_warms_up(name):
    rates = schedule_of(name, warmup_steps=100, num_steps=10)
    np.testing.assert_allclose(rates, 2.0 * np.arange(1, 11) / 100, rtol=1e-6)


PARAMS = {"dense": {"kernel": jnp.full((2, 3), 0.5), "bias": jnp.full((3,), 0.5)}, "norm": {"scale": jnp.ones((3,))}}
HEAD_BIAS = {"query": {"bias": jnp.full((2, 4), 0.5)}}


def moved(first, second):
    return not np.allclose(first["dense"]["kernel"], second["dense"]["kernel"], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("adamw", "b1", 0.5),
        ("adamw", "b2", 0.5),
        ("adamw", "eps", 0.1),
        ("adamw", "weight_decay", 0.1),
        ("adam", "b1", 0.5),
        ("adam", "eps", 0.1),
        ("sgd", "momentum", 0.9),
        ("sgd", "weight_decay", 0.1),
        ("lion", "weight_decay", 0.1),
        ("sgd", "clip_norm", 0.01),
        ("sgd", "warmup_steps", 5),
        ("sgd", "learning_rate", 0.2),
        ("sgd", "schedule", "rsqrt"),
    ],
)
def test_every_field_acts(name, field, value):
    grads = [optax.tree.full_like(PARAMS, size) for size in (0.1, -0.4, 0.2)]

    def train(**kwargs):
        params = PARAMS
        optimizer, _ = optimizers.build(**{"name": name, "learning_rate": 0.1, "num_steps": 10} | kwargs)
        state = optimizer.init(params)
        for grad in grads:
            updates, state = optimizer.update(grad, state, params)
            params = optax.apply_updates(params, updates)
        return params

    assert moved(train(), train(**{field: value}))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_weight_decay_spares_biases_and_scales(name):
    params = PARAMS | HEAD_BIAS
    optimizer, _ = optimizers.build(name, 0.1, weight_decay=0.5, num_steps=10)
    updates, _ = optimizer.update(optax.tree.zeros_like(params), optimizer.init(params), params)
    assert np.all(np.asarray(updates["dense"]["kernel"]) < 0)
    for spared in (updates["dense"]["bias"], updates["norm"]["scale"], updates["query"]["bias"]):
        np.testing.assert_array_equal(spared, 0)


def test_clipping_is_by_global_norm_and_first():
    optimizer, _ = optimizers.build("sgd", 1.0, clip_norm=0.5, num_steps=10)
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-0.3, -0.4], rtol=1e-6)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "adagrad"}, "name: got 'adagrad', allowed are adamw, adam, sgd, lion"),
        ({"schedule": "linear"}, "schedule must be one of constant, cosine, rsqrt, got 'linear'"),
        ({"learning_rate": -1.0}, "learning_rate must be positive, got -1.0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"clip_norm": 0.0}, "clip_norm must be positive or None, got 0.0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"b1": 1.0}, "b1 must be at least 0 and below 1, got 1.0"),
        ({"eps": 0.0}, "eps must be positive, got 0.0"),
        ({"momentum": 0.9}, "momentum: optimizer 'adamw' takes none, got 0.9; only sgd do"),
        ({"name": "adam", "weight_decay": 0.1}, "weight_decay: optimizer 'adam' takes none"),
        ({"end_factor": 0.1}, "end_factor: schedule 'constant' has none"),
        ({"schedule": "cosine", "end_factor": 2.0}, "end_factor must be from 0 to 1, got 2.0"),
    ],
)
def test_what_would_not_act_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        optimizers.build(**kwargs, num_steps=10)
