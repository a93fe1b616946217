"""What a restart must not change, and what a kill, a full disk or a damaged file must not break."""

import asyncio
import errno
import gc
import json
import logging
import os
import re
import shutil
import signal

import numpy as np
import pytest
from train_fake import FakeData, arrays, compile_cache, make_trainer, rows, run_process, start_process  # noqa: F401
from waiting import HANG, has_rows, wait_for

from xformer.train import CheckpointError, Interrupted
from xformer.train.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("compile_cache")
NEVER = "/no/such/gate"  # a run in a process does not end before what the test does to it, however late that comes


def assert_same_run(first, second):
    """Bit for bit: every array at step 10 and every number of every row."""
    assert rows(first) == rows(second)
    for one, other in zip(arrays(first, 10), arrays(second, 10), strict=True):
        np.testing.assert_array_equal(one, other)
    results = [json.loads((workdir / "result.json").read_text()) for workdir in (first, second)]
    for key in ("eval", "test", "best_step", "train_flops", "tokens_per_step", "num_params"):
        assert results[0][key] == results[1][key]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, compile_cache):  # noqa: F811
    """The workdir of ten steps without a break, in this process."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    make_trainer(workdir).fit()
    return workdir


def test_ten_steps_are_five_and_a_new_process_and_five(tmp_path, compile_cache):  # noqa: F811
    settings = {"mesh": {"data": 2}, "accumulate": 2, "dropout_rate": 0.3}
    code, output = run_process(tmp_path / "once", compile_cache, 2, **settings)
    assert code == 0 and "from the start to 10" in output, output
    code, output = run_process(tmp_path / "twice", compile_cache, 2, stop_at_step=5, **settings)
    assert code == 75 and "stopped after step 5 of 10" in output, output
    code, output = run_process(tmp_path / "twice", compile_cache, 2, **settings)
    assert code == 0 and "going on from step 5" in output, output
    assert_same_run(tmp_path / "once", tmp_path / "twice")


@pytest.mark.full
def test_ten_steps_are_five_and_five_under_pmap(tmp_path):
    settings = {"parallel": "pmap", "mesh": {"data": 2}, "accumulate": 2, "dropout_rate": 0.3}
    make_trainer(tmp_path / "once", **settings).fit()
    with pytest.raises(Interrupted):
        make_trainer(tmp_path / "twice", stop_at_step=5, **settings).fit()
    make_trainer(tmp_path / "twice", **settings).fit()
    assert_same_run(tmp_path / "once", tmp_path / "twice")


@pytest.mark.parametrize("stop", [1, 8])
def test_stopping_anywhere_changes_nothing(tmp_path, undisturbed, stop):
    with pytest.raises(Interrupted):
        make_trainer(tmp_path, stop_at_step=stop).fit()
    make_trainer(tmp_path).fit()
    assert_same_run(undisturbed, tmp_path)


def test_a_signal_saves_and_says_how_to_go_on(tmp_path, undisturbed, compile_cache):  # noqa: F811
    process = start_process(tmp_path, compile_cache, pause=0.2, gate=NEVER)
    wait_for(lambda: has_rows(tmp_path, 1), process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=HANG)
    assert process.returncode == 75, output + errors
    assert "SIGTERM came: stopped after step" in output and "the same command goes on from there" in output
    make_trainer(tmp_path).fit()
    assert_same_run(undisturbed, tmp_path)


class SignallingData(FakeData):
    """Interrupts its process as a split is opened."""

    def batches(self, split, *args, **kwargs):
        if split == self.info["split"]:
            os.kill(os.getpid(), self.info["signal"])
        return super().batches(split, *args, **kwargs)


@pytest.mark.parametrize(
    ("split", "number", "where"),
    [
        ("train", signal.SIGINT, "before the first step"),
        ("validation", signal.SIGINT, "after step 4 of 10"),
        ("test", signal.SIGTERM, "after step 10 of 10"),
    ],
)
def test_a_signal_outside_the_steps_loses_nothing(tmp_path, undisturbed, split, number, where):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"{number.name} came: stopped {where}"):
        make_trainer(tmp_path, data=SignallingData(info={"split": split, "signal": number})).fit()
    assert signal.getsignal(number) == before and not (tmp_path / "result.json").exists()
    if split == "validation":
        assert Checkpoints(tmp_path / "checkpoints").position(4)["evaluated"] is False
    make_trainer(tmp_path).fit()
    assert_same_run(undisturbed, tmp_path)


def test_kill_9_loses_only_the_steps_since_the_checkpoint(tmp_path, undisturbed, compile_cache):  # noqa: F811
    process = start_process(tmp_path, compile_cache, pause=0.1, gate=NEVER)
    wait_for(lambda: has_rows(tmp_path, 3), process)
    process.kill()
    process.communicate()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "spl')
    assert Checkpoints(tmp_path / "checkpoints").steps()[-1] >= 3
    make_trainer(tmp_path).fit()
    assert_same_run(undisturbed, tmp_path)


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory, compile_cache):  # noqa: F811
    workdir = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Interrupted):
        make_trainer(workdir, stop_at_step=7).fit()
    return workdir


@pytest.fixture
def stopped(tmp_path, stopped_once):
    """A run stopped at step 7, with checkpoints of the steps 4, 6 and 7."""
    return shutil.copytree(stopped_once, tmp_path, dirs_exist_ok=True)


def damage_array(folder):
    """One bit of the largest file flips."""
    path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_manifest(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:50])


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (damage_array, "has changed"),
        (cut_manifest, "manifest.json"),
        (lambda folder: (folder / "position.json").unlink(), "position.json is missing"),
        (lambda folder: shutil.rmtree(folder / "optimizer"), "is missing"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(stopped, undisturbed, caplog, damage, word):
    damage(stopped / "checkpoints" / "7")
    make_trainer(stopped).fit()
    assert f"{stopped / 'checkpoints' / '7'} is damaged" in caplog.text and word in caplog.text
    assert_same_run(undisturbed, stopped)


def test_what_a_kill_inside_a_save_leaves_is_cleared(stopped, undisturbed):
    folder = stopped / "checkpoints"
    shutil.copytree(folder / "6", folder / "8.tmp")
    (folder / "8.tmp" / "manifest.json").unlink()
    (folder / "7").rename(folder / "7.old")  # killed while step 7 was being replaced
    make_trainer(stopped).fit()
    assert_same_run(undisturbed, stopped)
    assert not list(folder.glob("*.tmp")) and not list(folder.glob("*.old"))


def test_without_an_intact_checkpoint_the_run_starts_anew(stopped, undisturbed, caplog):
    for folder in (stopped / "checkpoints").iterdir():
        cut_manifest(folder)
    make_trainer(stopped).fit()
    assert caplog.text.count("is damaged") == 3
    assert_same_run(undisturbed, stopped)


def test_a_damaged_best_checkpoint_is_chosen_anew(stopped, caplog):
    damage_array(stopped / "checkpoints" / "4")
    result = make_trainer(stopped).fit()
    assert "the best checkpoint (step 4) is damaged" in caplog.text
    assert result["best_step"] > 4 and result["test"]["examples"] == 7


def test_evaluation_needs_an_intact_checkpoint(stopped):
    for folder in (stopped / "checkpoints").iterdir():
        cut_manifest(folder)
    with pytest.raises(CheckpointError, match="holds no intact checkpoint"):
        make_trainer(stopped).evaluate("test")
    assert {path.name for path in (stopped / "checkpoints").iterdir()} == {"4", "6", "7"}


def test_a_full_disk_fails_the_run_and_spares_earlier_checkpoints(stopped, undisturbed):
    code, output = run_process(stopped, "", file_size_limit=5000)
    assert code == 1 and "CheckpointError: the checkpoint of step" in output, output
    assert "those before it ([4, 6, 7]) are untouched" in output
    # Where the machine is busy, threads of TensorStore may find the event loop of a save that failed closed.
    raised = [line for line in output.splitlines() if re.match(r"\w+(Error|Exception)\b", line)]
    assert {line.partition(":")[0] for line in raised if line != "RuntimeError: Event loop is closed"} == {
        "CheckpointError"
    }, output
    assert "never retrieved" not in output
    make_trainer(stopped).fit()
    assert_same_run(undisturbed, stopped)


def test_what_orbax_threads_raise_is_not_logged_after_the_error_that_says_it(tmp_path, caplog):
    async def future_that_nobody_asks(file):
        task = asyncio.create_task(fail(file))
        await asyncio.sleep(0)
        del task

    async def fail(file):
        exec(compile("raise ValueError('no space left')", file, "exec"))

    def is_logged(file):
        caplog.clear()
        asyncio.run(future_that_nobody_asks(file))
        gc.collect()
        return "never retrieved" in caplog.text

    assert is_logged("site-packages/orbax/writer.py")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError):
        Checkpoints(tmp_path / "file").save(1, {}, {}, None)
    try:
        assert not is_logged("site-packages/orbax/writer.py") and is_logged("mine.py")
    finally:
        logging.getLogger("asyncio").filters.clear()


def test_a_read_only_folder_fails_the_run_and_spares_earlier_checkpoints(stopped, undisturbed, monkeypatch):
    make = type(stopped).mkdir

    def refuse(path, *args, **kwargs):
        if path.parent.name == "checkpoints":  # permissions would not stop root
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        make(path, *args, **kwargs)

    with (
        monkeypatch.context() as patch,
        pytest.raises(CheckpointError, match=r"Read-only .* \(\[4, 6, 7\]\) are untouched"),
    ):
        patch.setattr(type(stopped), "mkdir", refuse)
        make_trainer(stopped).fit()
    make_trainer(stopped).fit()
    assert_same_run(undisturbed, stopped)


def test_the_data_state_may_be_bytes(tmp_path, undisturbed):
    with pytest.raises(Interrupted):
        make_trainer(tmp_path, data=FakeData(bytes_state=True), stop_at_step=5).fit()
    make_trainer(tmp_path, data=FakeData(bytes_state=True)).fit()
    assert_same_run(undisturbed, tmp_path)


def test_a_finished_run_is_thinned_to_its_best_and_still_knows_itself(tmp_path, undisturbed, caplog):
    """Evaluated and, without its result, completed again from the best checkpoint, to the same numbers."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    result = json.loads((run / "result.json").read_text())
    checkpoints = Checkpoints(run / "checkpoints")
    assert len(checkpoints.steps()) > 1 and result["best_step"] in checkpoints.steps()
    before = make_trainer(run).evaluate("test")
    checkpoints.thin(result["best_step"] + 100)
    assert len(checkpoints.steps()) > 1, "nothing is deleted for a checkpoint that is not there"
    checkpoints.thin(result["best_step"])
    assert checkpoints.steps() == [result["best_step"]]
    assert make_trainer(run).evaluate("test") == before
    assert make_trainer(run).evaluate("test", "last") == before  # the best is not the last here
    assert "the run ended at step 10, whose checkpoint is gone" in caplog.text
    (run / "result.json").unlink()
    make_trainer(run).fit()
    assert_same_run(run, undisturbed)
