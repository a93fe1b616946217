"""The classifier by words that every text classification is compared with."""

import json
import logging

import numpy as np
import pytest

from tests.conformance_tasks import WORDS, write_documents
from xformer import extras
from xformer.tasks import Documents, Retrieval, bag_of_words

pytest.importorskip("sklearn")


@pytest.fixture
def opened(tmp_path):
    def make(**options):
        task = Documents(**{"path": write_documents(tmp_path), "max_len": 128, **options})
        task.prepare(tmp_path / "data")
        return task, task.open(tmp_path / "data")

    return make


def test_words_that_decide_the_class_are_found(opened):
    task, data = opened(label_field="class", test_share=0.3)
    found = task.baseline(data)
    (other,) = found["others"]
    assert other["title"] == "TF-IDF"
    assert other["scores"]["test"]["accuracy"] == 1 > found["scores"]["test"]["accuracy"]
    assert other["scores"]["test"]["loss"] < found["scores"]["test"]["loss"]
    assert set(other["scores"]["validation"]) == set(task.better)
    assert task.baseline(data)["others"][0] is other  # the next run of a comparison has it at once


def test_it_sees_what_the_model_sees(opened):
    """The words that decide stand behind the tenth token: cut there, nothing is left to know."""
    task, data = opened(label_field="class", max_len=10)
    (other,) = task.baseline(data)["others"]
    assert other["scores"]["test"]["accuracy"] <= task.baseline(data)["scores"]["test"]["accuracy"]


def test_several_labels(opened):
    task, data = opened(label_field="labels", kind="labels")
    (other,) = task.baseline(data)["others"]
    assert other["scores"]["test"]["macro_f1"] == 1 and len(data.class_names) == len(WORDS)


def test_numbers_have_no_such_baseline(opened):
    task, data = opened(label_field="number", kind="number")
    assert "others" not in task.baseline(data)


def test_pairs_are_compared_by_their_words(tmp_path):
    random = np.random.default_rng(0)
    words = [f"w{i}" for i in range(8)]
    rows = []
    for i in range(200):
        first = words[int(random.integers(8))]
        second = first if i % 2 else words[(words.index(first) + 1) % 8]
        rows.append({"text": f"{i} {first}", "text2": f"{second}", "label": i % 2})
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = Retrieval(path=str(path), max_len=32)
    task.prepare(tmp_path)
    (other,) = task.baseline(task.open(tmp_path))["others"]
    assert other["scores"]["test"]["accuracy"] == 1


def test_large_training_sets_are_read_in_part_and_that_is_said(opened, monkeypatch):
    monkeypatch.setattr(bag_of_words, "MAX_TEXTS", 20)
    task, data = opened(label_field="class", validation_share=0.2)
    (other,) = task.baseline(data)["others"]
    assert "20 of 42 training texts" in other["name"]


def test_without_words_or_scikit_learn_there_are_no_scores_but_a_reason(tmp_path, opened, monkeypatch, caplog):
    path = tmp_path / "signs.jsonl"
    path.write_text("\n".join(json.dumps({"text": "!" * (i + 1), "label": i % 2}) for i in range(30)))
    task, data = opened(path=str(path))
    (other,) = task.baseline(data)["others"]
    assert other["scores"] == {} and other["missing"] == "the training texts hold no word"
    load = extras.load

    def no_sklearn(name):
        if name.startswith("sklearn"):
            error = ModuleNotFoundError(name="sklearn")
            raise extras.MissingExtra(extras.explain(error), name="sklearn")
        return load(name)

    monkeypatch.setattr(extras, "load", no_sklearn)
    task, data = opened(label_field="class", max_len=64)
    with caplog.at_level(logging.WARNING):
        (other,) = task.baseline(data)["others"]
    assert other["scores"] == {} and "pip install 'xformer-jax[report]'" in other["missing"]
    assert other["missing"] in caplog.text
