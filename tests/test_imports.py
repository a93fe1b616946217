"""Arrows point down only: experiments -> {train, models, tasks, report, configs} -> nn -> attention."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ANYWHERE = {"xformer.checks", "xformer.lookup", "xformer.tree_paths"}  # standard library only: for every room

# Room -> rooms of this project that it may import, besides itself.
MAY_IMPORT = {
    "xformer.checks": set(),
    "xformer.lookup": {"xformer.checks"},
    "xformer.tree_paths": set(),
    "xformer.attention": set(),
    "xformer.layer_terms": set(),  # what a layer tells the training step
    "xformer.nn": {"xformer.attention", "xformer.layer_terms"},
    "xformer.music": {"xformer.extras"},
    "xformer.generate": set(),  # models come in as arguments
    "xformer.models": {"xformer.nn", "xformer.attention", "xformer.layer_terms"},
    "xformer.tokenizer_files": {"xformer.extras"},
    "xformer.position_tables": set(),
    "xformer.weights": {
        "xformer.models", "xformer.attention", "xformer.extras", "xformer.position_tables", "xformer.tokenizer_files",
    },
    "xformer.tasks": {"xformer.extras", "xformer.generate", "xformer.tokenizer_files"},
    "xformer.cost": {"xformer.attention"},
    "xformer.critical_path": {"xformer.cost"},
    "xformer.difference": set(),
    "xformer.live_memory": set(),
    "xformer.train": {
        "xformer.cost", "xformer.difference", "xformer.extras", "xformer.layer_terms", "xformer.position_tables",
    },
    "xformer.report": {"xformer.extras", "xformer.tuning", "xformer.budget"},
    "xformer.scaling": {"xformer.report", "xformer.extras", "xformer.train"},
    "xformer.arguments": set(),
    "xformer.schema": {"xformer.checks", "xformer.arguments"},
    "xformer.extras": set(),
    "xformer.shipped": set(),
    "xformer.config_errors": {"xformer.schema"},
    "xformer.parts": {"xformer.tasks", "xformer.train", "xformer.schema", "xformer.config_errors"},
    "xformer.attention_sections": {"xformer.attention", "xformer.models", "xformer.schema"},
    "xformer.sections": {
        "xformer.attention_sections", "xformer.attention", "xformer.models", "xformer.tasks", "xformer.train",
        "xformer.schema", "xformer.arguments",
        "xformer.config_errors", "xformer.parts",
    },
    "xformer.experiment": {
        "xformer.attention", "xformer.models", "xformer.tasks", "xformer.train", "xformer.schema", "xformer.sections",
        "xformer.parts", "xformer.pretrained",
    },
    "xformer.pretrained": {"xformer.schema", "xformer.tokenizer_files", "xformer.train", "xformer.weights"},
    "xformer.config_help": {
        "xformer.attention_sections", "xformer.attention", "xformer.models", "xformer.schema", "xformer.sections",
        "xformer.tasks",
    },
    "xformer.config": {
        "xformer.experiment", "xformer.presets", "xformer.schema", "xformer.shipped",
    },
    "xformer.comparison": {
        "xformer.config", "xformer.experiment", "xformer.presets", "xformer.pretraining", "xformer.schema",
        "xformer.sections", "xformer.tuning", "xformer.budget",
    },
    "xformer.tuning": {"xformer.schema"},
    "xformer.budget": {"xformer.schema"},
    "xformer.pretraining": {"xformer.models", "xformer.schema"},
    "xformer.fitting": {"xformer.config", "xformer.experiment", "xformer.schema", "xformer.train"},
    "xformer.loading": {"xformer.experiment", "xformer.generate", "xformer.tasks", "xformer.train", "xformer.schema"},
    "xformer": {"xformer.fitting", "xformer.loading"},
    "xformer.presets": {"xformer.attention", "xformer.checks"},
    "xformer.bench": {"xformer.attention", "xformer.cost", "xformer.train", "xformer.report"},
    "xformer.commands": {"*"},
    "xformer.__main__": {"xformer.commands"},
    "configs": {"xformer.presets"},
    "experiments": {"xformer.commands"},
}  # fmt: skip
# The functional core takes arrays and gives arrays.
CORE_LIBRARIES = {"jax", "numpy", "__future__"} | set(sys.stdlib_module_names)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The longest room that a dotted module name lies in."""
    inside = [
        room for room in MAY_IMPORT if f"{module}.".startswith(f"{room}.") and (room != "xformer" or module == room)
    ]
    return max(inside, key=len, default=None)


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, function bodies and TYPE_CHECKING blocks included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path).split(".")
            if path.name != "__init__.py":
                package = package[:-1]
            start = [*package[: len(package) - node.level + 1]] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            # `from xformer import tasks` imports a module, `from xformer.tasks import TASKS` a name of one.
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(file for top in ("xformer", "configs", "experiments") for file in (ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path))
def test_arrows_point_down(path):
    room = room_of(module_name(path))
    assert room is not None, f"{path} lies in no room"
    allowed = MAY_IMPORT[room]
    for name in imports(path):
        if name.split(".")[0] not in ("xformer", "configs", "experiments"):
            continue
        target = room_of(name)
        assert target is not None, f"{name} is no room's"
        fits = target == room or target in ANYWHERE or target in allowed or "*" in allowed
        assert fits, f"{module_name(path)} imports {name}"


def test_the_core_imports_jax_and_numpy_only():
    for path in (ROOT / "xformer" / "attention").rglob("*.py"):
        foreign = {name for name in imports(path) if name.split(".")[0] not in CORE_LIBRARIES | {"xformer"}}
        assert not foreign, f"{path} imports {foreign}"


@pytest.mark.parametrize("module", ["checks", "lookup", "tree_paths"])
def test_what_every_room_may_import_needs_the_standard_library_only(module):
    for name in imports(ROOT / "xformer" / f"{module}.py"):
        known = {"__future__", *sys.stdlib_module_names}
        assert name.split(".")[0] in known or name.startswith("xformer.checks."), f"xformer.{module} imports {name}"


def test_no_circle_among_files():
    """Each file's imports, those inside functions and under TYPE_CHECKING included, can be put in one order."""
    modules = {module_name(path): path for path in FILES}

    def file_of(name):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    graph = {module: {file_of(name) for name in imports(path)} - {"", module} for module, path in modules.items()}
    assert graph["xformer.loading"] >= {"xformer.experiment", "xformer.tasks"}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the files


def test_imports_are_read_from_every_form(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "xformer" / "nn" / "block.py"
    file.parent.mkdir(parents=True)
    file.write_text("import xformer.tasks.vocab\nfrom xformer import models\ndef f():\n    from ..train import step\n")
    assert imports(file) == {"xformer.tasks.vocab", "xformer.models", "xformer.train.step"}
    assert [room_of(name) for name in ("xformer.nnx", "xformer.nn.block", "xformer")] == [None, "xformer.nn", "xformer"]


def test_attention_comes_without_the_rest():
    code = (
        "import sys, xformer.attention; "
        "heavy = {'flax', 'optax', 'orbax', 'grain', 'matplotlib', 'tensorflow_datasets', 'ml_collections', 'jinja2'}; "
        "sys.exit(', '.join(sorted(heavy & {m.split('.')[0] for m in sys.modules})) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"importing xformer.attention imports {done.stderr}"
