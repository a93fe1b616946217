"""Runs that start from a Hugging Face folder, with its tokenizer, and that become one."""

import json
import logging
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tiny_tokenizer import WORDS, tokenizer_json

import xformer
from xformer import experiment, pretrained, weights
from xformer.schema import ConfigError
from xformer.tasks import vocab
from xformer.train import TrainConfig, WarmStartError, warm_start
from xformer.weights import folder as folders

FIXTURES = Path(__file__).parent / "fixtures" / "weights"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "roberta"
    shutil.copytree(FIXTURES / "roberta_classifier", folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    random = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [
        {"text": " ".join(random.choice(WORDS, random.integers(3, 30))), "label": "abc"[index % 3]}
        for index in range(60)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_of(source, texts, **train):
    sections = weights.sections(source)
    return {
        "name": "tuned",
        **sections,
        "task": {"name": "documents", "path": str(texts), "max_len": 29, "vocab": "tokenizer",
                 "tokenizer": str(source)},
        "optimizer": {"name": "adamw", "learning_rate": 1e-9},
        "train": {"num_steps": 1, "batch_size": 8, "eval_every": 1, "init_from": f"hf:{source}", **train},
    }  # fmt: skip


def test_ids_special_tokens_and_truncation_are_the_librarys():
    ours, theirs = vocab.Tokenizer(tokenizer_json(), 6), tokenizers.Tokenizer.from_str(tokenizer_json())
    theirs.enable_truncation(6)
    for text in ("w0 w1", "w3 nothing w5", " ".join(WORDS), "w1 </s> w2"):
        there = theirs.encode(text).ids
        back = {0: 1, 1: 0}
        assert [back.get(index, index) for index in ours.encode(text)] == there
        assert 0 not in ours.encode(text) and len(there) <= 6
    assert ours.encode(" ".join(WORDS))[-1] == 2  # cut texts end as whole ones do
    assert ours.decode([*ours.encode("w3 w5"), 0, 0]) == "w3 w5"
    again = vocab.from_json(json.loads(json.dumps(ours.to_json())))
    assert (again.encode("w0 w9 w8 w7 w6 w5 w4"), again.size) == (ours.encode("w0 w9 w8 w7 w6 w5 w4"), 53)


def test_a_folder_has_its_tokenizer(source, tmp_path):
    found = weights.load(source)
    assert found.tokenizer.encode("w0 w1").ids == [0, 5, 6, 2]
    assert weights.load(FIXTURES / "roberta_classifier").tokenizer is None
    folder = weights.save(found, tmp_path / "out")
    assert (folder / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(weights.WeightsError, match=r"its tokenizer can't be read: "):
        _ = weights.load(folder).tokenizer


def test_how_far_a_text_moves(source):
    """A text is read by the folder's tokenizer, and cut at the shorter of the models."""
    before, after = weights.load(source), weights.load(source, attention={"name": "window", "left": 1, "right": 1})
    ids = np.array([[0, 5, 6, 7, 8, 2]], np.int32)
    assert weights.moved(before, after, "w0 w1 w2 w3") == weights.moved(before, after, ids)
    assert weights.moved(before, after, "w1 " * 100)["largest"] > 0
    bare = weights.load(FIXTURES / "roberta_classifier")
    with pytest.raises(weights.WeightsError, match="has no tokenizer to read a text with; give token ids"):
        weights.moved(bare, after, "w0")


@pytest.mark.parametrize(
    "content, reason",
    [("{", "no tokenizer.json"), (tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(), "a token for padding")],
)
def test_what_is_no_tokenizer(content, reason, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=reason):
        vocab.Tokenizer(content)
    config = config_of(FIXTURES / "roberta_classifier", "texts.jsonl")
    config["task"]["tokenizer"] = str(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        experiment.build(config)


@pytest.fixture(scope="module")
def finished(source, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    experiment.build(config_of(source, texts)).trainer(folder / "run", folder / "data").fit()
    return folder / "run"


def test_a_run_starts_from_the_folder_and_predicts_as_it_does(source, finished):
    taken = json.loads((finished / "init_from.json").read_text())
    assert (taken["left"], taken["missing"], taken["extra"], taken["fitted"]) == ([], [], [], [])
    run, found = xformer.load(finished), weights.load(source)
    theirs = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    for text in ("w1 w2 w3", "w40 w41 unknown w7 w9"):
        ours = run.preprocess([text])
        ids = np.array([theirs.encode(text).ids], np.int32)
        np.testing.assert_allclose(run.model(**ours), found.model(ids), atol=1e-5)


def test_a_run_is_read_without_the_folder_of_its_tokenizer(finished, tmp_path):
    """What it was made from may have moved; the run's own vocabulary.json holds the whole tokenizer."""
    moved = shutil.copytree(finished, tmp_path / "run")
    config = json.loads((moved / "config.json").read_text())
    config["task"]["tokenizer"] = str(tmp_path / "gone")
    (moved / "config.json").write_text(json.dumps(config))
    run, before = xformer.load(moved), xformer.load(finished)
    np.testing.assert_array_equal(run.preprocess(["w1 w2"])["inputs"], before.preprocess(["w1 w2"])["inputs"])
    np.testing.assert_array_equal(*(x.predict(["w1 w2"]).probabilities for x in (run, before)))
    assert run.config.task.tokenizer == str(tmp_path / "gone")


def test_a_run_becomes_a_folder_that_it_can_start_from(source, finished, tmp_path):
    run = xformer.load(finished)
    folder = weights.save(run, tmp_path / "out", model_type="roberta")
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "a", "1": "b", "2": "c"} and config["pad_token_id"] == 1
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    for name, x in before.items():
        np.testing.assert_allclose(after[name], x, atol=1e-6)
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>",
        "unk_token": "<unk>", "mask_token": "<mask>",
    }  # fmt: skip
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.array([theirs.encode("w5 w6 w7").ids], np.int32)
    here = run.model(**run.preprocess(["w5 w6 w7"]))
    np.testing.assert_allclose(weights.load(folder).model(ids), here, atol=1e-6)


@pytest.mark.parametrize(
    "section, value, reason",
    [
        ({"norm": "pre"}, "model", "model.norm is 'pre', there 'post'"),
        ({"num_heads": 4}, "model", "model.num_heads is 4, there 3"),
        ({"init_from": "hf:nowhere"}, "train", "there is no such folder"),
    ],
)
def test_another_meaning_is_refused(section, value, reason, source, texts, tmp_path):
    config = config_of(source, texts)
    config[value] |= section
    trainer = experiment.build(config).trainer(tmp_path / "run", tmp_path / "data")
    with pytest.raises(WarmStartError, match=reason):
        trainer.fit()


def test_a_model_section_without_sizes_is_the_folders(source, texts):
    config = config_of(source, texts)
    whole = experiment.build(config).config
    config["model"], config["attention"] = {"name": "classifier", "dropout_rate": 0.25}, {"name": "full"}
    del config["task"]["tokenizer"]
    short = experiment.build(config).config
    assert short.model.dropout_rate == 0.25 and whole.model.dropout_rate == 0.1
    short.model.dropout_rate = 0.1
    assert (short.model, short.attention, short.task) == (whole.model, whole.attention, whole.task)
    config["attention"] = {"name": "longformer", "window": 8}
    assert experiment.build(config).config.model.global_projections
    config["attention"] = {"name": "longformer", "window": 7}
    with pytest.raises(ConfigError, match=r"^attention.window: .*even"):
        experiment.build(config)
    config["attention"] = {"name": "full"}
    config["train"]["init_from"] = "hf:nowhere"
    with pytest.raises(ConfigError, match=r"train.init_from: nowhere: there is no such folder"):
        experiment.build(config)


@pytest.mark.full
def test_a_longer_run_with_another_attention_and_scanned_layers(source, texts, tmp_path, caplog):
    config = config_of(source, texts)
    config["task"]["max_len"] = 60
    config["attention"] = {"name": "longformer", "window": 8, "num_global_tokens": 1}
    config["model"] |= {"scan_layers": True, "global_projections": True}
    config["train"]["init_positions"] = "interpolate"
    with caplog.at_level(logging.INFO):
        experiment.build(config).trainer(tmp_path / "run", tmp_path / "data").fit()
    taken = json.loads((tmp_path / "run" / "init_from.json").read_text())
    assert taken["fitted"] == ["positions/table ([31, 24] there, [62, 24] here)"]
    assert (taken["left"], taken["missing"], taken["extra"]) == ([], [], [])
    run, there = xformer.load(tmp_path / "run"), load_file(source / "model.safetensors")
    table = np.asarray(run.model.positions.table[...])
    old = there["roberta.embeddings.position_embeddings.weight"]
    np.testing.assert_allclose(table[[0, 1, 2, 61]], old[[0, 1, 2, 30]], atol=1e-6)
    np.testing.assert_allclose(table[3], old[2] + 28 / 59 * (old[3] - old[2]), atol=1e-6)
    for name in ("query", "of_global/query"):
        layer = run.model.unrolled().blocks[1].attention
        for part in name.split("/"):
            layer = getattr(layer, part)
        kernel = jnp.asarray(layer.kernel[...]).reshape(24, 24).T
        np.testing.assert_allclose(kernel, there["roberta.encoder.layer.1.attention.self.query.weight"], atol=1e-6)


def test_stacked_blocks_of_alternating_ops_take_the_arrays_of_their_own_layers(source, texts):
    config = config_of(source, texts)
    ops = [{"name": "window", "left": 4, "right": 4}, {"name": "full"}]
    config["attention"], config["model"]["scan_layers"] = {"name": "layers", "layers": ops}, True
    built = experiment.build(config)
    there = load_file(source / "model.safetensors")
    found = pretrained.source(str(source), experiment.as_json(built.config), built.task.sizes(), 1)
    for layer in range(2):
        kernel = found.arrays[f"blocks/{layer}/attention/query/kernel"]
        expected = there[f"roberta.encoder.layer.{layer}.attention.self.query.weight"]
        np.testing.assert_array_equal(kernel, expected.T.reshape(1, 24, 3, 8))


def test_a_model_section_of_a_t5_is_completed(texts, tmp_path):
    """Its layers share the bias where the op has it, with the folder's own buckets; else nothing is shared."""
    folder = shutil.copytree(FIXTURES / "t5_token_classifier", tmp_path / "t5")
    (folder / "tokenizer.json").write_text(tokenizer_json())
    config = config_of(FIXTURES / "roberta_classifier", texts) | {"model": {"name": "classifier"}}
    config["task"]["tokenizer"], config["train"]["init_from"] = str(folder), f"hf:{folder}"
    config["attention"] = {"name": "bigbird", "position": {"name": "t5"}}
    built = experiment.build(config)
    position = built.attention.position
    assert (position.num_buckets, position.max_distance) == (8, 20) and built.config.model.share_attention_params
    start = pretrained.source(str(folder), experiment.as_json(built.config), built.task.sizes(), 1)
    there = load_file(folder / "model.safetensors")
    bias = there["transformer.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    np.testing.assert_array_equal(start.arrays["blocks/0/attention/attention_fn/params/position/bias"], bias.T)
    assert not start.arrays["blocks/1/feed_forward/expand/bias"].any()
    scanned = config | {"model": {"name": "classifier", "scan_layers": True}}
    built = experiment.build(scanned)
    start = pretrained.source(str(folder), experiment.as_json(built.config), built.task.sizes(), 1)
    np.testing.assert_array_equal(start.arrays["blocks/attention/attention_fn/params/position/bias"], bias.T)
    kernel = start.arrays["blocks/attention/key/kernel"][1]
    expected = there["transformer.encoder.block.1.layer.0.SelfAttention.k.weight"]
    np.testing.assert_array_equal(kernel, expected.T.reshape(kernel.shape))
    config["attention"] = {"name": "bigbird"}
    assert not experiment.build(config).config.model.share_attention_params


def test_another_tokenizer_than_the_folders_is_said(source, texts, tmp_path, caplog):
    config = config_of(source, texts)
    built = experiment.build(config)
    given = built.task.sizes(), 1
    pretrained.source(str(source), experiment.as_json(built.config), *given)
    assert "tokens" not in caplog.text
    other = json.loads(tokenizer_json())
    vocabulary = other["model"]["vocab"]
    vocabulary["w3"], vocabulary["w4"] = vocabulary["w4"], vocabulary["w3"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    config["task"]["tokenizer"] = str(tmp_path)
    pretrained.source(str(source), experiment.as_json(experiment.build(config).config), *given)
    assert f"that of task.tokenizer {tmp_path}: of 2 ids it has other tokens" in caplog.text


def test_heads_that_compute_something_else_are_refused():
    config = {"name": "masked_lm", **weights.sections(FIXTURES / "roberta_masked_lm")["model"]}
    folder = folders.Folder(FIXTURES / "roberta_masked_lm")
    pretrained.check_meaning(folder, config, config)
    for key, value in (("head_activation", "relu"), ("head_epsilon", 0.1)):
        with pytest.raises(WarmStartError, match=f"model.{key} is {value!r}, there"):
            pretrained.check_meaning(folder, config, config | {key: value})
    there = weights.sections(FIXTURES / "gpt2")["model"]
    for key, value in (("embedding_norm", True), ("position_offset", 2)):
        with pytest.raises(WarmStartError, match=f"model.{key} is {value!r}, there"):
            pretrained.check_meaning(folder, there, there | {key: value})


def test_masked_texts_take_no_tokenizer_from_outside(source, texts):
    config = config_of(source, texts)
    config["task"] = {"name": "masked_lm", "source": config["task"]}
    with pytest.raises(ConfigError, match=r"^task.source.vocab: .*vocab must be 'bytes' or 'subword', got 'tokenizer'"):
        experiment.build(config)


def test_tables_keep_the_rows_before_the_first_position():
    table = np.arange(10.0)[:, None] * np.ones(3)
    fitted = warm_start.fit("positions/table", table, (15, 3), 2)
    assert fitted[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6]
    stacked = np.stack([table, table + 1])
    stretched = warm_start.fit("positions/table", stacked, (2, 17, 3), 2, "interpolate")
    assert stretched[0, :, 1].tolist() == [0, 1, *np.linspace(2, 9, 15)]
    np.testing.assert_array_equal(stretched[1], stretched[0] + 1)
    assert warm_start.fit("positions/table", table, (6, 3), 2, "interpolate")[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="init_positions must be 'copy' where init_from is None, got 'interpolate'"):
        TrainConfig(num_steps=1, batch_size=1, init_positions="interpolate")
