"""Runs that are launched: each once, each on from its checkpoint where its worker is lost, results as in turn."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_comparison

from xformer import comparison as comparisons
from xformer.bench import memory
from xformer.commands import cli, compare, comparison_plan, launched, memory_plan
from xformer.commands.launchers import local
from xformer.commands.worker import CHANGED, INTERRUPTED, LOST, describe
from xformer.config import build
from xformer.train import DataChanged, Interrupted

ROOT = Path(__file__).parent.parent
TIMES = ("step_time_ms", "step_time_p10_ms", "step_time_p90_ms", "train_seconds", "input_wait_share")
needs = lambda extra: pytest.mark.skipif(
    importlib.util.find_spec(extra) is None, reason=f"{extra} is not installed: pip install 'xformer-jax[{extra}]'"
)


def config(folder, victim="window-0"):
    """A comparison of two short runs; the process of one of them is killed once, in mid-step."""
    deadly = {"name": "deadly:Deadly", "folder": str(folder), "victim": victim, "step": 7}
    train = {"num_steps": 12, "eval_every": 4, "checkpoint_every": 2, "log_every": 2, "callbacks": (deadly,)}
    return tiny_comparison.write(folder / "config.py", seeds=(0,), base={"train": train})


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory):
    """(folder, rows of `results.jsonl`) of the comparison in this process, one run after the other, nothing killed."""
    folder = tmp_path_factory.mktemp("launched")
    config(folder)
    (folder / "killed").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xformer.report.page._plots", lambda *given: [])
        assert cli.exit_code(compare.command, flags(folder, "in_turn")) == cli.FINISHED
    return folder, rows(folder / "in_turn")


def flags(folder, work, *more):
    return [f"--config={folder / 'config.py'}", f"--workdir={folder / work}", f"--data_dir={folder / 'data'}", *more]


def rows(work):
    """Every row of the results, without times."""
    found = [json.loads(line) for line in (work / "results.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in found]


def launch(folder, work, *command):
    """(stdout, stderr) of a command line with the launched comparison, one worker of which is killed."""
    for file in ("killed", "starts"):
        (folder / file).unlink(missing_ok=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    done = subprocess.run(
        [sys.executable, *command[:2], *flags(folder, work, *command[2:])], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "killed").exists()
    return done.stdout, done.stderr


def check(folder, work, expected):
    """The results are those of the runs in turn, and nothing was trained twice but what the kill had lost."""
    assert rows(folder / work) == expected
    starts = [line.split() for line in (folder / "starts").read_text().splitlines()]
    assert sorted((run, int(step)) for run, step, _ in starts) == [("full-0", 0), ("window-0", 0), ("window-0", 6)]
    assert len({pid for _, _, pid in starts}) == 3, "a process for each"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to share out")
def test_two_workers_on_this_machine_one_killed_in_mid_step(in_turn):
    folder, expected = in_turn
    _, err = launch(folder, "workers", "-m", "experiments.compare", "--workers=2")
    check(folder, "workers", expected)
    assert "window, seed 0: its worker was ended by SIGKILL" in err and "run started: window, seed 0, again" in err
    assert "2 of 2 runs finished" in err and "step 12/12" in (folder / "workers/jobs/run.full-0.log").read_text()
    made = json.loads((folder / "workers" / "made.json").read_text())["sessions"]
    assert made[0]["trained"] == "2 runs (full, seed 0; window, seed 0)" and "--workers=2" in made[0]["command"]
    assert len(list((folder / "workers" / "compiled").iterdir())) == 1, "workers share what is compiled"


@pytest.mark.full
@needs("ray")
def test_a_ray_cluster_of_two_nodes_one_worker_killed_in_mid_step(in_turn):
    folder, expected = in_turn
    out, err = launch(folder, "ray", str(ROOT / "tests" / "ray_comparison.py"), "--launcher=ray", "--workers=2")
    check(folder, "ray", expected)
    assert "nodes: 2" in out and "2 of 2 runs finished" in err


@pytest.mark.full
@needs("submitit")
def test_submitit_on_this_machine_one_job_killed_in_mid_step(in_turn):
    folder, expected = in_turn
    resources = "--resources=cluster=local,timeout_min=20"
    _, err = launch(folder, "slurm", "-m", "experiments.compare", "--launcher=slurm", resources)
    check(folder, "slurm", expected)
    assert "window, seed 0: its job ended without a result" in err and "run started: window, seed 0, again" in err
    assert list((folder / "slurm" / "jobs").glob("*_log.err"))


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to share out")
def test_a_signal_saves_all_runs_and_the_same_command_goes_on(in_turn):
    folder, expected = in_turn
    (folder / "killed").touch()
    (folder / "starts").unlink(missing_ok=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    more = ("--workers=2", "--config.train.stop_at_step=3")
    command = lambda *more: [sys.executable, "-m", "experiments.compare", *flags(folder, "stopped", *more)]
    done = subprocess.run(command(*more), env=env, capture_output=True, text=True)
    assert done.returncode == cli.RESUMABLE and "2 of 2 runs stopped at stop_at_step" in done.stderr, done.stderr
    with subprocess.Popen(command("--workers=2"), env=env, stderr=subprocess.PIPE, text=True) as process:
        next(line for line in process.stderr if line.startswith("run started: window"))
        process.terminate()
        err = process.stderr.read()
    assert process.returncode == cli.RESUMABLE and "those that were going on are saved" in err, err
    assert subprocess.run(command(), env=env, capture_output=True).returncode == cli.FINISHED  # in turn
    assert rows(folder / "stopped") == expected


# The loop, with a launcher that runs nothing.


class Fake:
    """Gives the outcomes that were written down for each run, one after the other."""

    threads = None

    def __init__(self, outcomes, tries=3, most=9, killed=()):
        self.outcomes, self.tries, self.most, self.killed = outcomes, tries, most, killed
        self.started, self.going, self.stopped = [], [], []

    def plan(self, runs, data_dir):
        self.planned = list(runs)

    def start(self, run, job, alone=False):
        if len(self.going) >= self.most:
            return None
        self.started.append((job.name, alone))
        self.going.append(run)
        return run

    def poll(self, handle):
        if handle in self.stopped:
            return {"outcome": LOST if handle.folder.name in self.killed else INTERRUPTED, "message": ""}
        self.going.remove(handle)
        outcome = self.outcomes.get(handle.folder.name, ["finished"]).pop(0)
        if isinstance(outcome, BaseException):
            self.going.append(handle)
            raise outcome
        return {"outcome": outcome, "message": f"{outcome}!"}

    def stop(self, handles):
        self.stopped += handles
        self.going = []


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(launcher) -> (names of failed runs, of stopped runs); polls at once."""
    monkeypatch.setattr(launched, "POLL", 0)
    loaded = comparisons.load_comparison(str(tiny_comparison.write(tmp_path / "config.py", seeds=(0, 1))))
    runs = comparison_plan.plan({"": loaded}, tmp_path / "work")

    def call(launcher):
        found = launched.train(runs, launcher, tmp_path / "work", None, {})
        return tuple([run.folder.name for run in some] for some in found)

    return call


