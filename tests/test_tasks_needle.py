"""Needle and order: drawn as they say, the same everywhere, and with the distance that the report draws by."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from xformer.tasks import Needle, Order, vocab

CODE = """
import hashlib
from xformer.tasks import Needle, Order
for task in (Needle(max_len=40, num_train=50, num_validation=9, num_test=9, data_seed=3), Order(max_len=40)):
    print(hashlib.sha256(b"".join(split.tokens.tobytes() for split in task.generate().values())).hexdigest())
"""
FILLERS, CLASSES, CUE = range(1, 9), range(9, 17), 17


def rows(examples):
    return np.asarray(examples.tokens).reshape(len(examples), -1)


@pytest.fixture(scope="module", params=["needle", "order-2", "order-8"])
def drawn(request):
    """(task, its splits)."""
    name, _, candidates = request.param.partition("-")
    sizes = {"max_len": 32, "num_train": 6_000, "num_validation": 500, "num_test": 500}
    task = Order(num_candidates=int(candidates), **sizes) if name == "order" else Needle(**sizes)
    return task, task.generate()


def test_an_example_is_what_the_docstring_says(drawn):
    """Written down from the definition, example by example."""
    task, splits = drawn
    for examples in splits.values():
        for row, label in zip(rows(examples).tolist(), examples.labels.tolist(), strict=True):
            classes = [symbol for symbol in row if symbol in CLASSES]
            assert len(row) == 32 and all(symbol in FILLERS for symbol in row if symbol not in (*CLASSES, CUE))
            assert len(classes) == len(set(classes)) == getattr(task, "num_candidates", 1)
            answer = row[row.index(CUE) + 1] if isinstance(task, Order) else classes[0]
            assert row.count(CUE) == isinstance(task, Order) and label == answer - CLASSES[0]


def test_classes_places_and_fillers_are_evenly_drawn(drawn):
    task, splits = drawn
    train = splits["train"]
    ids = rows(train)
    is_class = (ids >= CLASSES[0]) & (ids < CUE)

    def even(counts, expected):
        deviation = np.sqrt(expected.sum() * (expected / expected.sum()) * (1 - expected / expected.sum()))
        assert (abs(counts - expected) < 5 * deviation).all(), (counts, expected)

    every = np.full(8, len(train) / 8)
    even(np.bincount(train.labels, minlength=8), every)
    fillers = np.bincount(ids[ids < CLASSES[0]], minlength=9)[1:]
    even(fillers, np.full(8, fillers.sum() / 8))
    even(np.bincount(np.argwhere(is_class)[:, 1], minlength=32), _places(task, len(train)))
    if isinstance(task, Order):  # the pair of cue and class may begin anywhere but at the last place
        even((ids == CUE).sum(axis=0)[:31], np.full(31, len(train) / 31))


def _places(task, count):
    """How often a class is expected at each of 32 places."""
    if not isinstance(task, Order):
        return np.full(32, count / 32)
    # The pair begins at each of 31 places as often; the other classes are even on what is left.
    others = task.num_candidates - 1
    expected = np.zeros(32)
    for cue in range(31):
        share = np.full(32, others / 30)
        share[cue], share[cue + 1] = 0, 1
        expected += share / 31
    return expected * count


def test_no_text_is_in_two_splits_or_twice(drawn):
    _, splits = drawn
    texts = [row.tobytes() for examples in splits.values() for row in rows(examples)]
    assert len(texts) == len(set(texts)) == 7_000


def test_the_distance_counts_from_a_cls_vector(drawn):
    task, splits = drawn
    ids = rows(splits["test"]).astype(np.int32)
    records = task.records(np.zeros((len(ids), 8), np.float32), {"inputs": ids, "targets": splits["test"].labels})
    place = [
        row.index(CUE) + 1 if isinstance(task, Order) else next(i for i, x in enumerate(row) if x in CLASSES)
        for row in ids.tolist()
    ]
    assert records["distance"].tolist() == [where + 1 for where in place]  # the CLS vector stands at position 0
    none = task.records(np.zeros((1, 8)), {"inputs": np.ones((1, 32), np.int32), "targets": np.zeros(1, np.int32)})
    assert none["distance"].tolist() == [0]


def test_small_splits_do_not_depend_on_the_training_split():
    few, many = (Needle(max_len=32, num_train=count, num_test=20).generate() for count in (10, 300))
    assert (few["test"].tokens == many["test"].tokens).all()
    assert (few["train"].tokens == many["train"].tokens[: few["train"].tokens.size]).all()
    other = Needle(max_len=32, num_train=10, num_test=20, data_seed=1).generate()
    assert (other["test"].tokens != few["test"].tokens).any()


def test_another_process_draws_the_same():
    found = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    ).stdout.split()
    tasks = (Needle(max_len=40, num_train=50, num_validation=9, num_test=9, data_seed=3), Order(max_len=40))
    digest = lambda task: hashlib.sha256(b"".join(split.tokens.tobytes() for split in task.generate().values()))
    assert found == [digest(task).hexdigest() for task in tasks]


def test_texts_are_symbols_and_come_back(tmp_path):
    task = Order(max_len=32, num_train=20, num_validation=5, num_test=5)
    task.prepare(tmp_path)
    data = task.open(tmp_path)
    text = data.vocabulary.decode(data.examples("test")[0])
    assert isinstance(data.vocabulary, vocab.Symbols) and "> " in text and len(text.split()) == 32
    assert data.vocabulary.encode(text) == data.examples("test")[0].tolist()
    assert "num_candidates=4" in data.info["source"]


def test_baselines_are_as_good_as_chance_among_what_they_know(tmp_path):
    sizes = {"max_len": 32, "num_train": 2_000, "num_validation": 50, "num_test": 2_000}
    for task, chance in ((Needle(**sizes), 1 / 8), (Order(num_candidates=4, **sizes), 1 / 4)):
        task.prepare(tmp_path)
        scores = task.baseline(task.open(tmp_path))["scores"]["test"]
        assert scores["accuracy"] == pytest.approx(chance, abs=0.035)
        assert scores["loss"] == pytest.approx(-np.log(chance), abs=0.02)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Needle(max_len=15), "needle: max_len must be an int of at least 16, got 15"),
        (lambda: Needle(num_test=0), "needle: num_test must be an int of at least 1, got 0"),
        (lambda: Order(num_candidates=1), "order: num_candidates must be an int of at least 2, got 1"),
        (lambda: Order(num_candidates=9), "order: num_candidates must be at most 8, got 9"),
        (lambda: Order(data_seed=-1), "order: data_seed must be an int of at least 0, got -1"),
    ],
)
def test_wrong_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
