"""What could lose or swap a user's work (other data, damaged files, signals): refused or said, nothing rewritten."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from waiting import HANG, wait_for

import xformer
from xformer import experiment
from xformer.commands import cli, compare, run
from xformer.train import CheckpointError, DataChanged, WorkdirMismatch, data_record
from xformer.train import workdir as folders
from xformer.train.engine import Engine

ROOT = Path(__file__).parent.parent
WORDS = {"neg": "bad dull grey", "pos": "good warm blue"}
SECTIONS = {
    "attention": {"name": "full"},
    "model": {"num_layers": 1, "width": 16, "num_heads": 2, "mlp_dim": 16},
    "optimizer": {"learning_rate": 0.01},
    "train": {"num_steps": 4, "batch_size": 8, "eval_every": 2, "checkpoint_every": 2},
}


def write(path, names=("neg", "pos"), rows=60, suffix=""):
    lines = [f"{list(WORDS.values())[i % 2]} {i}{suffix}\t{names[i % 2]}" for i in range(rows)]
    path.write_text("\n".join(["text\tlabel", *lines]) + "\n")


def begin(folder):
    write(folder / "d.tsv")
    config = SECTIONS | {"name": "changes", "task": {"name": "documents", "path": "d.tsv", "max_len": 16}}
    (folder / "run.json").write_text(json.dumps(config))
    comparison = {"name": "both", "base": config, "variants": {"full": {}, "wide": {"model": {"width": 8}}}}
    comparison |= {"seeds": [0], "report": {"cost_lengths": [16], "measure_up_to": 0, "measure_seconds": 0.0}}
    (folder / "compare.json").write_text(json.dumps(comparison))
    return folder


def command(*flags, which=run, config="run.json"):
    """The exit code of a command in the current folder."""
    return cli.exit_code(which.command, [f"--config={config}", "--workdir=work", "--data_dir=data", *flags])


@pytest.fixture(scope="module")
def began(tmp_path_factory):
    """A folder with the data and a run stopped in the middle, one with the same run finished."""
    with pytest.MonkeyPatch.context() as patch:
        half = begin(tmp_path_factory.mktemp("half"))
        patch.chdir(half)
        assert command("--config.train.stop_at_step=2") == 75
        finished = shutil.copytree(half, tmp_path_factory.mktemp("finished"), dirs_exist_ok=True)
        patch.chdir(finished)
        assert command() == 0
    return half, finished


@pytest.fixture
def half(began, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(began[0], tmp_path, dirs_exist_ok=True)


@pytest.fixture
def finished(began, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(began[1], tmp_path, dirs_exist_ok=True)


def contents(folder):
    """Every file of the run but its logs of who uses it."""
    files = [file for file in Path(folder).rglob("*") if file.is_file() and file.name != ".lock"]
    return {file.relative_to(folder): file.read_bytes() for file in files}


CHANGES = {
    "labels": (lambda path: write(path, ("a_good", "z_bad")), "class_names"),
    "swapped labels": (lambda path: write(path, ("pos", "neg")), "train labels"),
    "texts": (lambda path: write(path, suffix=" more"), "train texts"),
    "fewer": (lambda path: write(path, rows=40), "train texts"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_a_finished_run_refuses_other_data(finished, capsys, change, said):
    work = finished / "work"
    recorded = json.loads((work / "data.json").read_text())
    assert recorded["digest"] == json.loads((work / "result.json").read_text())["info"]["digest"]
    before = contents(work)
    change(finished / "d.tsv")
    for flags in ((), ("--eval_only",)):
        assert command(*flags) == 2
        out, err = capsys.readouterr()
        assert out == "" and "was begun with other data" in err and said in err and err.count("error:") == 1
    assert contents(work) == before


def test_data_that_comes_back_is_taken_again(finished, capsys):
    write(finished / "d.tsv", ("a_good", "z_bad"))
    assert command("--eval_only") == 2
    write(finished / "d.tsv")
    capsys.readouterr()
    assert command() == command("--eval_only") == 0
    result = json.loads((finished / "work" / "result.json").read_text())
    assert json.loads(capsys.readouterr().out) == {"eval": result["eval"], "test": result["test"]}


def test_a_half_done_run_refuses_other_data(half, capsys):
    before = contents(half / "work")
    write(half / "d.tsv", ("a_good", "z_bad"))
    assert command() == 2
    assert '(["neg", "pos"] there, ["a_good", "z_bad"] now)' in capsys.readouterr().err
    assert contents(half / "work") == before


def test_the_same_data_elsewhere_is_the_same(finished):
    """The record tells contents, not places: prepared anew, in another data directory."""
    shutil.rmtree(finished / "data")
    assert command("--data_dir=other") == 0


def test_a_run_without_a_record_is_read_and_says_so(finished, caplog):
    (finished / "work" / "data.json").unlink()
    assert command() == 0
    assert "does not record its data" in caplog.text
    assert xformer.load(finished / "work").class_names == ["neg", "pos"]
    assert not (finished / "work" / "data.json").exists()


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("preprocessing.json", lambda text: text.replace('"neg", "pos"', '"pos", "neg"'), "class_names"),
        ("preprocessing.json", lambda text: text.replace("16", "8"), "max_len"),
        ("vocabulary.json", lambda text: '{"kind": "symbols", "symbols": ["a"]}', "vocabulary"),
    ],
)
def test_load_refuses_preprocessing_that_is_not_the_run_s(finished, name, damage, said):
    path = finished / "work" / name
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataChanged, match=f"has changed since: {said}"):
        xformer.load(finished / "work")


def test_prepared_data_that_was_tampered_with_is_refused(finished, capsys):
    (labels,) = (finished / "data").rglob("test.labels.npy")
    content = bytearray(labels.read_bytes())
    content[-4] ^= 1
    labels.write_bytes(content)
    assert command("--eval_only") == 1
    assert "is damaged (test labels changed since); delete that folder" in capsys.readouterr().err


@pytest.mark.full
def test_a_comparison_refuses_other_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(begin(tmp_path))
    compared = functools.partial(command, which=compare, config="compare.json")
    trainer = experiment.Experiment.trainer

    def change_later(self, workdir, *args, **kwargs):
        if "wide" in str(workdir):
            write(tmp_path / "d.tsv", ("a_good", "z_bad"))
        return trainer(self, workdir, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(experiment.Experiment, "trainer", change_later)
        assert compared() == 2
    assert "wide, seed 0: the data changed since the comparison began: class_names" in capsys.readouterr().err
    assert (tmp_path / "work" / "runs" / "full-0" / "result.json").exists()
    assert not (tmp_path / "work" / "runs" / "wide-0" / "data.json").exists()
    assert compared() == 2
    assert "full-0 was begun with other data: class_names" in capsys.readouterr().err
    write(tmp_path / "d.tsv")
    assert compared() == 0
    rows = [json.loads(line) for line in (tmp_path / "work" / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and len({row["info"]["digest"] for row in rows}) == 1
    write(tmp_path / "d.tsv", suffix=" more")
    assert compared() == 2
    assert "train texts" in capsys.readouterr().err


def test_differences_are_named():
    before = {"digest": "1", "train texts": "aa", "class_names": ["a"], "max_len": 4}
    assert data_record.differences(before, dict(before)) == []
    now = before | {"digest": "2", "train texts": "bb", "max_len": 8, "test texts": "cc"}
    assert data_record.differences(before, now) == ["train texts", "max_len (4 there, 8 now)", "test texts"]
    assert data_record.differences(before, before | {"digest": "2"}) == ["contents"]


def flip(checkpoint):
    files = [path for path in (checkpoint / "model").rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a flipped byte": flip,
    "no position": lambda checkpoint: (checkpoint / "position.json").unlink(),
    "half a position": lambda checkpoint: (checkpoint / "position.json").write_text('{"step"'),
    "no manifest": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
    "no checkpoint": shutil.rmtree,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_another_checkpoint_is_used_only_when_asked_for(finished, capsys, damage):
    work = finished / "work"
    best = json.loads((work / "result.json").read_text())["best_step"]
    (other,) = {2, 4} - {best}
    damage(work / "checkpoints" / str(best))
    before = contents(work)
    assert command("--eval_only") == 1
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if not line.startswith(("documents:", "--config is not read"))]
    assert out == "" and line.startswith("error: the best checkpoint (") and "--checkpoint=last" in line
    with pytest.raises(CheckpointError, match="the best checkpoint"):
        xformer.load(work)
    assert xformer.load(work, which="last").step == other
    assert command("--eval_only", "--checkpoint=last") == 0
    assert contents(work) == before


def test_a_damaged_newest_checkpoint_does_not_hide_the_best_of_an_unfinished_run(half, caplog):
    (only,) = (half / "work" / "checkpoints").iterdir()
    shutil.copytree(only, only.with_name("1"))
    flip(only)
    with pytest.raises(CheckpointError, match="the newest checkpoint, which names the best,"):
        xformer.load(half / "work")
    assert xformer.load(half / "work", which="last").step == 1
    assert f"checkpoint {only} is damaged" in caplog.text and "step 1 is used instead" in caplog.text


def test_the_checkpoint_flag_goes_with_eval_only(finished, capsys):
    assert command("--checkpoint=last") == 2
    assert "--checkpoint: goes with --eval_only" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", '{"name": "cha', "5", "null", "[]"])
@pytest.mark.parametrize("name", ["config.json", "data.json"])
def test_a_damaged_record_of_a_run_is_one_line(finished, capsys, name, content):
    (finished / "work" / name).write_text(content)
    before = contents(finished / "work")
    assert command() == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert f"{Path('work') / name} is damaged" in line
    with pytest.raises(WorkdirMismatch, match="is damaged"):
        xformer.load(finished / "work")
    assert contents(finished / "work") == before


@pytest.mark.parametrize("content", ["", "5", "[]", "{}", "null", None])
@pytest.mark.parametrize("name", ["preprocessing.json", "vocabulary.json"])
def test_damaged_preprocessing_of_a_run_is_one_line(finished, name, content):
    path = finished / "work" / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(WorkdirMismatch, match=f"{name} is (damaged|missing)") as error:
        xformer.load(finished / "work")
    assert "\n" not in str(error.value)


def test_a_result_that_names_another_best_is_refused(finished, capsys):
    path = finished / "work" / "result.json"
    result = json.loads(path.read_text())
    (other,) = {2, 4} - {result["best_step"]}
    path.write_text(json.dumps(result | {"best_step": other}))
    assert command("--eval_only") == 1
    assert f"result.json says that step {other} is the best" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=f"that step {result['best_step']} is"):
        xformer.load(finished / "work")


def test_a_run_without_its_config_is_refused(half, capsys):
    (half / "work" / "config.json").unlink()
    before = contents(half / "work")
    assert command("--config.seed=5") == 2
    assert "holds a run whose config.json is missing" in capsys.readouterr().err
    assert contents(half / "work") == before


def test_a_config_that_never_ran_may_be_corrected(finished, capsys):
    assert command("--config.train.init_from=nosuch", "--workdir=new") != 0
    capsys.readouterr()
    assert (finished / "new" / "config.json").is_file()
    assert command("--config.train.init_from=work", "--workdir=new") == 0


def test_a_damaged_result_is_made_again(finished, caplog):
    path = finished / "work" / "result.json"
    result = json.loads(path.read_text())
    rows = finished / "work" / "metrics.jsonl"
    logged = rows.read_text()
    rows.write_text("5\n" + logged + '{}\n{"step": 4, "spl')
    for content in ("", "5", "{}", '{"name": "changes", "best_st', json.dumps(result).replace('"name"', '"nbme"', 1)):
        path.write_text(content)
        assert folders.read_result(path.parent) is None and "result.json is damaged" in caplog.text
    assert command() == 0
    again = json.loads(path.read_text())
    assert all(again[key] == result[key] for key in ("eval", "test", "best_step"))
    assert "damaged rows are left out: 1, " in caplog.text
    assert rows.read_text() == logged


def test_predictions_say_what_was_cut(finished, caplog):
    loaded = xformer.load(finished / "work")
    texts = ["bad dull grey", "good warm blue and so on and on", "x" * 16, "x" * 17]
    found = loaded.predict(texts, batch_size=3)
    assert found.truncated.tolist() == [False, True, False, True]
    assert "2 of 4 texts are longer than max_len 16 tokens and were cut; the first is text 1" in caplog.text
    labels, probabilities = found
    assert labels == found.labels and probabilities is found.probabilities
    assert loaded.predict([]).truncated.shape == (0,)
    np.testing.assert_allclose(loaded.predict([texts[1][:16]]).probabilities[0], probabilities[1], rtol=1e-5)
    assert loaded.preprocess(["short"])["inputs"].shape == (1, 16)  # as wide as the batches of training
    for wrong in ("", "text", [""], ["a", " \n"], [5]):
        with pytest.raises(ValueError, match=r"texts must be a list|is empty"):
            loaded.predict(wrong)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        loaded.predict(["a"], batch_size=0)


def test_a_batch_far_larger_than_the_data_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(begin(tmp_path))
    assert command("--config.train.batch_size=3000000") == 2
    assert "must be at most 4 times the 48 training examples, got 3,000,000" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_running_out_of_memory_is_one_line(finished, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99999 bytes.")

    monkeypatch.setattr(Engine, "evaluate", fail)
    assert command("--eval_only") == 1
    (finished / "work" / "result.json").unlink()
    assert command() == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and all("out of memory: RESOURCE_EXHAUSTED" in line for line in errors)
    assert all("train.batch_size is 8" in line for line in errors)


def test_a_signal_before_anything_is_begun(tmp_path):
    arguments = [sys.executable, "-m", "experiments.run", "--config=x.py", f"--workdir={tmp_path / 'work'}"]
    process = subprocess.Popen(arguments, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    status = Path(f"/proc/{process.pid}/status")

    def listens():
        caught = re.search(r"SigCgt:\s*(\w+)", status.read_text() if status.exists() else "")
        return caught is not None and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1 == 1

    wait_for(listens, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANG)
    assert (process.returncode, out) == (75, "")
    assert err == "stopped: SIGTERM came before anything was begun; the same command begins it\n"


def test_names_that_are_no_utf_8(tmp_path, monkeypatch, capsys):
    """A file system may hold any bytes, the libraries that write checkpoints and data take UTF-8: one line says so."""
    home = tmp_path / os.fsdecode(b"caf\xe9")
    home.mkdir()
    monkeypatch.chdir(begin(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XFORMER_DATA", raising=False)
    assert cli.exit_code(run.command, ["--config=run.json", "--workdir=work"]) == 1
    assert "is no UTF-8; choose another with --data_dir" in capsys.readouterr().err
    assert cli.exit_code(run.command, ["--config=run.json", f"--workdir={home / 'work'}"]) == 2
    assert "--workdir: got " in (err := capsys.readouterr().err) and "whose whole name is UTF-8" in err
