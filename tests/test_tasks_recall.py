"""Recall: the published distribution, drawn again here from its definition, and its four settings."""

import jax.numpy as jnp
import numpy as np
import pytest

import xformer
from xformer.tasks import Recall, recall
from xformer.tasks.recall import PRESETS, Preset

SIZES = {"num_train": 3_000, "num_validation": 40, "num_test": 40}


def arrays(examples):
    return (np.asarray(array).reshape(len(examples), -1) for array in (examples.tokens, examples.labels))


def test_the_published_settings_are_the_published_ones():
    published = {(64, 4), (128, 8), (256, 16), (512, 64)}
    found = [preset for preset in PRESETS.values() if (preset.length, preset.num_pairs) in published]
    assert {(preset.length, preset.num_pairs) for preset in found if preset.num_symbols == 8_192} == published
    assert {preset.num_train for preset in found if preset.num_symbols == 8_192} == {100_000}
    task = Recall()
    assert (task.num_validation, task.num_test, task.alpha, len(task.symbols)) == (3_000, 3_000, 0.01, 8_192)
    assert (PRESETS["recall_4k"].length, PRESETS["recall_4k"].num_pairs) == (4_096, 256)
    assert all(preset.num_symbols <= 512 for name, preset in PRESETS.items() if name.endswith("small"))


@pytest.mark.parametrize("noise", ["filler", "random"])
def test_an_example_is_what_the_docstring_says(noise):
    task = Recall(preset="recall_64_small", noise=noise, **SIZES)
    pairs, half = 4, 32
    for examples in task.generate().values():
        for row, labels in zip(*arrays(examples), strict=True):
            keys, values = row[0 : 2 * pairs : 2].tolist(), row[1 : 2 * pairs : 2].tolist()
            assert len(set(keys)) == len(set(values)) == pairs
            assert all(2 <= key <= half for key in keys) and all(half < value <= 2 * half for value in values)
            places = np.flatnonzero(labels >= 0)
            assert len(places) == pairs and all(place >= 2 * pairs and place % 2 == 0 for place in places)
            # Each key once, with its value as the label.
            assert sorted(row[places].tolist()) == sorted(keys)
            told = dict(zip(keys, values, strict=True))
            assert all(labels[place] == told[row[place]] - half - 1 for place in places)
            rest = np.delete(row[2 * pairs :], places - 2 * pairs)
            assert (rest == 1).all() if noise == "filler" else (rest > 1).all() and rest.max() > half


def test_gaps_are_drawn_by_weight_without_replacement():
    """Against NumPy's own weighted choice: which gaps there are, and which pair has the nearest."""
    rows, labels = arrays(Recall(preset="recall_64_small", **SIZES).generate()["train"])
    gaps = (np.nonzero(labels >= 0)[1].reshape(len(rows), 4) - 8) // 2
    weights = np.arange(1, 29) ** (0.01 - 1)
    random = np.random.default_rng(0)
    naive = np.array([random.choice(28, 4, replace=False, p=weights / weights.sum()) for _ in range(3_000)])
    share = lambda drawn: np.bincount(drawn.ravel(), minlength=28) / 3_000
    np.testing.assert_allclose(share(gaps), share(naive), atol=0.06)
    # The first pair's gap is drawn first, by the weights themselves.
    first = np.array([np.flatnonzero(row[8:] == row[0])[0] // 2 for row in rows])
    np.testing.assert_allclose(np.bincount(first, minlength=28) / 3_000, weights / weights.sum(), atol=0.04)


def test_keys_and_values_are_evenly_drawn_and_nothing_comes_twice():
    splits = Recall(preset="recall_64_small", **SIZES).generate()
    rows, _ = arrays(splits["train"])
    for symbols, low, high in ((rows[:, 0:8:2], 2, 32), (rows[:, 1:8:2], 33, 64)):
        counts = np.bincount(symbols.ravel())[low : high + 1]
        expected = 12_000 / len(counts)
        assert (abs(counts - expected) < 5 * expected**0.5).all()
    texts = [row.tobytes() for examples in splits.values() for row in next(arrays(examples))]
    assert len(set(texts)) == len(texts) == 3_080


def test_the_longest_fits_its_pairs():
    task = Recall(preset="recall_4k", num_train=2, num_validation=1, num_test=1)
    rows, labels = arrays(task.generate()["train"])
    assert rows.shape == (2, 4_096) and ((labels >= 0).sum(axis=1) == 256).all()


def test_the_baseline_is_right_once_in_as_many_labels_as_pairs(tmp_path):
    task = Recall(preset="recall_64_small", num_train=20, num_validation=30, num_test=30)
    task.prepare(tmp_path)
    scores = task.baseline(task.open(tmp_path))["scores"]
    assert {split: found["accuracy"] for split, found in scores.items()} == {"validation": 0.25, "test": 0.25}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "recall_65"}, "recall: preset must be one of recall_64, recall_128"),
        ({"noise": "none"}, "recall: noise must be one of filler, random, got 'none'"),
        ({"alpha": 0}, "recall: alpha must be a number above 0, got 0"),
        ({"num_train": 0}, "recall: num_train must be an int of at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Recall(**options)


def test_logits_are_asked_for_at_the_labels_and_judged_there(tmp_path):
    task = Recall(preset="recall_64_small", **SIZES)
    task.prepare(tmp_path)
    batch = next(task.open(tmp_path).batches("test", 24, seed=0, shuffle=False, epochs=2))
    places = np.asarray(task.inputs(batch)["places"])
    np.testing.assert_array_equal(places, np.nonzero(batch["targets"] >= 0)[1].reshape(24, 4))
    everywhere = jnp.asarray(np.random.default_rng(0).normal(size=(24, 64, 32)), jnp.float32)
    there = jnp.take_along_axis(everywhere, places[..., None], axis=1)
    found, expected = task.metrics(there, batch), task.metrics(everywhere, batch)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


@pytest.mark.full
def test_the_config_learns_which_value_belongs_to_a_key(tmp_path, monkeypatch):
    """Fewer symbols and tokens, in seconds; knowing the values alone is right in one label of two."""
    monkeypatch.setattr(recall, "PRESETS", {**PRESETS, "recall_64_small": Preset(16, 2, 16, 2_000)})
    overrides = {
        "task.preset": "recall_64_small",
        "task.num_validation": 100,
        "task.num_test": 200,
        "model.width": 32,
        "train.batch_size": 64,
        "train.num_steps": 250,
        "train.eval_every": 250,
        "train.checkpoint_every": 250,
        "train.mesh": {"data": 1},
    }
    result = xformer.fit("recall", tmp_path / "run", overrides=overrides, data_dir=tmp_path / "data")
    assert result["baseline"]["scores"]["test"]["accuracy"] == 0.5 and result["test"]["accuracy"] > 0.9
