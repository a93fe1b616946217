"""The commands on many hosts: flags, clusters, and a run of two processes whose sequences lie across both."""

import json
import os
import re
import subprocess
import sys

import pytest
from test_run import DEMO, ROOT, SMALL, finish
from train_fake import rows
from waiting import free_port, wait_for
from xla_flags import xla_flags

from xformer.commands import cli, compare, hosts, run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_processes=2"], "--coordinator: missing; --coordinator, --num_processes and --process_id go together"),
        (["--coordinator=a:1", "--process_id=0"], "--num_processes: missing; "),
        (["--coordinator=a:1", "--num_processes=2"], "--process_id: missing; "),
        (["--coordinator=a", "--num_processes=2", "--process_id=0"], "--coordinator: got 'a', takes HOST:PORT"),
        (["--coordinator=a:70000", "--num_processes=2", "--process_id=0"], "--coordinator: got 'a:70000', takes"),
        (
            ["--coordinator=a:1", "--num_processes=2", "--process_id=2"],
            "--process_id: got 2, takes an integer from 0 to 1",
        ),
        (
            ["--coordinator=a:1", "--num_processes=two", "--process_id=0"],
            "--num_processes: got 'two', takes an integer",
        ),
        (["--coordinator=a:1", "--num_processes=0", "--process_id=0"], "--num_processes: got 0, takes"),
        (["--coordinator=auto", "--num_processes=2"], "--coordinator: auto finds the others by itself"),
    ],
)
@pytest.mark.parametrize("command", [run.command, compare.command])
def test_wrong_flags_are_one_line(capsys, tmp_path, command, flags, message):
    assert cli.exit_code(command, [f"{DEMO}:full", f"--workdir={tmp_path / 'a'}", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and f"error: {message}" in err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # a shell on the first host of an allocation, no srun
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1;tcp://h:1"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "t0,t1"}, {}),
    ],
)
def test_clusters(environment, found):
    assert hosts.cluster(environment) == found


def start_two(workdir, data_dir, *settings):
    """The run in two processes of four devices each."""
    flags = [f"--coordinator=localhost:{free_port()}", "--num_processes=2"]
    environment = os.environ | {"XLA_FLAGS": xla_flags(4)}
    argv = [sys.executable, "-m", "experiments.run", *SETTINGS, f"--workdir={workdir}", f"--data_dir={data_dir}"]
    return [
        subprocess.Popen(
            [*argv, *settings, *flags, f"--process_id={index}"],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]  # fmt: skip


SETTINGS = (
    f"{DEMO}:bigbird",
    *SMALL,
    "--config.train.num_steps=40",
    "--config.train.eval_every=20",
    "--config.train.log_every=1",
    "--config.model.dropout_rate=0.1",
    "--config.model.scan_layers=True",
)


@pytest.mark.full
def test_two_processes_lose_one_and_end_like_one_process(tmp_path, capsys):
    """Four devices each. The mesh cuts sequences between the processes, then, going on, the batch."""
    data_dir, workdir = tmp_path / "data", tmp_path / "two"
    one = [*SETTINGS, f"--data_dir={data_dir}", f"--workdir={tmp_path / 'one'}", "--config.train.mesh={'data': 1}"]
    assert cli.exit_code(run.command, one) == 0

    both = start_two(workdir, data_dir, "--config.train.mesh={'sequence': 8}")
    wait_for((workdir / "checkpoints" / "5").exists, both[0])
    both[1].kill()
    code, out, err = finish(both[0])
    both[1].communicate()
    assert code == 1 and out == "", err
    assert re.search(r"error: process 0(: | of 2 ).*start them all again: the run goes on from ", err.splitlines()[-1])

    both = start_two(workdir, data_dir, "--config.train.mesh={'data': 4, 'tensor': 2}")
    (code, out, err), other = [finish(process) for process in both]
    assert code == 0 and out == "" and "going on from step" in err and "finished demo_bigbird" in err, err
    assert other[:2] == (0, "") and "step" not in other[2], other
    for one, two in zip(rows(tmp_path / "one"), rows(workdir), strict=True):
        assert [one[key] for key in EXACT] == [two[key] for key in EXACT]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert results[0]["test"] == pytest.approx(results[1]["test"], rel=1e-4)


EXACT = ("step", "split", "examples", "tokens")
