"""A comparison with `pretrain`: masked language modelling first, then fine-tuning from it, in one command."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_comparison
from waiting import wait_for

from xformer import comparison as comparisons
from xformer import pretraining
from xformer.commands import cli, compare, comparison_plan, comparison_runs
from xformer.config import ConfigError
from xformer.report import formatting, style
from xformer.train import DataChanged, Interrupted, warm_start


@pytest.fixture
def config(tmp_path):
    return tiny_comparison.write(
        tmp_path / "config.py", base={"train": {"num_steps": 3}}, pretrain={"num_steps": 4, "learning_rate": 0.02}
    )


def load(config, *overrides):
    return comparisons.load_comparison(str(config), overrides)


def planned(config, workdir, *overrides):
    parts = comparisons.comparison_parts(load(config, *overrides))
    return comparison_plan.plan(parts, workdir)


@pytest.mark.full
def test_one_command_pretrains_fine_tunes_reports_and_skips(config, tmp_path, capsys, monkeypatch):
    """One story, since every run costs compilation."""
    monkeypatch.setattr(style, "DPI", 50)
    work = tmp_path / "work"
    flags = [f"--config={config}", f"--workdir={work}", f"--data_dir={tmp_path / 'data'}"]
    assert cli.exit_code(compare.command, flags) == cli.FINISHED, capsys.readouterr().err
    out = capsys.readouterr().out
    for variant, seed in (("full", 0), ("window", 1)):
        run, before = (
            json.loads((folder / "result.json").read_text())
            for folder in (work / "runs" / f"{variant}-{seed}", work / "runs" / f"{variant}-{seed}" / "pretrain")
        )
        assert (before["seed"], before["last_step"], before["attention"]) == (seed, 4, variant)
        assert run["init_from"]["source"] == {
            key: before[key] for key in ("name", "select_metric", "test", "train_flops", "train_seconds")
        }
        # Of the encoder nothing is left fresh, the CLS vector included; the heads have nothing in common.
        assert set(run["init_from"]["missing"]) == {"classify/kernel", "classify/bias"} and not run["init_from"]["left"]
        assert {name.partition("/")[0] for name in run["init_from"]["extra"]} == {
            "bias", "mask_vector", "transform", "transform_norm",
        }  # fmt: skip
    report = (work / "report.md").read_text()
    table = next(line for line in report.splitlines() if line.startswith("| full |"))
    assert "count the pretraining" in report and "Attention only: every other key" in report
    rows = [json.loads(line) for line in (work / "results.jsonl").read_text().splitlines()]
    costs = [(row["train_flops"], row["init_from"]["source"]["train_flops"]) for row in rows]
    assert f" {formatting.si(sum(costs[0]))} |" in table, (costs[0], table)
    assert "## Pretraining" in report and "test bits\\_per\\_character" in report and "pretraining time" in report
    assert "<h2>Pretraining</h2>" in (work / "report.html").read_text() and "full" in out

    assert cli.exit_code(compare.command, flags) == cli.FINISHED
    assert "4 of 4 runs are finished already" in capsys.readouterr().err
    assert cli.exit_code(compare.command, [*flags, "--config.pretrain.num_steps=5"]) == cli.WRONG_ARGUMENTS
    assert "pretrain.num_steps: 4 there, 5 now" in capsys.readouterr().err


def test_what_is_pretrained_is_the_run_s_own_model_texts_and_seed(config, tmp_path):
    runs = planned(config, tmp_path, "pretrain.batch_size=8", "pretrain.mask_share=0.3", "pretrain.eval_every=1")
    for run in runs:
        before = run.pretraining
        assert before.seed == run.seed and before.attention == run.config.attention
        assert before.task.source == run.config.task and before.task.mask_share == 0.3
        assert (before.train.num_steps, before.train.batch_size, before.train.eval_every) == (4, 8, 1)
        assert before.optimizer.learning_rate == 0.02 and run.config.optimizer.learning_rate == 0.01
        assert (before.model.name, before.model.pooling, before.model.width) == ("masked_lm", "cls", 8)
        assert (before.train.init_from, run.config.train.init_from) == (None, "pretrain")
    # Seeds share compiled steps: nothing in the settings says whose folder it is.
    assert runs[0].config.train == runs[2].config.train


def test_without_the_section_a_comparison_is_what_it_always_was(config, tmp_path):
    loaded = load(config, "pretrain=None")
    assert "pretrain" not in loaded
    runs = planned(config, tmp_path, "pretrain=None")
    assert all(run.pretraining is None and run.config.train.init_from is None for run in runs)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pretrain.num_stepps=3"], "pretrain.num_stepps: got 3, but a comparison's pretrain reads no such key"),
        (["pretrain.num_steps=0"], "pretrain.num_steps"),
        (["pretrain={}"], "pretrain.num_steps, pretrain.train_flops: got neither, takes one of the two"),
        (["pretrain.train_flops=1e9"], "pretrain.num_steps, pretrain.train_flops: got 4 and 1e+09, takes one of"),
        (["pretrain={'train_flops': 0.0}"], "pretrain.train_flops: got 0, takes a number above 0"),
        (["pretrain.mask_share=2.0"], "pretrain: task.mask_share: masked_lm: mask_share must be a number between"),
        (["train.init_from=elsewhere"], "pretrain: got a section, takes None where train.init_from is 'elsewhere'"),
        (["pretrain.batch_size=0"], "pretrain.batch_size"),
    ],
)
def test_what_is_wrong_is_one_line(config, overrides, message):
    with pytest.raises(ConfigError) as error:
        load(config, *overrides)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_classifier_with_weighted_tokens_is_pretrained_without_their_weights(config, tmp_path):
    run = planned(config, tmp_path, "model.pooling=attention")[0]
    assert (run.config.model.pooling, run.pretraining.model.pooling) == ("attention", "mean")


def test_chunks_are_pretrained_on_the_first_one(config):
    documents = {"name": "documents", "path": "x.jsonl", "max_len": 64}
    run = {"name": "r", "model": {"name": "classifier", "chunk_len": 16}, "task": documents}
    run |= {"optimizer": {}, "train": {}}
    assert pretraining.config_of(run, {"num_steps": 1})["task"]["source"]["max_len"] == 16
    with pytest.raises(ConfigError, match=r"pretrain: model.chunk_len is 16, but the task listops has no max_len"):
        pretraining.config_of(run | {"task": {"name": "listops", "max_len": None}}, {"num_steps": 1})


@pytest.mark.sampled(1)
def test_a_run_that_stops_between_the_phases_goes_on(config, tmp_path, monkeypatch):
    """Stopped before the fine-tuning began: the pretraining is done once, and the result is that of an unbroken run."""
    data_dir = str(tmp_path / "data")
    broken, whole = (planned(config, tmp_path / name, "seeds=(0,)")[0] for name in ("broken", "whole"))
    fingerprints = comparison_runs.prepare([broken], data_dir)
    engines: dict = {}
    comparison_runs.train_one(whole, data_dir, fingerprints, engines, True)

    fit = comparison_runs._fit

    def stop(config, folder, *rest):
        if folder == broken.folder:
            raise Interrupted("SIGTERM came", 0)
        fit(config, folder, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(comparison_runs, "_fit", stop)
        with pytest.raises(Interrupted):
            comparison_runs.train_one(broken, data_dir, fingerprints, engines, True)
    assert broken.result is None
    record = broken.folder / "pretrain" / "data.json"
    known = record.read_text()
    record.write_text(json.dumps(json.loads(known) | {"max_len": 15}))
    with pytest.raises(DataChanged, match="max_len"):  # the texts changed between the phases
        comparison_runs.train_one(broken, data_dir, fingerprints, engines, True)
    record.write_text(known)
    before = (broken.folder / "pretrain" / "result.json").stat().st_mtime_ns
    comparison_runs.train_one(broken, data_dir, fingerprints, engines, True)
    assert (broken.folder / "pretrain" / "result.json").stat().st_mtime_ns == before
    for folder in ("pretrain", ""):
        both = [warm_start.read(run.folder / folder / "checkpoints" / ("4" if folder else "3"), "model")
                for run in (broken, whole)]  # fmt: skip
        jax.tree.map(np.testing.assert_array_equal, *both)
    assert broken.result["test"] == whole.result["test"]


@pytest.mark.full
def test_a_kill_while_pretraining_is_resumed(config, tmp_path):
    """kill -9 in either phase; the same command then finishes with the numbers of an unbroken comparison."""
    root = Path(__file__).parent.parent
    env = dict(os.environ, PYTHONPATH=str(root), JAX_PLATFORMS="cpu")
    env["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "compiled")

    def command(work):
        return [sys.executable, "-m", "experiments.compare", f"--config={config}", f"--workdir={tmp_path / work}",
                f"--data_dir={tmp_path / 'data'}", "--config.variants=full", "--config.seeds=(0,)",
                "--config.train.num_steps=20", "--config.pretrain.num_steps=20",
                "--config.pretrain.eval_every=2"]  # fmt: skip

    subprocess.run(command("whole"), env=env, cwd=root, check=True, capture_output=True)
    for folder in ("full-0/pretrain", "full-0"):
        process = subprocess.Popen(
            command("broken"), env=env, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        checkpoints = tmp_path / "broken" / "runs" / folder / "checkpoints"
        wait_for(lambda checkpoints=checkpoints: any(checkpoints.glob("[0-9]*")), process)
        assert process.poll() is None, f"it ended before {folder} could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command("broken"), env=env, cwd=root, check=True, capture_output=True)
    for run in ("full-0/pretrain", "full-0"):
        whole, broken = (
            json.loads((tmp_path / work / "runs" / run / "result.json").read_text()) for work in ("whole", "broken")
        )
        assert whole["test"] == broken["test"], run
