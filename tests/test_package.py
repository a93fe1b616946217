"""What `pip install` puts on a user's machine: one package, typed, that works beside the user's own folders."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from xformer import shipped

ROOT = Path(__file__).parent.parent
SOURCES = ("xformer", "configs", "experiments", "examples", "benchmarks", "pyproject.toml", "setup.py", "README.md",
           "LICENSE")  # fmt: skip

# A project as researchers have it, with folders called like those of this repository.
USERS_FILES = {
    "configs/__init__.py": "",
    "configs/default.py": "MINE = 'configs'\n",
    "experiments/__init__.py": "MINE = 'experiments'\n",
    "tests/__init__.py": "MINE = 'tests'\n",
    "examples/__init__.py": "MINE = 'examples'\n",
}
SNIPPET = """
import jax.numpy as jnp
from flax import nnx

import xformer
from xformer.attention import BigBird, Full, Shape, Shaw
from xformer.nn import AttentionFn

x = jnp.ones((1, 64, 2, 8))
op = BigBird(block_size=16)
out = op(x, x, x, is_causal=True)
flops: int = op.cost(Shape(1, 64, 64, 2, 8)).flops
layer = AttentionFn(Full(position=Shaw(max_distance=4)), num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
run = xformer.load("runs/a")
labels: list[str] = run.predict(["a"]).labels
accuracy = xformer.fit("demo:full", "runs/a", overrides={"train.num_steps": 2})["test"]["accuracy"]
"""
PLANTED = {
    "BigBird(blok_size=16)": "[call-arg]",
    "text: str = op.cost(Shape(1, 64, 64, 2, 8)).flops": "[assignment]",
    "run.predictions": "[attr-defined]",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: what an earlier build left in this checkout must not get in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def project(wheel, tmp_path_factory):
    """Runs Python code in a user's project, next to the unpacked wheel; gives (exit code, stdout, stderr)."""
    site, folder = tmp_path_factory.mktemp("site-packages"), tmp_path_factory.mktemp("project")
    zipfile.ZipFile(wheel).extractall(site)
    for name, content in USERS_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    def run(code, *args):
        argv = [sys.executable, "-W", "ignore", "-c", code, *args]
        done = subprocess.run(
            argv, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(site)}
        )
        return done.returncode, done.stdout, done.stderr

    run.site, run.folder = site, folder
    return run


def test_the_wheel_holds_one_package_and_all_of_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"xformer"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "xformer").rglob("*.py")}
    configs = {f"xformer/configs/{name}.py" for name in shipped.names()}
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "xformer").rglob("*.j2")}
    assert modules | configs | templates | {"xformer/py.typed", "xformer/examples/documents.jsonl"} <= names
    assert len(configs) >= 9 and templates
    tables = {f"xformer/devices/{path.name}" for path in (ROOT / "benchmarks/results/devices").iterdir()}
    assert tables <= names and "xformer/devices/README.md" in tables


def test_metadata_says_how_to_install_and_run(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
    (scripts,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/entry_points.txt")]
    for line in ("Name: xformer-jax", "License-Expression: Apache-2.0", "Provides-Extra: data", "Classifier: Typing"):
        assert line in metadata
    assert "xformer = xformer.commands.main:main" in scripts


def test_a_users_own_folders_are_found_and_so_are_the_shipped_configs(project):
    code, out, err = project(
        "import configs.default, experiments, tests, examples; "
        "print(configs.default.MINE, experiments.MINE, tests.MINE, examples.MINE); "
        "import xformer; print(xformer.__file__); from xformer import comparison, config; "
        "print(config.load_config('documents:full').task.path); "
        "print(sorted(comparison.load_comparison('compare_demo').variants))"
    )
    assert code == 0, err
    mine, file, documents, variants = out.splitlines()
    assert mine == "configs experiments tests examples"
    assert Path(file).is_relative_to(project.site)
    assert Path(documents).is_relative_to(project.site) and Path(documents).is_file()
    assert variants == "['bigbird', 'full', 'linformer-16', 'linformer-4', 'shaw', 'window']"


def test_the_console_command_works_there(project):
    code = "import sys; sys.argv[0] = 'xformer'; from xformer.commands.main import main; main()"
    number, out, err = project(code, "inspect", "--config=demo:bigbird", "--config.task.preset=listops_128")
    assert number == 0, err
    assert out.startswith("demo_bigbird: BigBird(") and "FLOPs of a training step" in out
    number, out, err = project(code, "inspect", "--config=demmo")
    assert (number, out) == (2, "")
    (line,) = err.splitlines()
    assert all(name in line for name in shipped.names()) and line.endswith("nearest match 'demo'")


@pytest.mark.full
def test_mypy_finds_the_three_errors_of_a_user_and_no_other(project):
    (project.folder / "snippet.py").write_text("\n".join([SNIPPET.strip(), *PLANTED, ""]))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--cache-dir={ROOT / '.mypy_cache' / 'user'}", "snippet.py"],
        cwd=project.folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(project.site)},
    )
    first = len(SNIPPET.strip().splitlines()) + 1
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(found) == len(PLANTED), done.stdout + done.stderr
    for number, (line, kind) in enumerate(zip(found, PLANTED.values(), strict=True), first):
        assert line.startswith(f"snippet.py:{number}: ") and line.endswith(kind)
