"""`xformer data`: what there is, making it whole or not at all, damage found, and what it is like."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conformance_tasks import CASES, write_documents, write_pairs

from xformer.commands import cli, data, describe
from xformer.report import style
from xformer.tasks import TASKS, ListOps, Task, Translation, description, readiness
from xformer.tasks.generated import Generated

ROOT = Path(__file__).parent.parent
TINY = ("--task.preset=listops_128", "--task.num_train=30", "--task.num_validation=20", "--task.num_test=10")


@pytest.fixture
def run(capsys, tmp_path):
    """Runs the command; (exit code, stdout, stderr)."""

    def call(*args):
        code = cli.exit_code(data.command, [*args, f"--data_dir={tmp_path / 'data'}"])
        return code, *capsys.readouterr()

    return call


def tiny_folder(tmp_path):
    return tmp_path / "data" / "listops" / "listops_128_30_20_10_seed0" / "1.0.0"


def test_an_empty_folder_lists_every_task_and_the_command_that_makes_it_ready(run, tmp_path):
    code, out, err = run("--list")
    assert (code, err) == (0, "")
    listed = {line.partition(":")[0] for line in out.splitlines() if line[:1].isalpha() and "; licence: " in line}
    assert listed == set(TASKS)
    where = f"--data_dir={tmp_path / 'data'}"
    for command in (
        f"xformer data --prepare needle {where}",
        f"xformer data --prepare recall --task.preset=recall_4k {where}",
        f"xformer data --prepare documents --task.path=FILE {where}",
        f"tfds build cifar10 --file_format=array_record {where} && xformer data --prepare image --task.source=cifar10",
        f"apt-get download linux-doc-6.1 && dpkg-deb -x linux-doc-6.1_*.deb {tmp_path / 'data'}/linux_docs && xformer",
    ):
        assert command in out
    assert out.endswith(f"Nothing is prepared in {tmp_path / 'data'}\n")
    assert not (tmp_path / "data").exists()


def test_what_is_prepared_is_ready_and_has_a_size(run, tmp_path):
    code, out, err = run("--prepare", "needle", "--task.max_len=32")
    assert (code, out) == (0, "") and "needle: generating 11,000 examples" in err and "needle: ready in" in err
    code, out, err = run("--prepare", "needle", "--config.task.max_len=32")
    assert (code, err.count("\n")) == (0, 1) and err.startswith("needle: ready in")
    assert run("--prepare", "needle")[0] == 0
    code, out, _ = run("--list", "needle")
    assert code == 0 and "  ready: 8,000 + 1,000 + 2,000 examples, " in out and "MiB on disk" in out
    assert "--prepare" not in out and "needle/32_8000_1000_2000_seed0" in out  # other options are listed too


@dataclasses.dataclass(frozen=True)
class Foreign(Task):
    """A task of one's own that says nothing of its source."""

    length = 8

    def prepare(self, data_dir=None, *, progress=None):
        pass

    def open(self, data_dir=None):
        return ListOps("listops_128", num_train=30, num_validation=20, num_test=10).open(data_dir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demanding(Generated):
    """A generated task with an option that has to be given."""

    depth: int

    name, length, vocabulary, class_names, options, stream = "demanding", 8, None, [], {}, None


def test_a_task_from_outside_is_listed_and_described_too(run):
    name = f"{__name__}:Foreign"
    code, out, _ = run("--list", name)
    assert code == 0 and f"{name}: unknown; licence: unknown\n  not prepared: unknown\n" in out
    assert run("--prepare", "listops", *TINY)[0] == 0
    assert "  ready: unknown\n" in run("--list", name)[1]
    assert f"{name}: generated, listops_128" in run("--describe", name)[1]
    assert "for you to give: unknown\n      xformer data --prepare" in run("--list", f"{__name__}:Demanding")[1]
    assert "--task.depth=DEPTH" in run("--list", f"{__name__}:Demanding")[1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--prepare", "nedle"], r"task.name: got 'nedle', takes one of 'listops', .*; nearest match 'needle'"),
        (["--list", "nedle"], "--list: got 'nedle', takes one of 'listops'"),
        (["--prepare", "needle", "--task.maxlen=3"], "task.maxlen: got 3, but task 'needle' reads no such key"),
        (["--prepare", "needle", "--task.max_len=3"], "task.max_len: needle: max_len must be an int of at least 16"),
        (["--prepare", "needle", "--config.model.width=3"], "--config.model.width=3: goes with --config"),
        (["--prepare"], "--prepare: missing; takes the name of a task"),
        (
            ["--describe", "documents", "--task.path=nowhere.csv"],
            "task.path: got 'nowhere.csv', takes a file or folder",
        ),
        (["--describe", "documents"], "task.path: documents: path must be a non-empty string"),
        (["--prepare", "imdb", "--config=needle:full"], "--prepare: got 'imdb', but the task of .* is needle"),
        (["--list", "--prepare", "needle"], "takes one of --list, --prepare and --describe, got --list and --prepare"),
        ([], "takes one of --list, --prepare and --describe, got none of them"),
        (["--describe", "needle", "--lengths=1,x"], "--lengths: got '1,x', takes integers from 1"),
        (["--describe", "needle", "--out=a.jpg"], "--out: got 'a.jpg', takes a file that ends in .png"),
        (["--prepare", "needle", "--out=a.png"], "--out: got 'a.png', but only --describe draws"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_made(run, tmp_path, args, said):
    code, out, err = run(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(f"^error: {said}", err), err
    assert not (tmp_path / "data").exists()


def test_a_source_that_is_not_there_says_what_brings_it(run, tmp_path):
    code, out, err = run("--prepare", "linux_docs")
    assert (code, out) == (1, "") and err.startswith("error: linux_docs: no documentation in ")
    assert "apt-get download linux-doc-6.1" in err and err.count("\n") == 1


DAMAGE = ["train.tokens.npy", "vocabulary.json", "facts.json", "dataset_info.json", "array_record"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of data whose files tests damage in a copy."""
    folder = tmp_path_factory.mktemp("made")
    ListOps("listops_128", num_train=30, num_validation=20, num_test=10).prepare(folder / "data")
    return folder


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("change", ["flipped", "lost"])
def test_a_flipped_byte_and_a_lost_file_are_found(run, made, tmp_path, name, change):
    shutil.copytree(made / "data", tmp_path / "data")
    (file, *_) = [path for path in sorted(tiny_folder(tmp_path).iterdir()) if name in path.name]
    if change == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    for action in ("--prepare", "--describe"):
        code, out, err = run(action, "listops", *TINY)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"listops: the prepared data in {tiny_folder(tmp_path)} is damaged" in err and file.name in err
        assert "delete that folder, and it is made again" in err
    code, out, _ = run("--list", "listops")
    assert code == 0 and "is damaged" in out and file.name in out


def test_what_a_message_of_damage_says_to_do_helps(run, made, tmp_path):
    shutil.copytree(made / "data", tmp_path / "data")
    (tiny_folder(tmp_path) / "checksums.json").write_text("{")
    code, _, err = run("--prepare", "listops", *TINY)
    assert code == 1 and "is damaged (checksums.json can't be read); delete that folder" in err
    shutil.rmtree(tiny_folder(tmp_path))
    assert run("--prepare", "listops", *TINY)[0] == 0


def test_data_of_an_older_version_without_checksums_is_taken(run, made, tmp_path):
    shutil.copytree(made / "data", tmp_path / "data")
    (tiny_folder(tmp_path) / "checksums.json").unlink()
    assert run("--prepare", "listops", *TINY)[0] == 0


KILLED = """
import sys, time
from xformer.tasks import ListOps
from xformer.tasks.ragged import Ragged
def save(self, directory, split):
    print(directory, flush=True)
    time.sleep(60)
Ragged.save = save
ListOps("listops_128", num_train=30, num_validation=20, num_test=10).prepare(sys.argv[1])
"""


def test_data_that_was_being_made_when_the_process_was_killed_is_made_anew(run, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "data")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        half = Path(process.stdout.readline().strip())
        assert half.is_dir() and list(half.iterdir())  # TFDS's files are there, ours not yet
        os.kill(process.pid, signal.SIGKILL)
    code, out, _ = run("--list", "listops")
    assert code == 0 and "half made: a process is at it, or was killed" in out and "Nothing is prepared" in out
    task = ListOps("listops_128", num_train=30, num_validation=20, num_test=10)
    assert readiness.of(task, tmp_path / "data").state == readiness.NOT_PREPARED
    assert run("--prepare", "listops", *TINY)[0] == 0
    assert sorted(path.name for path in tiny_folder(tmp_path).parent.iterdir()) == [".lock", "1.0.0"]


def test_own_documents_described(run, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "DPI", 50)
    path = write_documents(tmp_path)
    given = (f"--task.path={path}", "--task.label_field=class", "--task.max_len=40")
    code, out, err = run("--describe", "documents", *given, "--lengths=20,1000", f"--out={tmp_path / 'new' / 'l.png'}")
    assert code == 0 and "documents: ready in" in err
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    lengths = sorted(len(row["text"]) for row in rows)
    lines = [line.split() for line in out.splitlines()]
    sizes = {line[0]: int(line[1]) for line in lines if line[:1] in (["train"], ["validation"], ["test"])
             and line[1].isdecimal()}  # fmt: skip
    assert sum(sizes.values()) == 60
    assert f"{lengths[-1]}" in out and "also in train" in out and "but for case and space" in out
    assert "20  40 (max_len)  1,000" in out and "TF-IDF" in out and "answers the commonest class" in out
    assert out.count("] document ") == 10 and "\n  [red] document" in out
    assert (tmp_path / "new" / "l.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "case", ["documents-labels", "documents-number", "retrieval-own", "tagging", "recall", "image"]
)
def test_every_kind_of_target_is_described(case, tmp_path, monkeypatch):
    task = CASES[case](tmp_path, monkeypatch)
    task.prepare(tmp_path / "data")
    found = describe.text(task, task.open(tmp_path / "data"), case, None, (512,))
    assert "of a method that" in found and "examples of train, label first:" in found
    assert {"documents-number": "10500", "documents-labels": "no label", "retrieval-own": " || "}.get(case, "") in found


def test_pairs_are_described_as_they_are_and_not_as_rows_of_several(tmp_path):
    """Rows hold at most max_len tokens, so that no share of rows is longer."""
    task = Translation(path=write_pairs(tmp_path), max_len=20, vocab="bytes", validation_share=0.2, test_share=0.2)
    task.prepare(tmp_path / "data")
    opened = task.open(tmp_path / "data")
    pairs = opened.examples("train")
    lengths = np.maximum(np.diff(pairs.offsets), np.diff(pairs.offsets2))
    wanted = [float((lengths > most).mean()) for most in (10, 20, 25)]
    assert description.longer_than(opened, (10, 20, 25))["train"] == wanted and 0 < wanted[2] < wanted[1] < wanted[0]
    task = dataclasses.replace(task, max_len=200)
    opened = task.open(tmp_path / "data")
    lines = [line.split() for line in describe.text(task, opened, "pairs", None, (25,)).splitlines()]
    assert next(line for line in lines if line[:1] == ["split"])[1:3] == ["texts", "rows"]
    counts = next(line for line in lines if line[:1] == ["train"])[1:3]
    assert counts == [str(len(pairs)), str(opened.num_examples("train"))]


def test_a_config_and_a_comparison_name_the_same_data(run):
    small = ("--config.task.num_train=30", "--config.task.num_validation=20", "--config.task.num_test=10")
    assert run("--prepare", "--config=listops:full", "--config.task.preset=listops_128", *small)[0] == 0
    code, _, err = run("--prepare", "listops", "--config=compare_listops", "--config.task.preset=listops_128", *small)
    assert code == 0 and err.count("listops: ready in") == 1 and "generating" not in err
    code, out, _ = run("--prepare", "needle", "--config.help")
    assert code == 0 and "task.max_len" in out and "model." not in out