def test_what_is_lost_is_started_again_and_in_the_end_alone(train, tmp_path):
    launcher = Fake({"full-0": [LOST, INTERRUPTED, LOST], "window-1": [LOST, "finished"], "window-0": ["failed"],
                     "full-1": ["stopped"]}, most=2)  # fmt: skip
    assert train(launcher) == (["full-0", "window-0"], ["full-1"]), "in the order of the comparison"
    names = [name for name, _ in launcher.started]
    assert {name: names.count(name) for name in names} == {
        "run.full-0": 3, "run.window-0": 1, "run.full-1": 1, "run.window-1": 2
    }  # fmt: skip
    assert [name for name, alone in launcher.started if alone] == ["run.full-0"]
    failure = json.loads((tmp_path / "work" / "runs" / "full-0" / "failure.json").read_text())
    assert failure == {"error": "lost!", "kind": "WorkerLost"}


def test_a_signal_or_changed_data_stops_what_is_going_on(train):
    launcher = Fake({"window-0": [KeyboardInterrupt()]})
    with pytest.raises(Interrupted, match="those that were going on are saved; the same command goes on"):
        train(launcher)
    launcher = Fake({"window-0": [KeyboardInterrupt()]}, killed=("full-1",))
    with pytest.raises(Interrupted, match="full, seed 1 did not save in time and would go on from their last checkp"):
        train(launcher)
    assert [run.folder.name for run in launcher.stopped] == ["window-0", "full-1", "window-1"]
    launcher = Fake({"full-0": [CHANGED]})
    with pytest.raises(DataChanged, match="changed!"):
        train(launcher)
    assert [run.folder.name for run in launcher.stopped] == ["window-0", "full-1", "window-1"]


