"""The commands on many hosts: flags, clusters, and a run of two processes whose sequences lie across both."""

import json
import os
import socket
import subprocess
import sys

import pytest
from test_run import DEMO, ROOT, SMALL, finish

from experiments import cli, compare, hosts, run


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


def test_two_processes_train_like_one_and_one_of_them_prints(tmp_path, capsys):
    settings = [f"{DEMO}:linformer", *SMALL, "--config.model.scan_layers=True"]
    data = f"--data_dir={tmp_path / 'data'}"
    one = [*settings, data, f"--workdir={tmp_path / 'one'}", "--config.train.mesh={'data': 1}"]
    assert cli.exit_code(run.command, one) == 0
    with socket.socket() as free:
        free.bind(("localhost", 0))
        flags = [f"--coordinator=localhost:{free.getsockname()[1]}", "--num_processes=2"]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    two = [*settings, data, f"--workdir={tmp_path / 'two'}", "--config.train.mesh={'sequence': 2}", *flags]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "experiments.run", *two, f"--process_id={index}"],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]  # fmt: skip
    (code, out, err), other = [finish(process) for process in both]
    assert code == 0 and out == "" and "finished demo_linformer" in err, err
    assert other == (0, "", ""), other
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    for split in ("eval", "test"):
        assert results[0][split] == pytest.approx(results[1][split], rel=1e-4)
