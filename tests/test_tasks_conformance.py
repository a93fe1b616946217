"""What every task of TASKS does: shapes, weights, fillers, sizes, directions, and a baseline that can be recomputed."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_tasks import CASES, GUESSERS, MORE_INPUTS, commonest

from xformer.tasks import TASKS, build, load_preprocessing

BATCH = 5


@pytest.fixture(scope="module", params=list(CASES))
def opened(request, tmp_path_factory):
    """(task, its opened data)."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        task = CASES[request.param](folder, patch)
        task.prepare(folder / "data")
        return task, task.open(folder / "data")


def name_of(task):
    return next(name for name, cls in TASKS.items() if cls is type(task))


def batch_of(data, split="test", size=BATCH):
    return next(data.batches(split, size, seed=0, shuffle=False, epochs=1))


def outputs_for(task, data, batch, seed=0):
    """Random outputs of the shape that a model for these targets gives."""
    targets = task.family.targets(1, 1, data.sizes["num_classes"])
    leading = batch["targets"].shape if batch["targets"].ndim == 2 and targets.dtype == jnp.int32 else (BATCH,)
    shape = (*leading, data.sizes["num_classes"])
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def totals(metrics):
    return {
        name: (float((entry[0] * entry[1]).sum()), float(entry[1].sum())) if isinstance(entry, tuple)
        else np.asarray(entry, np.float64)
        for name, entry in metrics.items()
    }  # fmt: skip


def test_every_task_is_a_row():
    assert {name.split("-")[0] for name in CASES} == set(TASKS)


def test_the_example_batch_is_a_real_batch_without_values(opened):
    task, data = opened
    batch, example = batch_of(data), task.example_batch(BATCH, data.preprocess)
    shapes = lambda arrays: {name: (array.shape, jnp.dtype(array.dtype)) for name, array in arrays.items()}
    assert shapes(batch) == shapes(example)
    known = task.example_batch(BATCH)
    assert known.keys() == example.keys()
    if not task.sizes().assumed:
        assert shapes(known) == shapes(example)


@pytest.mark.sampled(8)
def test_inputs_and_metrics_trace_on_the_example_batch(opened):
    task, data = opened
    example = task.example_batch(BATCH)
    inputs = jax.eval_shape(task.inputs, example)
    more = MORE_INPUTS.get(name_of(task), set())
    if images := inputs.pop("images", None):  # a task of images, which reads nothing else
        assert images.shape == (BATCH, *task.shape) and images.dtype == jnp.float32 and not inputs
    else:
        pairs = {"inputs", "mask"} | ({"inputs2", "mask2"} if task.num_texts == 2 else set())
        assert set(inputs) - more == pairs
    for name, array in inputs.items():
        if array is None:  # what the task leaves out
            assert name in more
            continue
        assert array.shape[0] == BATCH and array.ndim == 2 and (name in more or array.shape[1] == task.length)
        assert array.dtype == (jnp.bool_ if "mask" in name else jnp.int32)
    batch = batch_of(data)
    metrics = task.metrics(outputs_for(task, data, batch), batch)
    assert isinstance(metrics["loss"], tuple)
    for entry in metrics.values():
        if isinstance(entry, tuple):
            assert [(part.shape, part.dtype) for part in entry] == [((BATCH,), jnp.float32)] * 2


def test_sizes_hold_for_the_data_and_are_saved(opened, tmp_path):
    task, data = opened
    sizes, expected = task.sizes(data.preprocess), task.sizes()
    assert not sizes.assumed and sizes == data.sizes and sizes["max_len"] == task.length
    assert {name: size for name, size in expected.items() if name not in expected.assumed} == {
        name: size for name, size in sizes.items() if name not in expected.assumed
    }
    batches = [batch_of(data, split, data.num_examples(split)) for split in data.splits]
    assert max(int(batch["inputs"].max()) for batch in batches) < sizes["vocab_size"]
    data.save(tmp_path)
    assert json.loads((tmp_path / "preprocessing.json").read_text())["sizes"] == sizes
    assert task.sizes(load_preprocessing(tmp_path)) == sizes
    assert load_preprocessing(tmp_path).fingerprint == data.preprocess.fingerprint


def test_better_names_every_metric(opened):
    task, data = opened
    batch = batch_of(data)
    finished = task.finish(totals(task.metrics(outputs_for(task, data, batch), batch)))
    assert set(finished) == set(task.better) and set(task.better.values()) <= {"min", "max"}
    assert all(math.isfinite(value) for value in finished.values())