def test_a_job_is_json_and_gives_the_run_back(tmp_path):
    path = tiny_comparison.write(tmp_path / "config.py", pretrain={"num_steps": 4}, tune={"model.width": (8, 16)})
    loaded = comparisons.load_comparison(str(path))
    for run in comparison_plan.plan_trials({"": loaded}, tmp_path):
        job = describe(run, tmp_path, str(tmp_path), {"task": {"digest": "x"}}, True, 2)
        again = type(job)(**json.loads(json.dumps(vars(job))))
        assert again == job and again.planned() == run


# Memory and cores.


class Process:
    """A process that goes on until the test says otherwise; its own pid, so that its cores can be set."""

    def __init__(self, *given, **more):
        self.pid, self.code, self.env = os.getpid(), None, more["env"]

    def poll(self):
        return self.code


@pytest.mark.parametrize(("room", "at_once"), [(10_000, 2), (100, 1), (40, 1)])
def test_no_more_run_at_once_than_memory_and_cores_allow(room, at_once, train, tmp_path, monkeypatch):
    cores = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, those: cores.append(those))
    monkeypatch.setattr(local.subprocess, "Popen", Process)
    monkeypatch.setattr(memory_plan, "of_run", lambda run, data_dir: 20)
    monkeypatch.setattr(memory, "peak", lambda: 40)
    monkeypatch.setattr(memory_plan, "available", lambda: room / 0.9)
    launcher = local.Local(2, tmp_path / "jobs")
    loaded = comparisons.load_comparison(str(tmp_path / "config.py"))
    runs = comparison_plan.plan({"": loaded}, tmp_path / "work")
    jobs = [describe(run, tmp_path, None, {}, False) for run in runs]
    launcher.plan(runs, None)
    handles = [launcher.start(run, job) for run, job in zip(runs, jobs, strict=True)]
    assert [handle is not None for handle in handles] == [True, at_once > 1, False, False]
    assert cores == [[3], [5, 6]][:at_once] and handles[0].process.env["OMP_NUM_THREADS"] == "1"
    handles[0].process.code = -9
    assert "SIGKILL" in launcher.poll(handles[0])["message"]
    if at_once > 1:
        assert launcher.start(runs[2], jobs[2], alone=True) is None, "another one is going on"
        assert launcher.start(runs[2], jobs[2]) is not None, "there is room again"
    else:
        assert launcher.start(runs[2], jobs[2], alone=True) is not None, "nothing else is going on"
        assert launcher.start(runs[3], jobs[3]) is None


