"""Folders that can't be read say why in one line, before a model exists."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from xformer import weights
from xformer.weights.folder import Folder

FIXTURES = Path(__file__).parent / "fixtures" / "weights"
FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FIXTURES / "bert_masked_lm", tmp_path / "bert")


def message(path, **kwargs):
    with pytest.raises(weights.WeightsError) as error:
        weights.load(path, **kwargs)
    text = str(error.value)
    assert "\n" not in text and len(text) < 600
    return text


def header(content, size=16):
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


DAMAGED = {
    "empty": lambda data: b"",
    "cut in its header": lambda data: data[:100],
    "cut in its data": lambda data: data[:-3],
    "longer than it says": lambda data: data + b"\0",
    "no safetensors": lambda data: b"PK\x03\x04" + data,
    "header of 2^63 bytes": lambda data: struct.pack("<Q", 2**63) + data[8:],
    "absurd shape": lambda _: header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}),
    "negative shape": lambda _: header({"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}),
    "overlap": lambda _: header({n: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for n in "ab"}),
    "no JSON": lambda _: struct.pack("<Q", 4) + b"{{{{",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files(folder, kind):
    (folder / FILE).write_bytes(DAMAGED[kind]((folder / FILE).read_bytes()))
    assert f"{folder / FILE} is damaged, or no safetensors file: " in message(folder)


def test_a_pickle_is_never_read(folder):
    (folder / FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    text = message(folder)
    assert "pytorch_model.bin, a pickle" in text and "weights_only=True" in text and "save_file" in text


@pytest.mark.parametrize(
    "content, expected",
    [
        ("{", "config.json can't be read"),
        ("[]", "config.json must hold an object, got list"),
        ("[" * 100_000, "config.json can't be read"),
        ({"model_type": "t6"}, "model_type must be one of bert, roberta"),
        ({"model_type": ["bert"]}, "model_type must be one of"),
        ({"hidden_size": -24}, "hidden_size must be an integer of at least 1, got -24"),
        ({"hidden_size": "24"}, "hidden_size must be an integer"),
        ({"vocab_size": 10**30}, "vocab_size must be at most"),
        ({"vocab_size": 10**9}, "must have shape [1000000000], got [53]"),
        ({"num_hidden_layers": 3}, "bert.encoder.layer.2.attention.self.query.weight is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 2,048"),
        ({"num_attention_heads": 5}, "num_heads must divide width"),
        ({"hidden_act": "mish"}, "hidden_act must be gelu or gelu_new"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob must be a number of at least 0 and below 1"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps must be a number"),
        ({"type_vocab_size": 0}, "type_vocab_size must be an integer of at least 1, got 0"),
        ({"is_decoder": True}, "is_decoder must be False only"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be 'absolute' only"),
        ({"intermediate_size": 38}, "output.dense.weight must have shape [24, 38], got [24, 37]"),
        ({"max_position_embeddings": 30}, "must have shape [30, "),  # only max_len=30 cuts a table
        ({"architectures": ["BertForQuestionAnswering"]}, "has no head known here; give model=, one of masked_lm"),
        ({"architectures": None}, "has no head known here"),
    ],
)
def test_configs(folder, content, expected):
    if isinstance(content, str):
        (folder / "config.json").write_text(content)
    else:
        config = json.loads((folder / "config.json").read_text()) | content
        (folder / "config.json").write_text(json.dumps(config))
    if expected is None:
        assert weights.load(folder).model.max_len == 30
    else:
        assert expected in message(folder)


@pytest.mark.parametrize(
    "kwargs, expected",
    [
        ({"model": "decoder"}, "model must be one of masked_lm, classifier, token_classifier for bert, got 'decoder'"),
        ({"model": "clasifier"}, "did you mean classifier?"),
        ({"num_classes": 3}, "num_classes must be None for masked_lm"),
        ({"positions": "stretch"}, "positions must be 'copy' or 'interpolate'"),
        ({"attention": {"name": "windw"}}, "did you mean window?"),
        ({"options": {"widths": 3}}, "widths"),
        ({"max_len": 0}, "max_len must be an integer of at least 1"),
    ],
)
def test_arguments(folder, kwargs, expected):
    assert expected in message(folder, **kwargs)


@pytest.mark.parametrize(
    "name, content, expected",
    [
        (
            "nystromformer_masked_lm",
            {"conv_kernel_size": 4},
            "no model can be made of it: Nystrom.conv_size must be odd",
        ),
        ("nystromformer_masked_lm", {"num_landmarks": 3}, "segment_means_len must be a multiple of num_landmarks 3"),
        ("nystromformer_masked_lm", {"inv_coeff_init_option": True}, "inv_coeff_init_option must be False only"),
        ("t5_gated", {"relative_attention_num_buckets": 1}, "T5Bias.num_buckets must be an integer of at least 4"),
        ("t5_gated", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj must be relu or gelu or"),
        ("t5_gated", {"d_kv": 5}, "must have shape [15, 24], got [21, 24]"),
        ("gpt2_classifier", {"n_embd": 27}, "c_attn.bias must have shape [81], got [72]"),
    ],
)
def test_configs_of_other_families(name, content, expected, tmp_path):
    folder = shutil.copytree(FIXTURES / name, tmp_path / name)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | content))
    assert expected in message(folder)


def test_another_op_for_a_longformer_is_refused_in_one_line():
    text = message(FIXTURES / "longformer_masked_lm", attention={"name": "windw"})
    assert text.startswith("attention") and "did you mean window?" in text


def test_folders_that_are_none(tmp_path, folder):
    assert "there is no such folder; weights are read from disk, never from a network" in message("bert-base-uncased")
    (tmp_path / "none").mkdir()
    assert "holds no config.json" in message(tmp_path / "none")
    (folder / FILE).unlink()
    assert "holds no model.safetensors and no model.safetensors.index.json" in message(folder)


@pytest.mark.parametrize(
    "weight_map, expected",
    [
        ({"a": "../secret.safetensors"}, "must be in a .safetensors file of the folder"),
        ({"a": "/etc/passwd"}, "must be in a .safetensors file of the folder"),
        ({"a": 3}, "must be in a .safetensors file of the folder"),
        ({"a": "model-1.safetensors"}, "is in model-1.safetensors, which is missing"),
        ({}, "must have a weight_map"),
        ({"a": "real.safetensors"}, "says that real.safetensors has a, which it has not"),
    ],
)
def test_shards(folder, weight_map, expected):
    (folder / FILE).rename(folder / "real.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert expected in message(folder)


def change(folder, edit):
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE, {"format": "pt"})


def test_tensors_of_another_kind(folder):
    name = "bert.encoder.layer.1.output.dense.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name].astype(np.int32)}))
    assert f"{name} has dtype I32; F64, F32, F16, BF16 can be read" in message(folder)
    change(folder, lambda tensors: tensors.update({name: tensors[name].astype(np.float32).T.copy()}))
    assert f"{name} must have shape [24, 37], got [37, 24]" in message(folder)
    change(folder, lambda tensors: tensors.pop(name))
    assert f"{name} is missing, which its config.json asks for" in message(folder)


def test_names_of_older_files(folder):
    """Layer norms were `gamma` and `beta`, and a trunk alone has no prefix."""
    before = weights.load(folder)

    def older(tensors):
        for name in list(tensors):
            stem, _, last = name.removeprefix("bert.").rpartition(".")
            if "LayerNorm" in stem:
                last = {"weight": "gamma", "bias": "beta"}[last]
            tensors[f"{stem}.{last}"] = tensors.pop(name)
        tensors["embeddings.position_ids"] = np.arange(31)

    change(folder, older)
    after = weights.load(folder)
    assert (after.fresh, after.unused) == ([], [])
    scale = lambda found: found.model.blocks[1].attention_norm.scale[...]
    np.testing.assert_array_equal(scale(after), scale(before))


def test_tensors_without_a_place_are_named(folder, caplog):
    change(folder, lambda tensors: tensors.update({"adapter.weight": np.zeros(3, np.float32)}))
    assert weights.load(folder).unused == ["adapter.weight"]
    assert "adapter.weight" in caplog.text


def test_names_of_classes_are_an_object(tmp_path):
    copy = shutil.copytree(FIXTURES / "roberta_classifier", tmp_path / "folder")
    config = json.loads((copy / "config.json").read_text()) | {"id2label": ["a"]}
    (copy / "config.json").write_text(json.dumps(config))
    assert "id2label must be an object of indices with names, got ['a']" in message(copy)


def test_one_file_of_a_folder(folder):
    (folder / FILE).rename(folder / "best.safetensors")
    found = weights.load(folder / "best.safetensors")
    assert (found.fresh, found.unused) == ([], [])


def test_headers_alone_are_read_first(folder, monkeypatch):
    monkeypatch.setattr(Folder, "read", lambda self, name: pytest.fail(f"read {name}"))
    assert "must have shape" in message(folder, options={"mlp_dim": 38})


def test_a_full_folder_is_not_written_over(folder):
    found = weights.load(folder)
    with pytest.raises(weights.WeightsError, match="must be a new or an empty folder"):
        weights.save(found, folder)
    with pytest.raises(weights.WeightsError, match="model_type must be one of bert"):
        weights.save(found, folder.parent / "new", model_type="t6")
