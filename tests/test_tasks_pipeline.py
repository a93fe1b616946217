"""Batches: every example once, the same order everywhere, exact state; loss and metrics that fillers don't touch."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xformer.tasks import ListOps, TaskData, store, vocab
from xformer.tasks.ragged import Ragged

MAX_LEN = 7


def make_data(count: int = 10) -> TaskData:
    """Example i is i + 1 repeated i + 1 times, with label i mod 3; of ten examples, three are cut."""
    examples = Ragged.from_lists([[i + 1] * (i + 1) for i in range(count)], [i % 3 for i in range(count)], np.uint8)
    corpus = store.Corpus({"train": examples, "test": examples}, vocab.Bytes(), ["a", "b", "c"], {"source": "made"})
    return TaskData(corpus, MAX_LEN)


def who(batch) -> list[int]:
    """The examples of a batch by number, None for a filler."""
    return [int(row[0]) - 1 if weight else None for row, weight in zip(batch["inputs"], batch["weights"], strict=True)]


def take(batches, count: int) -> list[list[int]]:
    return [who(batch) for batch in itertools.islice(batches, count)]


def test_shapes_dtypes_padding_and_truncation():
    batch = next(make_data().batches("train", 10, seed=0, shuffle=False, epochs=1))
    assert {name: (array.dtype.name, array.shape) for name, array in batch.items()} == {
        "inputs": ("int32", (10, MAX_LEN)),
        "targets": ("int32", (10,)),
        "weights": ("float32", (10,)),
    }
    for index, row in enumerate(batch["inputs"]):
        length = min(index + 1, MAX_LEN)
        assert row.tolist() == [index + 1] * length + [0] * (MAX_LEN - length)
    assert batch["targets"].tolist() == [i % 3 for i in range(10)]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 16])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_evaluation_sees_every_example_once(batch_size, shards):
    parts = [
        list(
            make_data().batches("test", batch_size, seed=0, shuffle=False, epochs=1, shard_index=s, shard_count=shards)
        )
        for s in range(shards)
    ]
    assert len({len(part) for part in parts}) == 1
    batches = [batch for part in parts for batch in part]
    assert all(batch["inputs"].shape == (batch_size, MAX_LEN) for batch in batches)
    seen = [example for batch in batches for example in who(batch) if example is not None]
    assert sorted(seen) == list(range(10))
    assert sum(batch["weights"].sum() for batch in batches) == 10
    assert not any(batch["inputs"][batch["weights"] == 0].any() for batch in batches)


def test_training_is_shuffled_anew_each_epoch_and_leaves_nothing_out():
    stream = take(make_data().batches("train", 4, seed=3, shuffle=True, epochs=None), 10)
    order = list(itertools.chain(*stream))
    epochs = [order[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_seeds_give_different_orders_and_share_no_epoch():
    epochs = set()
    for seed in range(3):
        order = list(itertools.chain(*take(make_data().batches("train", 10, seed=seed, shuffle=True, epochs=4), 9)))
        epochs |= {tuple(order[start : start + 10]) for start in range(0, 40, 10)}
    assert len(epochs) == 12


@pytest.mark.parametrize("shuffle", [True, False])
def test_shards_together_are_the_global_batches_row_for_row(shuffle):
    options = {"seed": 5, "shuffle": shuffle, "epochs": None}
    whole = take(make_data(50).batches("train", 12, **options), 20)
    for shards in (2, 3, 4):
        parts = [
            take(make_data(50).batches("train", 12 // shards, **options, shard_index=s, shard_count=shards), 20)
            for s in range(shards)
        ]
        assert [list(itertools.chain(*rows)) for rows in zip(*parts, strict=True)] == whole


def test_state_resumes_in_the_middle_of_an_epoch():
    def start():
        return make_data().batches("train", 3, seed=1, shuffle=True, epochs=None)

    batches = start()
    take(batches, 5)
    state = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 8)
    resumed = start()
    resumed.set_state(state)
    assert take(resumed, 8) == expected
    again = make_data().batches("train", 1, seed=1, shuffle=True, epochs=None, shard_index=2, shard_count=3)
    again.set_state(state)
    assert take(again, 8) == [rows[2:] for rows in expected]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"split": "dev"}, "split must be one of train, test, got 'dev'"),
        ({"batch_size": 0}, "batch_size"),
        ({"shard_index": 2, "shard_count": 2}, "shard_index"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_wrong_requests_are_refused(options, named):
    arguments = {"split": "train", "batch_size": 2, "seed": 0, "shuffle": True, "epochs": None} | options
    with pytest.raises(ValueError, match=named):
        make_data().batches(arguments.pop("split"), arguments.pop("batch_size"), **arguments)


def test_info_says_what_was_cut_and_what_chance_is():
    info = make_data().info
    assert json.loads(json.dumps(info)) == info
    assert info["truncated"] == {"train": 0.3, "test": 0.3}
    assert info["num_examples"] == {"train": 10, "test": 10}
    assert info["label_shares"]["test"] == [0.4, 0.3, 0.3]
    assert info["majority_accuracy"]["test"] == 0.4
    assert (info["vocab_size"], info["num_classes"], info["max_len"], info["source"]) == (257, 3, MAX_LEN, "made")


def test_metrics_are_sums_over_real_examples():
    task = ListOps()
    logits = jnp.asarray([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [jnp.nan] * 3])
    batch = {"targets": jnp.asarray([0, 2, 1, 0]), "weights": jnp.asarray([1.0, 1.0, 0.5, 0.0])}
    metrics = jax.jit(task.metrics)(logits.astype(jnp.bfloat16), batch)
    log_sum = np.log(np.exp([2.0, 1.0]) + 2)
    expected = (log_sum[0] - 2) + log_sum[1] + 0.5 * (log_sum[1] - 1)
    pairs = {name: metrics[name] for name in ("loss", "accuracy")}
    assert all(part.dtype == jnp.float32 and part.shape == (4,) for pair in pairs.values() for part in pair)
    sums = {name: (float((values * weights).sum()), float(weights.sum())) for name, (values, weights) in pairs.items()}
    sums |= {name: np.asarray(metrics[name]) for name in ("f1", "calibration")}
    np.testing.assert_allclose(sums["loss"], (expected, 2.5), rtol=1e-6)
    np.testing.assert_allclose(sums["accuracy"], (1.5, 2.5))
    # Class 0: one hit; class 1: half a hit, one false alarm; class 2: one miss. Confidences e^2 / (e^2 + 2) and, twice,
    # e / (e + 2), which share a bin: 1.5 examples, half a hit.
    sure, unsure = np.exp(2) / (np.exp(2) + 2), np.e / (np.e + 2)
    others = {
        "macro_f1": (1 + 0.5 + 0) / 3,
        "calibration_error": (1 - sure + abs(0.5 - 1.5 * unsure)) / 2.5,
    }
    assert task.finish(sums) == pytest.approx({"loss": expected / 2.5, "accuracy": 0.6} | others)

    def mean_loss(logits):
        values, weights = task.metrics(logits, batch)["loss"]
        return (values * weights).sum() / weights.sum()

    gradient = jax.grad(mean_loss)(logits)
    assert jnp.isfinite(gradient).all() and not gradient[3].any()


def test_inputs_are_the_models_arguments():
    batch = next(make_data().batches("train", 2, seed=0, shuffle=False, epochs=1))
    arguments = ListOps().inputs(batch)
    assert set(arguments) == {"inputs", "mask"}
    assert arguments["mask"].sum(axis=1).tolist() == [1, 2]


@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1])
def test_a_target_that_is_no_class_is_refused_or_nan(wrong):
    task = ListOps("listops_128")
    batch = {"targets": jnp.array([1, wrong]), "weights": jnp.ones(2)}
    logits = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match=f"targets must be from 0 to 2, got {wrong}"):
        task.metrics(logits, batch)
    found = jax.jit(task.metrics)(logits, batch)
    for name in ("loss", "accuracy"):
        assert np.isnan(found[name][0]).tolist() == [False, True]
    assert np.isnan(found["f1"]).any() and np.isnan(found["calibration"]).any()
    filler = batch | {"weights": jnp.array([1.0, 0.0])}
    for found in (jax.jit(task.metrics)(logits, filler), task.metrics(logits, filler)):
        assert all(np.isfinite(part).all() for part in jax.tree.leaves(found))


def test_targets_that_are_no_integers_are_refused():
    for dtype in (jnp.float32, bool):
        with pytest.raises(ValueError, match="targets must be integers from 0 to 2, got dtype"):
            ListOps().metrics(jnp.zeros((1, 3)), {"targets": jnp.ones(1, dtype), "weights": jnp.ones(1)})


@pytest.mark.parametrize("wrong", [[0.7, 2.9], [float("nan")], [True, False], [-1], [2**31], [10**30], ["a"]], ids=str)
def test_labels_that_are_no_whole_numbers_of_32_bits_are_refused(wrong):
    with pytest.raises(ValueError, match="a label must be") as error:
        Ragged.from_lists([[1]] * len(wrong), wrong, np.uint8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [-1, 256, 2**32 + 1, 1.5])
def test_ids_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match="a token id must be"):
        Ragged.from_lists([[1, wrong]], [0], np.uint8)


def test_a_label_without_a_class_is_refused():
    with pytest.raises(ValueError, match=r"label 2 of the train split is not in 0\.\.1"):
        store.Corpus({"train": Ragged.from_lists([[1]], [2], np.uint8)}, vocab.Bytes(), ["a", "b"], {})
