"""Prepared data: whole or not there, made once, readable by TFDS, found again."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from waiting import HANG

from xformer.tasks import DataMissing, ListOps, build, chunks, default_data_dir, load_preprocessing
from xformer.tasks.ragged import Ragged

TINY = ListOps("listops_128", num_train=30, num_validation=20, num_test=10)


def directory(data_dir):
    return data_dir / "listops" / "listops_128_30_20_10_seed0" / "1.0.0"


def test_prepared_data_is_what_was_generated(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "SAY_EVERY", math.inf)  # no line between for a machine that needs long
    said = []
    TINY.prepare(tmp_path, progress=said.append)
    assert said == [
        "listops: generating 60 expressions, preset=listops_128",
        "listops: lengths in tokens: median 51, 90 % 73, 99 % 121, longest 121; "
        "30 train (0.0% truncated), 20 validation (0.0% truncated), 10 test (0.0% truncated) at max_len=128",
    ]
    data = TINY.open(tmp_path)
    assert (data.max_len, data.vocab_size, data.num_classes, data.class_names) == (128, 16, 10, list("0123456789"))
    assert data.info["truncated"] == {"train": 0, "validation": 0, "test": 0}
    for split, examples in TINY.generate().items():
        assert data.num_examples(split) == len(examples)
        batch = next(data.batches(split, len(examples), seed=0, shuffle=False, epochs=1))
        assert batch["targets"].tolist() == examples.labels.tolist()
        for index, row in enumerate(batch["inputs"]):
            assert row[row > 0].tolist() == examples[index].tolist()
    assert data.vocabulary.decode(batch["inputs"][0]).count("[") == data.vocabulary.decode(batch["inputs"][0]).count(
        "]"
    )


def test_prepared_data_is_a_tfds_data_set_in_array_record(tmp_path):
    TINY.prepare(tmp_path)
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(directory(tmp_path))
    source = builder.as_data_source(split="validation")
    examples = TINY.generate()["validation"]
    assert len(source) == len(examples) == 20
    for index in range(20):
        assert source[index]["tokens"].tolist() == examples[index].tolist()
        assert source[index]["label"] == examples.labels[index]
    assert list(directory(tmp_path).glob("*test.array_record*"))
    assert "tensorflow" not in sys.modules


def test_builder_works_by_itself(tmp_path):
    from xformer.tasks.listops_builder import ListOpsBuilder, listops_config

    assert set(ListOpsBuilder.builder_configs) == {"listops_2k", "listops_512", "listops_128"}
    builder = ListOpsBuilder(config=listops_config("tiny", TINY), data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    assert len(builder.as_data_source(split="train")) == 30


def test_prepare_makes_data_once(tmp_path):
    TINY.prepare(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    said = []
    TINY.prepare(tmp_path, progress=said.append)
    assert len(said) == 1 and "30 train" in said[0]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_interrupted_preparation_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Ragged, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            TINY.prepare(tmp_path)
    assert [path.name for path in directory(tmp_path).parent.iterdir()] == [".lock"]
    with pytest.raises(DataMissing, match=r"no prepared data in .*prepare"):
        TINY.open(tmp_path)
    TINY.prepare(tmp_path)
    assert TINY.open(tmp_path).num_examples("train") == 30


PROGRAM = """
import hashlib, sys
from xformer.tasks import ListOps
task = ListOps("listops_128", num_train=30, num_validation=20, num_test=10)
task.prepare(sys.argv[1])
batch = next(task.open(sys.argv[1]).batches("train", 8, seed=7, shuffle=True, epochs=None))
print(hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest())
"""


def test_two_processes_prepare_at_once_and_see_the_same_batches(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [process.communicate(timeout=HANG) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert all(errors == "" for _, errors in outputs)
    assert sorted(path.name for path in directory(tmp_path).parent.iterdir()) == [".lock", "1.0.0"]


def test_saved_preprocessing_comes_with_the_data(tmp_path):
    TINY.prepare(tmp_path)
    data = TINY.open(tmp_path)
    data.save(tmp_path / "run")
    loaded = load_preprocessing(tmp_path / "run")
    texts = ["[MAX 1 2 ]"]
    np.testing.assert_array_equal(loaded(texts)["inputs"], data.preprocess(texts)["inputs"])
    assert json.loads((tmp_path / "run" / "vocabulary.json").read_text())["kind"] == "symbols"


def test_default_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XFORMER_DATA", str(tmp_path / "here"))
    assert default_data_dir() == tmp_path / "here"
    monkeypatch.delenv("XFORMER_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / ".cache" / "xformer"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"name": "listop"},
            r"task.name: got 'listop', allowed are listops, imdb, .*, or "
            r"'package.module:Class'; did you mean listops\?",
        ),
        ({}, "task.name: got None, allowed are listops"),
        ({"name": "listops", "presets": 1}, r"task.presets is no option of listops.*did you mean preset\?"),
    ],
)
def test_build_refuses_unknown_names_and_options(config, message):
    with pytest.raises(ValueError, match=message):
        build(config)


def test_build_takes_any_mapping():
    assert build({"name": "listops", "preset": "listops_512"}) == ListOps("listops_512")
