"""The example package is installed, and its parts train, go on, evaluate and load, from another folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "own_parts"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which pip installed the package."""
    folder = tmp_path_factory.mktemp("site")
    scratch = tmp_path_factory.mktemp("build") / "own_parts"
    scratch.mkdir()
    for file in EXAMPLE.rglob("*"):  # pip builds in the source folder, which stays as it is
        if file.is_file() and file.suffix in (".py", ".toml", ".md"):
            target = scratch / file.relative_to(EXAMPLE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", folder, scratch], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "own_parts" / "task.py").is_file()
    return folder


def xformer(folder, cwd, *arguments):
    """(exit code, stdout, stderr) of the console command, with the packages of a folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)] if folder else [str(ROOT)])}
    code = "import sys; sys.path = [p for p in sys.path if p]; from xformer.commands.main import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.full
def test_parts_of_an_installed_package_train_and_evaluate(installed, tmp_path):
    config = EXAMPLE / "own_parts" / "config.py"
    run = ("run", f"--config={config}", "--workdir=own")
    code, _, errors = xformer(installed, tmp_path, *run, "--config.train.stop_at_step=10")
    assert code == 75, errors
    code, _, errors = xformer(installed, tmp_path, *run)
    assert code == 0 and "going on from step 10" in errors, errors
    assert [line.split(":")[0] for line in (tmp_path / "own/notes.txt").read_text().splitlines()] == [
        "step 10",
        "step 20",
    ]
    stored = json.loads((tmp_path / "own/config.json").read_text())
    assert stored["attention"] == {
        "name": "own_parts.attention:FirstAndNear", "causal": False, "implementation": None, "reach": 4, "num_first": 1,
        "position": {"name": "own_parts.position:DistanceBias", "reach": 8},
    }  # fmt: skip
    assert stored["model"] == {"name": "own_parts.model:OneLayer", "width": 16, "num_heads": 2}
    assert stored["optimizer"]["name"] == "own_parts.optimizer:signum" and stored["optimizer"]["momentum"] == 0.9
    assert stored["train"]["metrics"] == [{"name": "own_parts.metric:Near", "k": 2}]
    assert stored["task"] == {"name": "own_parts.task:FirstToken", "num_train": 256, "max_len": 32}
    result = json.loads((tmp_path / "own/result.json").read_text())
    assert result["select_metric"] == "top2" and result["test"]["top2"] > result["test"]["accuracy"]
    code, output, errors = xformer(installed, tmp_path, "run", "--workdir=own", "--eval_only")
    assert code == 0 and json.loads(output)["test"] == result["test"], errors
    script = "import xformer; print(xformer.load('own').predict(['abc']).labels)"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{installed}"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and done.stdout.strip() in ("['a']", "['b']", "['c']"), done.stderr


def test_the_working_directory_is_searched_and_what_is_missing_is_one_line(tmp_path):
    arguments = ("run", f"--config={EXAMPLE / 'own_parts' / 'config.py'}", "--workdir=own", "--config.help")
    code, output, errors = xformer(None, EXAMPLE, *arguments)
    assert code == 0 and "attention.num_first" in output and "optimizer.momentum" in output, errors
    code, _, errors = xformer(None, tmp_path, *arguments)
    assert code == 2 and len(errors.splitlines()) == 1
    assert errors.startswith("error: model.name: got 'own_parts.model:OneLayer', but importing ")
    assert f"No module named 'own_parts'; searched: {tmp_path} (the working directory) and what is installed" in errors
