"""What TensorBoard, Weights & Biases and a user's own tracker are told of a run, read back from what they wrote."""

import dataclasses
import importlib.util
import json
import os
import struct
import time

import pytest
from train_fake import compile_cache, make_trainer, rows  # noqa: F401
from waiting import HANG

from xformer import config as configs
from xformer.schema import ConfigError
from xformer.train import CallbackFailed, Interrupted, Tracker
from xformer.train.trackers import WandB

pytestmark = pytest.mark.usefixtures("compile_cache")


def with_trackers(workdir, *named, **settings):
    """A trainer of ten steps with trackers."""
    trainer = make_trainer(workdir, **settings)
    return dataclasses.replace(trainer, trackers=tuple((type(one).__name__, one) for one in named))


class Notes(Tracker):
    """Writes down what it is told."""

    def __init__(self):
        self.said = []

    def start(self, run, config, metrics):
        assert config["model"] == {"dropout_rate": 0.2} and "accuracy" in metrics
        self.said.append(("start", run.step))

    def write(self, row):
        self.said.append((row["split"], row["step"]))

    def end(self, result):
        self.said.append(("end", result["last_step"]))

    def close(self):
        self.said.append(("close", None))


def test_a_tracker_sees_every_row_once_over_a_restart(tmp_path):
    first, second = Notes(), Notes()
    with pytest.raises(Interrupted):
        with_trackers(tmp_path / "run", first, stop_at_step=4).fit()
    with_trackers(tmp_path / "run", second).fit()
    told = [entry for notes in (first, second) for entry in notes.said]
    written = [(row["split"], row["step"]) for row in rows(tmp_path / "run")]
    assert [entry for entry in told if entry[0] in ("train", "validation")] == written
    assert [entry for entry in told if entry[0] not in ("train", "validation")] == [
        ("start", 0), ("close", None), ("start", 4), ("end", 10), ("close", None)
    ]  # fmt: skip


def test_what_a_tracker_raises_is_one_line_that_names_it(tmp_path):
    class Broken(Tracker):
        def write(self, row):
            raise KeyError("account")

    with pytest.raises(CallbackFailed, match=r"tracker 'Broken': write raised KeyError: 'account' \(test_train_track"):
        with_trackers(tmp_path / "run", Broken()).fit()


def test_every_tracker_is_closed_whatever_one_of_them_raises(tmp_path):
    class Broken(Tracker):
        def close(self):
            raise OSError("disk full")

    first, last = Notes(), Notes()
    with pytest.raises(CallbackFailed, match="tracker 'Broken': close raised OSError: disk full"):
        with_trackers(tmp_path / "run", first, Broken(), last).fit()
    assert first.said[-1] == last.said[-1] == ("close", None)


def records(path):
    """The payloads of a TFRecord file: length (8 bytes), its checksum (4), the payload, its checksum (4)."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + size]
        at += size + 16


def test_tensorboard_has_the_hyperparameters_and_the_results(tmp_path):
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    result = with_trackers(tmp_path / "run").fit()
    (file,) = (tmp_path / "run").glob("events.out.tfevents.*")
    plugin, scalars = {}, {}
    for event in map(Event.FromString, records(file)):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "hparams":
                plugin[value.tag] = HParamsPluginData.FromString(value.metadata.plugin_data.content)
            else:
                scalars[value.tag, event.step] = value.simple_value
    given = plugin["_hparams_/session_start_info"].session_start_info.hparams
    assert given["model.dropout_rate"].number_value == pytest.approx(0.2)
    assert given["optimizer.schedule"].string_value == "cosine" and given["train.batch_size"].number_value == 8
    shown = {info.name.tag for info in plugin["_hparams_/experiment"].experiment.metric_infos}
    assert {"validation/loss", "validation/accuracy", "test/loss", "test/accuracy"} == shown
    assert scalars["test/accuracy", result["best_step"]] == pytest.approx(result["test"]["accuracy"])
    assert plugin["_hparams_/session_end_info"].session_end_info.status == 1, "success"
    for row in rows(tmp_path / "run"):
        assert scalars[f"{row['split']}/loss", row["step"]] == pytest.approx(row["loss"])


def offline_records(path):
    """The payloads of a `.wandb` file: LevelDB's log format, in blocks of 32 KiB, after a header of 7 bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # what is left of a block is too short for a header
            at += 2**15 - at % 2**15
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0 or at + 7 + size > len(data):  # not written yet
            break
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            yield whole
            whole = b""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.filterwarnings("default")  # wandb's own
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "600")  # seconds until its process has to answer; 30 by default
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    from wandb.proto.wandb_internal_pb2 import Record

    tracker = lambda: WandB(project="mine", group="compared", mode="offline")
    with pytest.raises(Interrupted):
        with_trackers(tmp_path / "run", tracker(), stop_at_step=4).fit()
    result = with_trackers(tmp_path / "run", tracker()).fit()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime)
    assert len(files) == 2
    deadline, found = time.monotonic() + HANG, []
    while sum(record.HasField("exit") for record in found) < 2:  # its process may still write after `finish`
        assert time.monotonic() < deadline, "a file is not whole"
        time.sleep(0.01)
        found = [Record.FromString(record) for file in files for record in offline_records(file)]
    runs = [record.run for record in found if record.HasField("run")]
    identity = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    assert {(run.run_id, run.project, run.run_group, run.display_name) for run in runs} == {
        (identity, "mine", "compared", "fake, seed 3")
    }
    given = {item.key: json.loads(item.value_json) for run in runs for item in run.config.update}
    assert given["model"] == {"dropout_rate": 0.2} and given["train"]["batch_size"] == 8
    logged = {}
    for record in found:
        if record.HasField("history"):
            row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            logged.setdefault(row["_step"], {}).update(row)
    for row in rows(tmp_path / "run"):
        assert logged[row["step"]][f"{row['split']}/loss"] == pytest.approx(row["loss"])
    summary = {
        (i.key or ".".join(i.nested_key)): json.loads(i.value_json)
        for record in found if record.HasField("summary") for i in record.summary.update
    }  # fmt: skip
    assert summary["test.accuracy"] == pytest.approx(result["test"]["accuracy"]) and summary["last_step"] == 10


EXPERIMENT = "demo:full"


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        ("('wandbb',)", "train.trackers[0].name: got 'wandbb', takes one of 'wandb'"),
        ("({'name': 'wandb', 'mode': 'of'},)", "train.trackers[0].mode: got 'of', takes one of 'online', 'offline'"),
        ("('no_such_module:T',)", "train.trackers[0].name: got 'no_such_module:T', but importing no_such_module fails"),
        ("('xformer.train:Callback',)", "takes a class that derives from xformer.train.trackers.Tracker"),
    ],
)
def test_a_wrong_tracker_is_one_line(trackers, message):
    with pytest.raises(ConfigError) as error:
        configs.load_config(EXPERIMENT, [f"train.trackers={trackers}"])
    assert message in str(error.value) and "\n" not in str(error.value)
