"""The console command, and the shipped configs that it finds by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from xformer import shipped
from xformer.commands import main

ROOT = Path(__file__).parent.parent
CODE = "import sys; sys.argv[0] = 'xformer'; from xformer.commands.main import main; main()"


def xformer(*args, cwd=ROOT):
    done = subprocess.run([sys.executable, "-m", "xformer", *args], cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_help_lists_commands_and_shipped_configs():
    code, out, err = xformer("--help")
    assert (code, err) == (0, "")
    for word in (*main.COMMANDS, *shipped.names(), "xformer run --config=listops:bigbird"):
        assert word in out
    assert xformer() == (2, "", out)


def test_version():
    code, out, _ = xformer("--version")
    assert code == 0 and out.startswith("xformer-jax ")


def test_an_unknown_command_is_one_line():
    code, out, err = xformer("rnu")
    assert (code, out) == (2, "")
    commands = ", ".join(main.COMMANDS)
    assert err == f"error: got 'rnu', takes a command: {commands}; did you mean run?\n"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_its_help(name):
    code, out, err = xformer(name, "--help")
    assert code == 0, err
    assert out.startswith(f"usage: xformer {name} ")


def test_help_and_version_import_nothing_slow():
    code = CODE.replace("main()", "import atexit; atexit.register(lambda: print('jax' in sys.modules)); main()")
    done = subprocess.run([sys.executable, "-c", code, "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("False\n")


def test_names_are_those_of_the_folder():
    assert {"demo", "listops", "documents", "compare_demo"} <= set(shipped.names())
    assert set(shipped.names()) == {
        str(path.relative_to(ROOT / "configs"))[:-3] for path in (ROOT / "configs").rglob("[!_]*.py")
    }


@pytest.mark.parametrize(
    "spec", ["listops", "listops:bigbird", "listops:bigbird+shaw", "listops:a:b", "lra/image:full"]
)
def test_a_name_is_a_path(spec):
    name, colon, argument = spec.partition(":")
    assert shipped.locate(spec) == f"{ROOT / 'configs' / name}.py{colon}{argument}"


@pytest.mark.parametrize("spec", ["configs/listops.py:full", "listops.py", "nowhere", "", ":full", "x" * 5000, "a\0b"])
def test_any_other_spec_is_left_alone(spec):
    assert shipped.locate(spec) == spec


def test_a_file_that_exists_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "listops").touch()
    assert shipped.locate("listops:full") == "listops:full"
