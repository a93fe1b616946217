"""Vocabularies: nothing lost, ordered, stored, the same in every process."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xformer.tasks import Preprocessing, load_preprocessing, vocab

CORPUS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog", "naïve café, 東京 🙂"] * 5
SUBWORD = vocab.Subword.train(CORPUS, 300)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("vocabulary", [vocab.Bytes(), SUBWORD], ids=["bytes", "subword"])
@given(text=TEXTS)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_text_comes_back(vocabulary, text):
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert all(0 < index < vocabulary.size for index in ids)
    assert vocabulary.encode_batch([text, "x"]) == [ids, vocabulary.encode("x")]
    assert vocabulary.decode([*ids, 0, 0]) == text


@pytest.mark.parametrize("vocabulary", [vocab.Bytes(), SUBWORD], ids=["bytes", "subword"])
@pytest.mark.parametrize("text", ["<pad>", "[PAD]", "</s><unk>", "\x00", " two  spaces ", "\r\n\t"])
def test_no_text_is_special(vocabulary, text):
    assert vocabulary.decode(vocabulary.encode(text)) == text


@pytest.mark.parametrize("vocabulary", [vocab.Bytes(), SUBWORD], ids=["bytes", "subword"])
def test_what_has_no_utf8_becomes_a_question_mark(vocabulary):
    assert vocabulary.decode(vocabulary.encode("a\ud800b")) == "a?b"


def test_cut_characters_do_not_break_decoding():
    assert vocab.Bytes().decode(vocab.Bytes().encode("é")[:1]) == "\ufffd"


def test_subwords_are_learnt_up_to_their_number():
    assert vocab.Subword.train(CORPUS, 270).size == 270
    assert 270 < SUBWORD.size <= 300  # the texts hold no more pairs
    assert len(SUBWORD.encode("the cat sat")) < len(vocab.Bytes().encode("the cat sat")) / 2


@pytest.mark.parametrize(
    "vocabulary", [vocab.Bytes(), SUBWORD, vocab.Symbols(("[a", "b", "]"))], ids=["bytes", "subword", "symbols"]
)
def test_stored_vocabulary_gives_the_same_ids(vocabulary, tmp_path):
    preprocessing = Preprocessing(vocabulary, 5, ["no", "yes"])
    preprocessing.save(tmp_path / "run")
    loaded = load_preprocessing(tmp_path / "run")
    assert loaded.vocabulary.to_json() == vocabulary.to_json()
    assert (loaded.vocabulary.size, loaded.max_len, loaded.class_names) == (vocabulary.size, 5, ["no", "yes"])
    texts = ["[a b ]", "bb"]
    for name, array in preprocessing(texts).items():
        assert (loaded(texts)[name] == array).all()
    vocabulary.save(tmp_path / "vocabulary.json")
    assert vocab.load(tmp_path / "vocabulary.json").encode("[a b ]") == vocabulary.encode("[a b ]")


def test_preprocessing_cuts_pads_and_masks():
    arguments = Preprocessing(vocab.Bytes(), 3, [])(["a", "abcd"])
    assert arguments["inputs"].tolist() == [[98, 0, 0], [98, 99, 100]]
    assert arguments["inputs"].dtype == "int32"
    assert arguments["mask"].tolist() == [[True, False, False], [True, True, True]]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("abc", "list of strings"),
        ([1], "list of strings"),
        (iter(["a"]), "list of strings"),
        (["\ud800"], "list of strings"),
        (["a", ""], "text 1 of 2 is empty"),
    ],
)
def test_preprocessing_refuses_what_is_no_list_of_texts(texts, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(vocab.Bytes(), 3, [])(texts)


def test_unknown_symbols_and_kinds_are_named():
    with pytest.raises(ValueError, match="unknown symbol 'x'"):
        vocab.Symbols(("a", "b")).encode("a x b")
    with pytest.raises(ValueError, match="allowed: bytes, symbols, pixels, image, subword"):
        vocab.from_json({"kind": "words"})


PROGRAM = """
import hashlib, json, sys
from xformer.tasks import vocab
texts = json.load(sys.stdin)
print(hashlib.sha256(json.dumps(vocab.Subword.train(texts, 400).to_json()).encode()).hexdigest())
"""


def test_training_gives_the_same_subwords_in_every_process():
    # Many pairs that are equally frequent, where an order by hash would show.
    texts = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(300)]
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps(texts),
            env=os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, threads in (("1", "1"), ("2", "4"), ("3", "2"))
    }
    assert len(digests) == 1