def test_a_worker_that_began_as_a_signal_came_is_stopped_too(train, tmp_path, monkeypatch):
    """`start` did not return, so that nobody has a handle of it: it would write in a run that is said to be saved."""

    def come(pid, cores):
        raise KeyboardInterrupt

    process, heard = Process(env={}), []
    process.terminate = lambda: heard.append("terminate")
    process.wait = process.kill = lambda *timeout: None
    monkeypatch.setattr(local.subprocess, "Popen", lambda *given, **more: process)
    monkeypatch.setattr(memory_plan, "of_run", lambda run, data_dir: 20)
    monkeypatch.setattr(os, "sched_setaffinity", come)
    launcher = local.Local(1, tmp_path / "jobs")
    loaded = comparisons.load_comparison(str(tmp_path / "config.py"))
    run = comparison_plan.plan({"": loaded}, tmp_path / "work")[0]
    with pytest.raises(KeyboardInterrupt):
        launcher.start(run, describe(run, tmp_path, None, {}, False))
    launcher.stop([])
    assert heard == ["terminate"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to share out")
def test_a_worker_hears_a_signal_from_its_first_moment(train, tmp_path, monkeypatch):
    """A worker that dies before it listens would be called lost, as if it had been killed with something to save."""
    monkeypatch.setattr(memory_plan, "of_run", lambda run, data_dir: 20)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    launcher = local.Local(1, tmp_path / "jobs")
    loaded = comparisons.load_comparison(str(tmp_path / "config.py"))
    run = comparison_plan.plan({"": loaded}, tmp_path / "work")[0]
    launcher.plan([run], None)
    handle = launcher.start(run, describe(run, tmp_path, None, {}, False))
    launcher.stop([handle])
    assert handle.process.returncode == cli.RESUMABLE, handle.log.read_text()
    assert launcher.poll(handle)["outcome"] == INTERRUPTED
    assert "came before anything was begun" in handle.log.read_text()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before, "this process hears signals as before"


def test_what_this_process_has_taken_begins_with_itself():
    """A small process that a large one starts counts its own memory: `ru_maxrss` would begin with the parent's."""
    ballast = bytearray(300 * 2**20)
    ballast[:: 2**12] = b"x" * len(ballast[:: 2**12])
    code = "from xformer.bench import memory; print(memory.peak())"
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 2**22 < child < memory.peak() - 200 * 2**20


def test_estimates_of_memory_are_above_the_compiler_s(tmp_path):
    loaded = comparisons.load_comparison(str(tiny_comparison.write(tmp_path / "config.py")))
    run = comparison_plan.plan({"": loaded}, tmp_path / "work")[0]
    trainer = build(run.config).trainer(tmp_path / "run", tmp_path / "data")
    engine = trainer.engine
    engine.step(engine.init(), next(iter(engine.train_batches(trainer.data, 0))))
    planned, estimated = engine.train_step.peak_bytes, memory_plan.of_run(run, str(tmp_path / "data"))
    assert planned <= estimated <= 3 * planned
    free = memory_plan.available()
    assert free is not None and 0 < free < 2**50 and memory.peak() > 2**25


# Flags.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--workers=0"], "--workers: got '0', takes an integer from 1"),
        (["--workers=two"], "--workers: got 'two', takes an integer from 1"),
        (["--workers=60000"], "--workers: got 60000, takes an integer from 1 to "),
        (["--workers=1", "--dry_run"], "--workers: got --dry_run too, which trains nothing"),
        (["--launcher=local"], "--workers: missing; the local launcher takes --workers=N"),
        (["--launcher=mpi"], "--launcher: invalid choice: 'mpi'"),
        (["--workers=1", "--resources=a=1"], "--resources: goes with --launcher=ray or slurm"),
        (["--launcher=ray", "--resources=num_cpus"], "--resources: got 'num_cpus', takes KEY=VALUE,..."),
        (["--launcher=ray", "--resources=num_cpus=many"], "--resources: got num_cpus='many', takes a number from 0"),
        (["--launcher=slurm"], "--resources: timeout_min is missing"),
        (["--launcher=slurm", "--resources=cluster=pbs"], "--resources: got cluster='pbs', takes one of slurm, local"),
    ],
)
def test_wrong_flags_are_one_line(given, message, tmp_path, capsys):
    path = tiny_comparison.write(tmp_path / "config.py")
    code = cli.exit_code(compare.command, [f"--config={path}", f"--workdir={tmp_path / 'work'}", *given])
    err = capsys.readouterr().err
    assert code == cli.WRONG_ARGUMENTS and len(err.splitlines()) == 1 and message in err, err
    assert not (tmp_path / "work").exists()


@needs("submitit")
def test_what_submitit_refuses_is_one_line(tmp_path, capsys):
    path = tiny_comparison.write(tmp_path / "config.py")
    flags = [f"--config={path}", f"--workdir={tmp_path / 'work'}", "--launcher=slurm"]
    for more, message in (
        ("cluster=local,slurm_partitoin=a", "got slurm_partitoin='a', takes timeout_min, mem_gb"),
        ("cluster=local,slurm_partitoin=a", "did you mean slurm_partition?"),
        ("cluster=local,timeout=5", "got timeout=5, takes timeout_min"),
        ("cluster=local,cpus-per-task=5", "got cpus-per-task=5, takes timeout_min, mem_gb"),
        ("cluster=local,cpus_per_task=a", "got cpus_per_task='a', takes cpus_per_task of type int"),
        ("nodes=2", "takes 1"),
    ):
        assert cli.exit_code(compare.command, [*flags, f"--resources=timeout_min=5,{more}"]) == cli.WRONG_ARGUMENTS
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1 and message in err
