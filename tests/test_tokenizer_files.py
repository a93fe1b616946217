"""Files of a tokenizer as one tokenizer.json; ids are those that transformers 5.24 gave for the same folders."""

import json

import pytest
import tokenizers

from xformer import tokenizer_files, weights
from xformer.tasks import vocab

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es", "run", "##ning", "!", "中", "été", "ete"]
PAIRS = ["l", "o", "w", "e", "r", "Ġ", "lo", "low", "Ġlow", "er"]
MERGES = "#version: 0.2\nl o\nlo w\nĠ low\ne r\n"


def pieces(folder, **config):
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def pairs(folder, special, last, **config):
    tokens = [*special, *PAIRS, last]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text(MERGES)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ids(folder, text):
    made = tokenizers.Tokenizer.from_str(tokenizer_files.read(folder))
    return made.encode(text).ids


@pytest.mark.parametrize(
    "config, of_the, of_ete",
    [
        ({}, 5, [13]),
        ({"do_lower_case": False}, 1, [12]),
        ({"do_lower_case": False, "strip_accents": True}, 1, [13]),
        ({"do_lower_case": True, "strip_accents": False}, 5, [12]),
    ],
)
def test_word_pieces(tmp_path, config, of_the, of_ete):
    folder = pieces(tmp_path, **config)
    assert ids(folder, "The foxes running!") == [2, of_the, 6, 7, 8, 9, 10, 3]
    assert ids(folder, "中 [MASK] fox") == [2, 11, 4, 6, 3]
    assert ids(folder, "été") == [2, *of_ete, 3]


@pytest.mark.parametrize("prefix, first", [(False, 11), (True, 12)])
def test_byte_pairs_of_roberta(tmp_path, prefix, first):
    folder = pairs(tmp_path, ["<s>", "<pad>", "</s>", "<unk>"], "<mask>", add_prefix_space=prefix)
    assert ids(folder, "lower low") == [0, first, 13, 12, 2]
    assert ids(folder, " low <mask> lower") == [0, 12, 9, 14, 12, 13, 2]
    strips = {"mask_token": {"content": "<mask>", "lstrip": True}}
    (folder / "special_tokens_map.json").write_text(json.dumps(strips))
    assert ids(folder, "low <mask> low") == [0, first, 14, 12, 2]


@pytest.mark.parametrize("prefix, first", [(False, 7), (True, 8)])
def test_byte_pairs_of_gpt2(tmp_path, prefix, first):
    folder = pairs(tmp_path, [], "<|endoftext|>", add_prefix_space=prefix)
    assert ids(folder, "lower low") == [first, 9, 8]
    assert ids(folder, "low<|endoftext|> low") == [first, 10, 8]


def test_a_run_reads_such_folders_and_knows_the_padding(tmp_path):
    found = vocab.Tokenizer(tokenizer_files.read(pieces(tmp_path)))
    assert (found.pad_id, found.size, found.encode("the fox")) == (0, 14, [2, 5, 6, 3])
    told = tmp_path / "told"
    told.mkdir()
    pairs(told, [], "<|endoftext|>", pad_token="<|endoftext|>")
    assert vocab.Tokenizer(tokenizer_files.read(told)).pad_id == 10
    (told / "vocabulary.json").write_text(json.dumps(found.to_json()))
    again = vocab.Tokenizer(tokenizer_files.read(told / "vocabulary.json"))
    assert again.to_json() == found.to_json()


@pytest.mark.parametrize(
    "files, reason",
    [
        ({}, "holds no tokenizer.json, no vocab.txt, and no vocab.json with merges.txt"),
        ({"spiece.model": "x"}, "spiece.model, which is not read; transformers makes tokenizer.json of it"),
        ({"vocab.txt": "a\nb\n"}, r"the vocabulary must have '\[CLS\]'"),
        ({"vocab.txt": "a\n", "tokenizer_config.json": '{"do_lower_case": "yes"}'}, "do_lower_case must be true or"),
        ({"vocab.txt": "a\n", "tokenizer_config.json": '{"pad_token": 3}'}, "pad_token must be a string, got 3"),
        ({"vocab.txt": "a\n", "tokenizer_config.json": "[" * 100_000}, "tokenizer_config.json is no JSON"),
        ({"vocab.json": "{", "merges.txt": ""}, "vocab.json can't be read as BPE"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "x y z\nb"}, "vocab.json can't be read as BPE"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "", "added_tokens.json": '{"<x>": 7}'}, "'<x>' can't have id 7"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "", "tokenizer_config.json": '{"add_bos_token": true}'}, "add_bos"),
    ],
)
def test_what_is_no_tokenizer(tmp_path, files, reason):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, OSError), match=reason) as error:
        tokenizer_files.read(tmp_path)
    assert "\n" not in str(error.value)


def test_tokens_that_were_added_have_their_ids(tmp_path):
    folder = pairs(tmp_path, [], "<|endoftext|>")
    (folder / "added_tokens.json").write_text('{"<two>": 12, "<one>": 11}')
    assert ids(folder, "low<one><two>") == [7, 11, 12]


def test_a_folder_of_weights_has_it_too(tmp_path):
    folder = pieces(tmp_path)
    made = weights.Pretrained(None, None, {}, [], [], folder)
    assert made.tokenizer.encode("the fox").ids == [2, 5, 6, 3]
