"""Training from Python: five lines give a result, and the process is left as it was."""

import logging
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from ml_collections import ConfigDict

import xformer
from xformer import config, experiment, fitting, shipped
from xformer.schema import ConfigError
from xformer.train import Interrupted, WorkdirMismatch

SMALL = {
    "train.num_steps": 4,
    "train.eval_every": 2,
    "train.checkpoint_every": 2,
    "train.log_every": 1,
    "train.batch_size": 8,
    "train.mesh": {"data": 1},
    "task.num_train": 64,
    "task.num_validation": 21,
    "task.num_test": 19,
    "model.num_layers": 1,
    "model.width": 16,
    "model.mlp_dim": 16,
    "optimizer.warmup_steps": 1,
}


def process_state():
    """What a library must not change in its user's process."""
    root = logging.getLogger()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    return root.level, list(root.handlers), handlers, flags.FLAGS.is_parsed()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """(workdir, data folder, result, process state before, process state after) of a run of four steps."""
    workdir, data_dir = tmp_path_factory.mktemp("runs") / "a", tmp_path_factory.mktemp("data")
    before = process_state()
    result = xformer.fit("demo:full", workdir, overrides=SMALL, data_dir=data_dir)
    return workdir, data_dir, result, before, process_state()


def test_fit_trains_and_returns_what_result_json_holds(fitted):
    workdir, _, result, *_ = fitted
    assert result["name"] == "demo_full" and result["last_step"] == 4
    assert 0 <= result["test"]["accuracy"] <= 1 and result["test"]["examples"] == 19
    run = xformer.load(workdir)
    assert run.step == result["best_step"]
    assert run.predict(["[MAX 2 9 ]"]).labels[0] in run.class_names


def test_fit_leaves_logging_flags_and_signals_alone(fitted):
    *_, before, after = fitted
    assert after == before


def test_a_config_in_any_form_is_the_same_run(fitted):
    workdir, data_dir, result, *_ = fitted
    as_text = [f"{key}={value}" for key, value in SMALL.items()]
    dotted, plain = config.read("demo:full"), config.read_plain("demo:full")
    assert isinstance(plain, dict) and dotted.train.num_steps == plain["train"]["num_steps"]
    for given in ("demo:full", shipped.folder() / "demo.py", plain, dotted, ConfigDict(plain), workdir / "config.json"):
        assert xformer.fit(given, workdir, overrides=as_text, data_dir=data_dir) == result
    with pytest.raises(WorkdirMismatch, match="seed"):
        xformer.fit("demo:full", workdir, overrides=SMALL | {"seed": 1}, data_dir=data_dir)


def test_fit_resumes_outside_the_main_thread(fitted, tmp_path):
    """Signal handlers belong to the main thread; elsewhere a run works without them."""
    _, data_dir, result, *_ = fitted
    results = []

    def work(stop):
        try:
            results.append(xformer.fit("demo:full", tmp_path, overrides=SMALL | stop, data_dir=data_dir))
        except Interrupted as error:
            results.append(error.step)

    for stop in ({"train.stop_at_step": 2}, {}):
        thread = threading.Thread(target=work, args=(stop,))
        thread.start()
        thread.join()
    assert results[0] == 2
    assert results[1]["test"] == result["test"]


def test_ctrl_c_saves_and_the_same_call_goes_on(fitted, tmp_path, monkeypatch):
    _, data_dir, result, *_ = fitted
    before = process_state()
    once = lambda *_: monkeypatch.undo() or os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr("xformer.train.progress.Progress.step", once)
    with pytest.raises(Interrupted) as error:
        xformer.fit("demo:full", tmp_path, overrides=SMALL, data_dir=data_dir)
    assert 1 <= error.value.step < 4 and process_state() == before
    assert xformer.fit("demo:full", tmp_path, overrides=SMALL, data_dir=data_dir)["test"] == result["test"]


def build(spec, overrides):
    return experiment.build(config.override(config.read(spec), fitting.as_overrides(overrides))).config


def test_values_of_python_are_taken_as_they_are():
    overrides = {"name": "'q'", "optimizer.learning_rate": np.float64(1e-3), "train.num_steps": np.int64(7)}
    found = build("demo:full", overrides)
    assert (found.name, found.optimizer.learning_rate, found.train.num_steps) == ("'q'", 1e-3, 7)
    as_text = {"seed": "3", "attention": '{"name": "window", "left": 3}', "task.path": Path("a b.tsv")}
    found = build("listops:full", as_text)
    assert (found.seed, found.attention.name, found.task.path) == (3, "window", "a b.tsv")


@pytest.mark.parametrize(
    "given, overrides, message",
    [
        ("dmeo:full", {}, "nearest match 'demo'"),
        ("demo:full", {"train.num_stps": 4}, "nearest match 'num_steps'"),
        ("demo:full", ["train.num_steps"], "takes --config.key=value"),
        ("compare_demo", {}, "this is a comparison"),
        ({"name": "a"}, {}, "attention"),
        ("demo:full", None, "overrides: got None, takes a mapping, or a list of strings key=value"),
        ("demo:full", {"train.num_steps": "four"}, "train.num_steps: got 'four', takes an integer"),
        ("demo:full", {"train..num_steps": 4}, "got an empty part"),
    ],
)
def test_a_wrong_config_is_one_line_and_makes_no_folder(given, overrides, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        xformer.fit(given, tmp_path / "run", overrides=overrides)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