def test_better_metrics_are_better(opened):
    """Outputs nearer to the targets move no metric in the wrong direction."""
    task, data = opened
    batch = batch_of(data)
    bad = outputs_for(task, data, batch)
    gradient = jax.jit(jax.grad(lambda outputs: task.metrics(outputs, batch)["loss"][0].sum()))
    good = bad
    for _ in range(300):
        good = good - 0.5 * gradient(good)
    worse, better = (task.finish(totals(task.metrics(outputs, batch))) for outputs in (bad, good))
    for name, direction in task.better.items():
        assert better[name] <= worse[name] if direction == "min" else better[name] >= worse[name], name
    assert better["loss"] < worse["loss"]


@pytest.mark.sampled(3)
def test_fillers_add_nothing(opened):
    task, data = opened
    batch = batch_of(data)
    outputs = outputs_for(task, data, batch)
    filler = {name: np.concatenate([x, x[:2]]) for name, x in batch.items()}
    filler["weights"][BATCH:] = 0
    broken = jnp.concatenate([outputs, jnp.full_like(outputs[:2], jnp.nan)])
    for run in (task.metrics, jax.jit(task.metrics)):
        plain, padded = totals(run(outputs, batch)), totals(run(broken, filler))
        assert plain.keys() == padded.keys()
        for name in plain:
            np.testing.assert_allclose(padded[name], plain[name], rtol=1e-5)
    gradient = jax.grad(lambda outputs: task.metrics(outputs, filler)["loss"][0][:BATCH].sum())(broken)
    assert jnp.isfinite(gradient).all() and not gradient[BATCH:].any()


@pytest.mark.sampled(5)
def test_metrics_of_parts_add_up_to_those_of_the_whole(opened):
    task, data = opened
    batch = batch_of(data)
    outputs = outputs_for(task, data, batch)
    whole = totals(task.metrics(outputs, batch))
    parts = [
        totals(task.metrics(outputs[rows], {name: x[rows] for name, x in batch.items()}))
        for rows in (slice(0, 2), slice(2, BATCH))
    ]
    for name, entry in whole.items():
        np.testing.assert_allclose(np.asarray(parts[0][name]) + np.asarray(parts[1][name]), entry, rtol=1e-5, atol=1e-5)


def test_records_have_a_row_an_example(opened):
    task, data = opened
    batch = batch_of(data)
    records = task.records(outputs_for(task, data, batch), batch)
    assert all(len(array) == BATCH for array in records.values())


@pytest.mark.sampled(8)
def test_the_baseline_is_what_a_naive_guesser_scores(opened):
    task, data = opened
    found = task.baseline(data)
    assert found["name"] and set(found["scores"]) == {"validation", "test"}
    batches = [batch_of(data, split, data.num_examples(split)) for split in ("train", "test")]
    train, test = (batch["targets"] for batch in batches)
    scores = found["scores"]["test"]
    assert set(scores) == set(task.better)
    if train.dtype == np.float32:  # the guess is the mean, and targets are centred on it
        assert scores["loss"] == pytest.approx(np.mean((test - train.mean()) ** 2), abs=1e-4)
    elif train.dtype == bool:
        guess = train.mean(axis=0) > 0.5
        assert scores["accuracy"] == pytest.approx(np.mean((test == guess).all(axis=1)), abs=1e-6)
    else:
        right = GUESSERS.get(name_of(task), commonest)(*batches) == test
        assert scores["accuracy"] == pytest.approx(np.mean(right[test >= 0]), abs=1e-6)


@pytest.mark.sampled(5)
def test_no_outputs_that_read_nothing_beat_the_baseline_on_training_data(opened):
    task, data = opened
    train = batch_of(data, "train", data.num_examples("train"))
    guess = task.family.guess(data.labels("train"), data.sizes["num_classes"], data.center, data.scale)
    leading = train["targets"].shape if data.labels_are_sequences else train["targets"].shape[:1]
    score = lambda logits: task.finish(totals(task.metrics(jnp.broadcast_to(logits, (*leading, len(guess))), train)))
    random = np.random.default_rng(0)
    best = score(jnp.asarray(guess))["loss"]
    for _ in range(5):
        assert best <= score(jnp.asarray(guess + random.normal(size=guess.shape), jnp.float32))["loss"] + 1e-3


def test_a_task_of_the_table_is_built_from_its_own_options(opened):
    task, _ = opened
    name = name_of(task)
    options = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    assert build({"name": name, **options}) == task and hash(task) == hash(build({"name": name, **options}))
