"""`xformer predict`: files and folders in, CSV and JSON lines out."""

import csv
import json
import re

import numpy as np
import pytest

import xformer
from xformer import config
from xformer.commands import cli, predict


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rows = [{"body": f"{'good' if i % 2 else 'bad'} text {i}", "label": "ab"[i % 2]} for i in range(40)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "name": "small",
        "attention": {"name": "full"},
        "model": {"num_layers": 1, "width": 16, "num_heads": 2, "mlp_dim": 16},
        "task": {"name": "documents", "path": str(folder / "a.jsonl"), "max_len": 16, "text_field": "body"},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"num_steps": 500, "num_epochs": 0.75, "batch_size": 8, "mesh": {"data": 1}},
    }
    result = xformer.fit(config, folder / "run", data_dir=folder / "data")
    return folder, result


def execute(*args):
    return cli.exit_code(predict.command, args)


def test_the_result_has_details_of_the_classes_and_steps_by_epochs(run):
    _, result = run
    assert result["last_step"] == 3  # three quarters of 32 examples in batches of 8
    details = result["test_details"]
    assert set(details["classes"]) == {"a", "b"} and sum(map(sum, details["confusion"])) == 4
    hits = sum(row[index] for index, row in enumerate(details["confusion"]))
    assert hits / 4 == pytest.approx(result["test"]["accuracy"])
    assert {"accuracy", "macro_f1", "calibration_error", "loss"} <= set(result["test"])


def test_the_result_says_what_data_it_is_of_and_what_a_guesser_scores(run):
    folder, result = run
    info = result["info"]
    assert info["tokenizer"]["kind"] == "bytes" and info["tokenizer"]["size"] == info["vocab_size"] == 257
    assert info["data_version"] == "1.0.0" and info["source"] == str(folder / "a.jsonl") and len(info["digest"]) == 64
    assert info["num_examples"] == {"train": 32, "validation": 4, "test": 4}
    assert set(info["truncated"]) == set(info["num_examples"])
    assert set(result["baseline"]["scores"]["test"]) >= {"accuracy"} and result["model"] == {"name": "classifier"}
    with np.load(folder / "run" / "test_examples.npz") as kept:
        assert kept["length"].shape == kept["accuracy"][0].shape == (4,)
        assert set(kept["length"].tolist()) <= {10, 11, 12}  # of "bad text 2" to "good text 11"


def test_two_towers_say_how_they_are_built(tmp_path):
    small = ["task.num_train=64", "task.num_validation=8", "task.num_test=8", "train.mesh={'data': 1}"]
    trainer = config.load_experiment("retrieval:full", small).trainer(tmp_path / "run", tmp_path / "data")
    assert trainer.model == {"name": "two_tower", "tower": "shared encoder", "head": "[a, b, a * b, a - b]"}


def test_folder_to_csv_and_table_to_json_lines_agree_with_predict(run, tmp_path, capsys):
    folder, _ = run
    texts = {"b.txt": "good text", "deeper/a.txt": "bad text, longer than the model reads"}
    for name, text in texts.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    (tmp_path / "in" / "notes.md").write_text("not this")
    out = tmp_path / "made" / "out.csv"
    assert execute(f"--workdir={folder / 'run'}", f"--input={tmp_path / 'in'}", f"--out={out}") == 0
    assert "2 predictions in" in capsys.readouterr().err
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    loaded = xformer.load(folder / "run")
    found = loaded.predict(list(texts.values()))
    assert [row["place"] for row in rows] == list(texts)
    assert [row["label"] for row in rows] == found.labels and [row["truncated"] for row in rows] == ["False", "True"]
    table = tmp_path / "in.csv"
    table.write_text("body\n" + "\n".join(f'"{text}"' for text in texts.values()) + "\n")
    assert execute(f"--workdir={folder / 'run'}", f"--input={table}") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["place"] for line in lines] == ["line 2", "line 3"]
    assert [line["label"] for line in lines] == found.labels
    assert lines[0]["probabilities"]["b"] == pytest.approx(float(found.probabilities[0, 1]), abs=1e-5)
    assert lines[0]["probability"] == max(lines[0]["probabilities"].values())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out={}/a.txt"], "--out: got .* takes a file that ends in .csv or .jsonl"),
        (["--batch_size=0"], "--batch_size: got 0"),
        (["--config.seed=1"], "a trained run keeps its config"),
        (["--workdir={}"], "holds no run"),
        (["--input={}/none"], "--input: path: got .* takes a file or folder that is there"),
        (["--input={}/a.pdf"], "must end in .jsonl, .ndjson, .csv, .tsv or be .txt or a folder of .txt files"),
        (["--text_field=text", "--input={}/a.csv"], "line 2 has no field 'text'"),
        (["--threshold=0.2", "--input={}/a.csv"], "threshold is for models with several labels"),
        (["--input={}/empty"], "is empty: no .txt in it"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(run, tmp_path, capsys, args, message):
    folder, _ = run
    (tmp_path / "a.pdf").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("body\nx\n")
    given = [f"--workdir={folder / 'run'}", f"--input={tmp_path / 'a.csv'}", *(arg.format(tmp_path) for arg in args)]
    before = sorted(tmp_path.iterdir())
    assert execute(*given) == 2
    err = capsys.readouterr().err
    assert re.search(message, err) and err.count("\n") == 1 and sorted(tmp_path.iterdir()) == before
