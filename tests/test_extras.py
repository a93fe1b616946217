"""Without the extras everything imports, and what needs one says in one line how to install it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from xformer import extras

ROOT = Path(__file__).parent.parent
# Refuses the packages of all extras, as a base install does.
BLOCK = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(package for packages in extras.PACKAGES.values() for package in packages)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def base_install(code, *args):
    argv = [sys.executable, "-W", "ignore", "-c", BLOCK + code, *args]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_every_module_imports_with_the_base_install():
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "xformer").rglob("*.py")
        if path.name != "torch_contenders.py"  # PyTorch is no dependency
    )
    # TFDS builders are subclasses: nothing imports their modules before data is prepared.
    modules = [name for name in modules if not name.endswith("builders") and not name.endswith("_builder")]
    assert len(modules) > 80
    code, _, err = base_install(f"import importlib\nfor name in {modules}: importlib.import_module(name)")
    assert code == 0, err


COMMAND = "from xformer.commands.main import main\nmain()"
SMALL = ("--config.task.num_train=64", "--config.task.num_validation=8", "--config.task.num_test=8")


def test_inspect_works_with_the_base_install(tmp_path):
    code, out, err = base_install(COMMAND, "inspect", "--config=demo:bigbird", f"--data_dir={tmp_path}")
    assert code == 0 and "FLOPs of a training step" in out, err


@pytest.mark.parametrize(
    "args, extra",
    [
        (("run", "--config=demo:full", "--workdir={}/run", "--data_dir={}/data", *SMALL), "data"),
        (("compare", "--config=compare_demo", "--workdir={}/b"), "report"),
        (("run", "--config=imdb:full", "--workdir={}/run", "--data_dir={}/data"), "data"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command(args, extra, tmp_path):
    code, _, err = base_install(COMMAND, *(arg.format(tmp_path) for arg in args))
    assert code == 1
    assert err.splitlines()[-1].startswith("error: ") and f"pip install 'xformer-jax[{extra}]'" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.full
def test_bench_measures_without_a_picture(tmp_path):
    sizes = ("--attention=full", "--lengths=16", "--heads=1", "--head_dim=4", "--peers=none", "--rounds=1")
    code, out, err = base_install(COMMAND, "bench", *sizes, f"--out={tmp_path}/bench.json")
    assert code == 0, err
    assert "full" in out and "no picture: matplotlib is not installed" in err
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


def test_packages_are_those_of_the_distribution():
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in extras.PACKAGES.items():
        names = {requirement.partition(">")[0].replace("-", "_") for requirement in stated[extra]}
        assert names == {{"sklearn": "scikit_learn", "PIL": "pillow"}.get(package, package) for package in packages}


def test_other_missing_modules_are_not_explained():
    with pytest.raises(ModuleNotFoundError) as error:
        extras.load("xformer_has_no_such_module")
    assert not isinstance(error.value, extras.MissingExtra)
    assert extras.explain(ModuleNotFoundError("x", name=None)) is None
