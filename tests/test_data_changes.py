"""Data that changes behind a run: refused wherever the run is used again, and nothing of the run is rewritten."""

import functools
import json
import shutil
from pathlib import Path

import pytest

import xformer
from xformer import experiment
from xformer.commands import cli, compare, run
from xformer.train import DataChanged, data_record

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
