"""Labels and numbers of own documents, pairs of documents, generated tasks: what is read, and what is refused."""

import json

import numpy as np
import pytest

from xformer.tasks import Documents, Retrieval, Tagging
from xformer.tasks.tagging import tagged

WORDS = ("red", "blue", "green")


def write(path, rows, fields=("text", "label")):
    rows = [dict(zip(fields, row, strict=True)) for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    else:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        lines = [delimiter.join(fields), *(delimiter.join(str(row[field]) for field in fields) for row in rows)]
        path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def opened(folder, task):
    task.prepare(folder / "data")
    return task.open(folder / "data")


def contents(data, target):
    found = {}
    for split in data.splits:
        batch = next(data.batches(split, data.num_examples(split), seed=0, shuffle=False, epochs=1))
        for row, label in zip(batch["inputs"], batch["targets"], strict=True):
            found[data.vocabulary.decode(row)] = target(label)
    return found


def labels_of(index):
    return [word for place, word in enumerate(WORDS) if index >> place & 1]


@pytest.mark.parametrize(
    ("name", "spell", "options"),
    [
        ("a.jsonl", list, {}),
        ("b.jsonl", ";".join, {}),
        ("a.csv", " ; ".join, {}),
        ("a.tsv", "|".join, {"separator": "|"}),
    ],
)
def test_labels_of_every_format(tmp_path, name, spell, options):
    path = write(tmp_path / name, [(f"text {i}", spell(labels_of(i))) for i in range(64)])
    data = opened(tmp_path, Documents(path=path, kind="labels", max_len=16, **options))
    assert data.class_names == ["blue", "green", "red"] and data.num_classes == 3
    found = contents(data, lambda row: [name for name, held in zip(data.class_names, row, strict=True) if held])
    assert found == {f"text {i}": sorted(labels_of(i)) for i in range(64)}
    assert data.info["num_examples"] == {"train": 52, "validation": 6, "test": 6}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv"])
def test_numbers_of_every_format(tmp_path, name):
    path = write(tmp_path / name, [(f"text {i}", 1e6 + i / 4) for i in range(64)])
    data = opened(tmp_path, Documents(path=path, kind="number", max_len=16))
    found = contents(data, lambda value: value * data.scale + data.center)
    for text, number in found.items():
        assert number == pytest.approx(1e6 + int(text.split()[1]) / 4, abs=1e-4)
    train = data.labels("train")
    assert train.dtype == np.float64 and data.center == pytest.approx(train.mean())
    batch = next(data.batches("train", 52, seed=0, shuffle=False, epochs=1))
    assert batch["targets"].mean() == pytest.approx(0, abs=1e-5) and batch["targets"].std() == pytest.approx(
        1, rel=1e-5
    )


NO_NUMBER = "line 2: field 'label' must be a number from -3.4e38 to 3.4e38, got "


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        ("number", [("a", 1), ("b", "many")], f"{NO_NUMBER}'many'"),
        ("number", [("a", 1), ("b", True)], f"{NO_NUMBER}True"),
        ("number", [("a", 1), ("b", [2])], f"{NO_NUMBER}[2]"),
        ("number", [("a", 1), ("b", 1e300)], f"{NO_NUMBER}1e+300"),
        ("number", [("a", 1), ("b", "-6e301")], f"{NO_NUMBER}'-6e301'"),
        ("number", [("a", 1), ("b", "nan")], f"{NO_NUMBER}'nan'"),
        ("number", [("a", 1), ("b", "1_0")], f"{NO_NUMBER}'1_0'"),
        ("number", [("a", 3), ("b", 3.0)], "has one number only, 3.0; two or more are needed"),
        ("labels", [("a", ["x"]), ("b", 1.5)], "line 2: field 'label' must be a list of labels, or labels with ';'"),
        ("labels", [("a", ["x"]), ("b", [1.5])], "line 2: field 'label' must be a label (int or printable string)"),
        ("labels", [("a", "x;;y"), ("b", "x")], "line 1: field 'label' must be a label (int or printable string)"),
        ("labels", [("a", [1, "x"]), ("b", ["1"])], "line 2: field 'label' has the string 1, which stands before as"),
        ("labels", [("a", ["1", 1])], "line 1: field 'label' has the number 1, which stands before as the string"),
        ("labels", [("a", []), ("b", "")], "no document in"),
    ],
)  # fmt: skip
def test_what_is_no_such_label_is_refused_with_its_place(tmp_path, kind, rows, message):
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError) as error:
        Documents(path=path, kind=kind).prepare(tmp_path / "data")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_label_that_training_does_not_know_is_refused(tmp_path):
    train = write(tmp_path / "train.jsonl", [(f"text {i}", labels_of(i)) for i in range(20)])
    test = write(tmp_path / "test.jsonl", [("a", ["red"]), ("b", ["red", "pink"])])
    with pytest.raises(ValueError, match=r"test\.jsonl line 2: label 'pink' is not in the training documents \(blue, "):
        Documents(path=train, test_path=test, kind="labels").prepare(tmp_path / "data")


