"""Settings are checked when made, workdirs when used."""

import dataclasses
import subprocess
import sys

import pytest
from train_fake import make_trainer

from xformer.train import TrainConfig, WorkdirBusy, WorkdirMismatch
from xformer.train import workdir as folders


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, "num_steps must be an integer of at least 1, got 0"),
        ({"batch_size": True}, "batch_size must be an integer of at least 1, got True"),
        ({"log_every": 2.0}, "log_every must be an integer of at least 1, got 2.0"),
        ({"eval_batch_size": 0}, "eval_batch_size must be an integer of at least 1, got 0"),
        ({"stop_at_step": -5}, "stop_at_step must be an integer of at least 1, got -5"),
        ({"parallel": "pjit"}, "parallel must be one of jit, pmap, got 'pjit'"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16, got 'float16'"),
        ({"select_mode": "best"}, "select_mode must be one of max, min, None, got 'best'"),
        ({"accumulate": 3}, "accumulate must divide batch_size, got 3 micro-batches of 8 examples"),
        ({"mesh": {"model": 2}}, "mesh takes the axes data, fsdp, tensor, sequence, got 'model'"),
        ({"mesh": {"data": 0}}, "mesh: the size of data must be a positive integer or -1, got 0"),
        ({"mesh": {"data": -1, "fsdp": -1}}, "mesh: at most one axis can be -1"),
        ({"parallel": "pmap", "mesh": {"fsdp": 2}}, "mesh: parallel 'pmap' shares out data only, got fsdp=2"),
    ],
)
def test_wrong_settings_are_one_line(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        TrainConfig(**{"num_steps": 10, "batch_size": 8} | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": {"data": 3}}, "batch_size must be a multiple of 3 .*got 8"),
        ({"mesh": {"data": 4}, "accumulate": 4}, "batch_size must be a multiple of 16 .*got 8"),
        ({"mesh": {"data": 16}}, "mesh: data=16, fsdp=1, tensor=1, sequence=1 needs 16 devices, there are 8"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_computing(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **change).fit()
    assert not (tmp_path / "metrics.jsonl").exists()


CONFIG = {
    "seed": 1,
    "optimizer": {"schedule": "cosine"},
    "train": {"num_steps": 10, "mesh": {"data": 1}, "log_every": 2},
}


def use(workdir, config=CONFIG):
    """A workdir in which a run of `config` has done something."""
    workdir.mkdir(exist_ok=True)
    folders.claim(workdir, config)
    (workdir / "metrics.jsonl").write_text('{"step": 1, "split": "train"}\n')
    return workdir


def changed(section, **values):
    return CONFIG | {section: CONFIG[section] | values}


def test_a_used_workdir_refuses_another_config_and_shows_the_difference(tmp_path):
    folders.claim(use(tmp_path), CONFIG)
    with pytest.raises(WorkdirMismatch, match=r"optimizer\.schedule: 'cosine' there, 'constant' now") as caught:
        folders.claim(tmp_path, changed("optimizer", schedule="constant") | {"seed": 2})
    assert "seed: 1 there, 2 now" in str(caught.value) and "\n" not in str(caught.value)
    assert folders.read_json(tmp_path / "config.json") == CONFIG


def test_a_workdir_where_nothing_was_done_takes_any_config(tmp_path):
    folders.claim(tmp_path, CONFIG)
    folders.claim(tmp_path, CONFIG | {"seed": 2})
    assert folders.read_json(tmp_path / "config.json")["seed"] == 2


def test_what_changes_no_number_may_change_and_is_logged(tmp_path, caplog):
    use(tmp_path)
    allowed = changed("train", mesh={"data": 8}, log_every=5, stop_at_step=4)
    folders.claim(tmp_path, allowed)
    assert "train.log_every: 5, before 2" in caplog.text and "train.mesh.data: 8, before 1" in caplog.text
    assert folders.read_json(tmp_path / "config.json") == allowed


def test_more_steps_only_with_a_constant_schedule(tmp_path):
    use(tmp_path / "cosine")
    with pytest.raises(WorkdirMismatch, match="only with a constant schedule"):
        folders.claim(tmp_path / "cosine", changed("train", num_steps=20))
    constant = changed("optimizer", schedule="constant")
    use(tmp_path, constant)
    folders.write_json(tmp_path / "result.json", {})
    folders.claim(tmp_path, constant | {"train": CONFIG["train"] | {"num_steps": 20}})
    assert not (tmp_path / "result.json").exists()
    with pytest.raises(WorkdirMismatch, match=r"train.num_steps: 20 there, 10 now"):
        folders.claim(tmp_path, constant)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    hold = (
        "import sys, pathlib, time\nfrom xformer.train import workdir\n"
        "with workdir.lock(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(WorkdirBusy, match=f"in use by process {process.pid}"), folders.lock(tmp_path):
            pass
        process.kill()
        process.wait()
        with folders.lock(tmp_path):
            pass


def test_the_lock_holds_within_a_process_too(tmp_path):
    with folders.lock(tmp_path), pytest.raises(WorkdirBusy), folders.lock(tmp_path):
        pass


def test_defaults_need_only_steps_and_batch():
    train = TrainConfig(num_steps=5, batch_size=4)
    assert train.mesh == {"data": -1} and dataclasses.replace(train, stop_at_step=3).stop_at_step == 3
