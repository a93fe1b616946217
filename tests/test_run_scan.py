"""A run whose layers are scanned over and recomputed: resumed, loaded and evaluated like any other."""

import json

import numpy as np
import pytest
from test_run import DEMO, SMALL, in_process
from train_fake import arrays, compile_cache, rows  # noqa: F401

import xformer
from xformer.commands import cli, run

pytestmark = pytest.mark.full

SETTINGS = (
    f"{DEMO}:bigbird",
    *SMALL,
    "--config.train.mesh={'data': 1}",
    "--config.train.log_every=1",
    "--config.train.accumulate=2",
    "--config.model.num_layers=3",
    "--config.model.dropout_rate=0.2",
)
SCAN = ("--config.model.scan_layers=True", "--config.model.remat=True")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, compile_cache):  # noqa: F811
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def train(runs):
    """Trains in a folder of that name; the exit code is checked."""

    def train(name, *settings, code=0):
        argv = [*SETTINGS, f"--workdir={runs / name}", f"--data_dir={runs / 'data'}", *settings]
        assert cli.exit_code(run.command, argv) == code
        return runs / name

    return train


@pytest.fixture(scope="module")
def scanned(train):
    return train("scanned", *SCAN)


def test_a_restart_changes_nothing(train, scanned):
    train("twice", *SCAN, "--config.train.stop_at_step=4", code=75)
    twice = train("twice", *SCAN)
    assert rows(twice) == rows(scanned)
    for one, other in zip(arrays(twice, 10), arrays(scanned, 10), strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_trains_as_the_plain_model_does(train, scanned):
    """Dropout on: each layer of the scan draws what it draws alone."""
    for one, other in zip(rows(train("plain")), rows(scanned), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other.get("grad_norm", 0) == pytest.approx(one.get("grad_norm", 0), rel=1e-3)


def test_it_is_loaded_and_evaluated(scanned, runs, capsys):
    result = json.loads((scanned / "result.json").read_text())
    loaded = xformer.load(scanned)
    assert loaded.step == result["best_step"] and loaded.config.model.scan_layers
    assert loaded.predict(["[MAX 2 9 ]", "[MIN 4 7 ]"]).probabilities.shape == (2, 10)
    stacked = np.asarray(loaded.model.blocks.feed_forward.expand.kernel[...])
    assert stacked.shape == (3, 16, 16) and len({layer.tobytes() for layer in stacked}) == 3
    code, out, _ = in_process(capsys, run.command, f"--workdir={scanned}", f"--data_dir={runs / 'data'}", "--eval_only")
    assert code == 0 and json.loads(out) == {split: result[split] for split in ("eval", "test")}