@pytest.mark.parametrize("kind", ["labels", "number"])
def test_folders_have_classes_only(tmp_path, kind):
    (tmp_path / "docs" / "a").mkdir(parents=True)
    (tmp_path / "docs" / "a" / "1.txt").write_text("text")
    with pytest.raises(ValueError, match=f"kind: got '{kind}', takes 'classes' for a folder"):
        Documents(path=str(tmp_path / "docs"), kind=kind).prepare(tmp_path / "data")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "class"}, "documents: kind must be one of classes, labels, number, got 'class'"),
        ({"separator": ""}, "documents: separator must be a non-empty string, got ''"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Documents(path="a.jsonl", **options)


def test_kinds_of_one_file_are_kept_apart(tmp_path):
    path = write(tmp_path / "a.jsonl", [(f"text {i}", i % 4) for i in range(40)])
    kinds = {
        kind: opened(tmp_path, Documents(path=path, kind=kind, max_len=16)) for kind in ("classes", "labels", "number")
    }
    assert [data.num_classes for data in kinds.values()] == [4, 4, 1]
    assert len({data.fingerprint["digest"] for data in kinds.values()}) == 3


def test_own_pairs(tmp_path):
    rows = [(f"first {i}", f"and second {i}", "yes" if i % 2 else "no") for i in range(60)]
    path = write(tmp_path / "a.csv", rows, ("text", "text2", "label"))
    data = opened(tmp_path, Retrieval(path=path, max_len=20))
    assert data.class_names == ["no", "yes"]
    seen = []
    for split in data.splits:
        batch = next(data.batches(split, data.num_examples(split), seed=0, shuffle=False, epochs=1))
        for one, two, target in zip(batch["inputs"], batch["inputs2"], batch["targets"], strict=True):
            seen.append((*map(data.vocabulary.decode, (one, two)), data.class_names[target]))
    assert sorted(seen) == sorted(rows)
    features, truncated = data.preprocess.encode([("short", "x" * 30), ("a", "b")])
    assert set(features) == {"inputs", "mask", "inputs2", "mask2"} and truncated.tolist() == [True, False]
    for wrong in ("ab", ["ab"], [("a", "b", "c")]):
        with pytest.raises(ValueError, match="texts must be a list of pairs of strings"):
            data.preprocess(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text2_field": "text"}, "text2_field must be a string other than text_field, got 'text'"),
        ({"num_train": 0}, "num_train must be an int of at least 1, got 0"),
        ({"test_path": "a.csv"}, "path must be a file where validation_path or test_path is, got ''"),
    ],
)
def test_wrong_options_of_pairs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Retrieval(**options)


def test_pairs_need_their_second_text(tmp_path):
    path = write(tmp_path / "a.jsonl", [("a", 1), ("b", 2)])
    with pytest.raises(ValueError, match="line 1 has no field 'text2'; it has 'text', 'label'"):
        Retrieval(path=path).prepare(tmp_path / "data")
    with pytest.raises(ValueError, match=r"takes a \.jsonl, \.csv or \.tsv file with pairs of texts"):
        Retrieval(path=str(tmp_path)).prepare(tmp_path / "data")


def test_generated_pairs_do_not_depend_on_the_size_of_the_training_split(tmp_path):
    few = Retrieval(max_len=16, num_train=10, num_validation=6, num_test=4)._generate()
    many = Retrieval(max_len=16, num_train=30, num_validation=6, num_test=4)._generate()
    assert few.splits["test"] == many.splits["test"] and few.second["validation"] == many.second["validation"]
    assert many.splits["train"][0][:10] == few.splits["train"][0]
    assert few.splits["train"][1].count(1) == 5 and all(8 <= len(text) <= 16 for text in few.splits["train"][0])
    other = Retrieval(max_len=16, num_train=10, num_validation=6, num_test=4, data_seed=1)._generate()
    assert other.splits["test"] != few.splits["test"]


def naive_tags(symbols):
    """The innermost bracket that is open before each token, by looking back from it."""
    tags = []
    for place in range(len(symbols)):
        depth, tag = 0, -1
        for before in reversed(symbols[:place]):
            depth += 1 if before == "]" else -1 if before.startswith("[") else 0
            if depth < 0:
                tag = ["[MIN", "[MAX", "[MED", "[SM"].index(before)
                break
        tags.append(tag)
    return tags


def test_tags_are_those_of_the_innermost_open_bracket(tmp_path):
    task = Tagging(num_train=20, num_validation=5, num_test=5)
    data = opened(tmp_path, task)
    batch = next(data.batches("train", 20, seed=0, shuffle=False, epochs=1))
    for row, targets in zip(batch["inputs"], batch["targets"], strict=True):
        symbols = data.vocabulary.decode(row).split()
        assert targets[: len(symbols)].tolist() == naive_tags(symbols)
        assert (targets[len(symbols) :] == -1).all()
    assert set(tagged(task.generate()["test"]).labels.tolist()) == {-1, 0, 1, 2, 3}


def test_a_text_with_two_labels_is_said(tmp_path, caplog):
    rows = [{"text": f"text {i // 2}", "label": "pos" if i % 2 else "neg"} for i in range(60)]
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Documents(path=str(path), max_len=16)
    with caplog.at_level("WARNING"):
        task.prepare(tmp_path / "data")
    assert "30 texts stand there more than once, with different labels" in caplog.text
    assert task.open(tmp_path / "data").info["texts_with_several_labels"] == 30


def test_half_a_surrogate_pair_is_refused(tmp_path):
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "fine", "label": "a"}\n{"text": "x \\ud800 y", "label": "b"}\n')
    with pytest.raises(ValueError, match=r"line 2.*half a surrogate pair, .* at character 2"):
        Documents(path=str(path), max_len=16).prepare(tmp_path / "data")
