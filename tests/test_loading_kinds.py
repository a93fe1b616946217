"""A run of each kind of label back in Python: labels with thresholds, numbers in their own units."""

import json

import numpy as np
import pytest

import xformer
from xformer.tasks import predictions
from xformer.tasks.predictions import LabelPredictions, NumberPredictions, Predictions, TokenPredictions

WORDS = ("red", "blue", "green")
MODEL = {"num_layers": 1, "width": 16, "num_heads": 2, "mlp_dim": 16}
TRAIN = {"num_steps": 3, "batch_size": 8, "eval_every": 3, "checkpoint_every": 3, "mesh": {"data": 1}}


@pytest.fixture(scope="module", params=["labels", "number"])
def run(request, tmp_path_factory):
    """(kind, result, loaded run, rows of the file)."""
    folder = tmp_path_factory.mktemp(request.param)
    rows = []
    for index in range(40):
        held = [word for place, word in enumerate(WORDS) if index >> place & 1]
        rows.append({"text": f"doc {index} {' '.join(held)}", "labels": held, "number": 1000 + 50.0 * len(held)})
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"name": "documents", "path": str(folder / "a.jsonl"), "kind": request.param, "max_len": 24}
    config = {
        "name": request.param,
        "attention": {"name": "full"},
        "model": MODEL,
        "task": task | {"label_field": request.param},
        "optimizer": {"learning_rate": 1e-3},
        "train": TRAIN,
    }
    result = xformer.fit(config, folder / "run", data_dir=folder / "data")
    return request.param, result, xformer.load(folder / "run"), rows, folder


@pytest.mark.sampled(1)
def test_the_result_has_the_metrics_of_its_kind_and_a_baseline(run):
    kind, result, _, _, _ = run
    metrics = {"labels": ["macro_f1", "micro_f1", "accuracy", "loss"], "number": ["r2", "mean_absolute_error", "loss"]}
    assert list(result["better"]) == metrics[kind] and result["select_metric"] == metrics[kind][0]
    assert set(result["test"]) == {*metrics[kind], "examples", "tokens"} and result["test"]["examples"] == 4
    assert set(result["baseline"]["scores"]) == {"validation", "test"}
    assert set(result["baseline"]["scores"]["test"]) == set(metrics[kind])


def test_predictions(run):
    kind, _, loaded, rows, _ = run
    texts = [row["text"] for row in rows[:3]] + ["long " * 20]
    found = loaded.predict(texts)
    assert found.truncated.tolist() == [False, False, False, True]
    if kind == "number":
        assert isinstance(found, NumberPredictions) and found.numbers.shape == (4,)
        assert all(800 < number < 1400 for number in found)  # in the file's units, whatever three steps taught
        assert loaded.predict([]).numbers.shape == (0,)
        with pytest.raises(ValueError, match=r"threshold is for models with several labels a text, got 0\.5"):
            loaded.predict(texts, threshold=0.5)
        return
    assert isinstance(found, LabelPredictions) and found.probabilities.shape == (4, 3)
    for labels, row in zip(found.labels, found.probabilities, strict=True):
        assert labels == [name for name, value in zip(loaded.class_names, row, strict=True) if value >= 0.5]
    assert loaded.predict(texts, threshold=0.0).labels == [loaded.class_names] * 4
    assert loaded.predict(texts, threshold=1.0).labels == [[]] * 4
    only = loaded.predict(texts, threshold={"red": 0.0, "blue": 1.0, "green": 1.0}).labels
    assert only == [["red"]] * 4 and loaded.predict([]).labels == []


def test_kept_examples_are_what_the_loaded_model_says(run):
    kind, result, _, rows, folder = run
    with np.load(folder / "run" / "test_examples.npz") as kept:
        assert np.average(kept["loss"][0], weights=kept["loss"][1]) == pytest.approx(result["test"]["loss"], rel=1e-6)
        shape = (4, 3) if kind == "labels" else (4,)
        assert kept["targets"].shape == kept["predictions"].shape == shape
        if kind == "number":
            assert set(np.round(kept["targets"]).tolist()) <= {row["number"] for row in rows}


@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        (1.5, "threshold must be a number from 0 to 1, or one by label, got 1.5"),
        (True, "threshold must be a number from 0 to 1, or one by label, got True"),
        ({"pink": 0.5}, "threshold must be for labels among a, b, got one for 'pink'"),
    ],
)
def test_wrong_thresholds_are_refused(threshold, message):
    with pytest.raises(ValueError, match=message):
        predictions.thresholds(threshold, ["a", "b"])


def test_a_label_without_a_threshold_has_one_half():
    assert predictions.thresholds({"b": 0.9}, ["a", "b"]).tolist() == [0.5, 0.9]


def test_tokens_and_classes_are_presented_in_words():
    from xformer.tasks import Classification, Preprocessing, TokenClassification, vocab

    preprocess = Preprocessing(vocab.Bytes(), 3, ["x", "y"])
    mask, cut = np.array([[True, True, False]]), np.array([False])
    values = np.array([[[0.9, 0.1], [0.2, 0.8], [1.0, 0.0]]], np.float32)
    tokens = predictions.present(TokenClassification(), values, mask, cut, preprocess)
    assert isinstance(tokens, TokenPredictions) and tokens.labels == [["x", "y"]]
    assert tokens.probabilities[0].shape == (2, 2)
    one = predictions.present(Classification(), values[:, 1], mask, cut, preprocess)
    assert isinstance(one, Predictions) and one.labels == ["y"]
