"""The arena's release files: read as its own code reads them, and named where they are broken."""

import pytest

from xformer.tasks import ListOps, Retrieval, Tagging

HEAD = "Source\tTarget\n"
LINES = {
    "train": "( ( ( [MAX 2 ) 9 ) ] )\t9\n( ( ( [SM 7 ) ( ( ( [MIN 8 ) 5 ) ] ) ) ] )\t2\n",
    "val": "( ( ( [MED 1 ) 4 ) ] )\t2\n",
    "test": "( ( ( [MIN 3 ) 1 ) ] )\t1\n",
}


def write_listops(folder, **changed):
    for part, lines in (LINES | changed).items():
        (folder / f"basic_{part}.tsv").write_text(HEAD + lines)
    return str(folder)


def write_papers(folder, **changed):
    for part in ("train", "eval", "test"):
        line = f'1.0\tP1\tP2\tOne "{part}" text\tanother\n0.0\tP3\tP4\tfirst\tsecond é\n'
        (folder / f"new_aan_pairs.{part}.tsv").write_text(changed.get(part, line), encoding="utf-8")
    return str(folder)


def test_listops_without_its_parentheses(tmp_path):
    task = ListOps(path=write_listops(tmp_path))
    task.prepare(tmp_path / "data")
    data = task.open(tmp_path / "data")
    batch = next(data.batches("train", 2, seed=0, shuffle=False, epochs=1))
    assert [data.vocabulary.decode(row) for row in batch["inputs"]] == ["[MAX 2 9 ]", "[SM 7 [MIN 8 5 ] ]"]
    assert list(batch["targets"]) == [9, 2] and data.info["source"] == f"the arena's release in {tmp_path}"
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 2, "validation": 1, "test": 1}
    tagging = Tagging("listops_2k", path=str(tmp_path))
    tagging.prepare(tmp_path / "data")
    assert tagging.open(tmp_path / "data").num_examples("train") == 2


@pytest.mark.parametrize("more", [{"num_train": 5}, {"num_validation": 7}, {"data_seed": 1}])
def test_sizes_and_seed_are_for_generated_expressions(more):
    (key,) = more
    with pytest.raises(
        ValueError, match=f"listops: {key} is for generated expressions, got {more[key]} with path 'somewhere'"
    ):
        ListOps(path="somewhere", **more)


def test_pairs_of_papers_with_their_own_splits(tmp_path):
    task = Retrieval(path=write_papers(tmp_path), max_len=30)
    task.prepare(tmp_path / "data")
    data = task.open(tmp_path / "data")
    batch = next(data.batches("validation", 2, seed=0, shuffle=False, epochs=1))
    texts = [[data.vocabulary.decode(row) for row in batch[key]] for key in ("inputs", "inputs2")]
    assert texts == [['One "eval" text', "first"], ["another", "second é"]] and list(batch["targets"]) == [1, 0]


@pytest.mark.parametrize(
    ("task", "changed", "message"),
    [
        (ListOps, {"val": "[MAX 2 9 ] 9\n"}, "basic_val.tsv line 2: has 1 fields, takes 2"),
        (ListOps, {"test": "[MAX 2 x ]\t9\n"}, "basic_test.tsv line 2: unknown symbol 'x'"),
        (ListOps, {"train": "[MAX 2 9 ]\t10\n"}, "basic_train.tsv line 2: a label must be from 0 to 9, got '10'"),
        (Retrieval, {"eval": "maybe\tP1\tP2\ta\tb\n"}, "eval.tsv line 1: a label must be from 0 to 1, got 'maybe'"),
        (Retrieval, {"test": "1 P1 P2\n"}, "test.tsv line 1: has 1 fields, takes 5"),
    ],
)
def test_broken_files_are_named(task, changed, message, tmp_path):
    write = write_listops if task is ListOps else write_papers
    with pytest.raises(ValueError, match=message):
        task(path=write(tmp_path, **changed)).prepare(tmp_path / "data")


@pytest.mark.parametrize(("task", "missing"), [(ListOps, "basic_val.tsv"), (Retrieval, "new_aan_pairs.test.tsv")])
def test_missing_files_are_named(task, missing, tmp_path):
    (write_listops if task is ListOps else write_papers)(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=rf"path: .* has no {missing}; takes"):
        task(path=str(tmp_path)).prepare(tmp_path / "data")
