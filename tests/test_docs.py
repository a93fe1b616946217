"""Every snippet and every command of the README and of the guides runs, at a tiny size, in the order of its page."""

import importlib
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from conformance_tasks import write_image_folder, write_images, write_treebank
from tiny_tokenizer import tokenizer_json

import xformer
from xformer import comparison, config
from xformer.commands import cli
from xformer.report import style

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r'^```(\w*)(?: title="(\S+)")?\n(.*?)^```$', re.S | re.M)
PAGES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if BLOCK.search(path.read_text())
]
SLOW = (
    "README.md",
    "compare.md",
    "launch.md",
    "reuse.md",
    "many_devices.md",
    "own_documents.md",
    "language_models.md",
    "translation.md",
    "images.md",
    "summarization.md",
    "trees.md",
    "arena.md",
    "finetune.md",
    "variants.md",
)  # several runs each: left to `make test-full`
LISTOPS = {"task.preset": "listops_128", "task.num_train": 64, "task.num_validation": 16, "task.num_test": 16}
TINY = {
    "train.num_steps": 2,
    "train.eval_every": 2,
    "train.checkpoint_every": 2,
    "train.log_every": 1,
    "train.batch_size": 8,
    "train.mesh": {"data": 1},
    "model.num_layers": 1,
    "model.width": 16,
    "model.num_heads": 2,
    "model.mlp_dim": 16,
    "optimizer.warmup_steps": 1,
}
TINY_BENCH = ["--lengths=16", "--heads=1", "--head_dim=4", "--block_size=8", "--rank=4", "--rounds=1", "--peers=none"]
TINY_REPORT = ["seeds=(0,)", "report.cost_lengths=(32,)", "report.measure_up_to=0"]
# Many hosts, clusters, accounts, data that takes minutes to prepare, comparisons of whole size: configs are checked.
CHECKED_ONLY = re.compile(
    r"srun|--coordinator|--launcher|wandb|imdb|=masked_lm|runs/(plays|kernel|chorales|scaling)|--config=(configs/)?compare_|=lra/"
)


def tiny(spec):
    """Overrides that make any shipped experiment small; the model of a checkpoint is as it is."""
    if spec.startswith("finetune"):
        return {key: value for key, value in TINY.items() if not key.startswith("model.")} | {"task.max_len": 60}
    if "translation" in spec or "summarization" in spec:
        return TINY | {"task.max_len": 32, "task.vocab_size": 300, "task.num_beams": 1}
    if spec.startswith("images"):
        return TINY
    if spec.startswith("treebank"):
        return TINY | {"task.max_len": 32, "task.vocab_size": 300}
    return TINY | ({"task.max_len": 64} if "documents" in spec or "language_model" in spec else LISTOPS)


def commands(block):
    """The command lines of a shell block, comments and continuations resolved."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run_command(words):
    """Runs one command line, or checks what of it can be checked here."""
    line = shlex.join(words)
    if words[:2] == ["pip", "install"]:
        stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extras in re.findall(r"xformer-jax\[([\w,]+)\]", line):
            assert set(extras.split(",")) <= set(stated), line
        return
    if words[0] == "make":
        assert re.search(rf"^{words[1]}( lra-\w+)*:", (ROOT / "Makefile").read_text(), re.M), line
        return
    if words[:1] == ["srun"]:
        words = words[1:]
    if words[1:2] == ["-m"] and words[0].endswith("python"):
        words = ["xformer", words[2].removeprefix("experiments."), *words[3:]]
    assert words[0] == "xformer", f"no test runs {line!r}"
    name, args = words[1], words[2:]
    (spec,) = [arg.removeprefix("--config=") for arg in args if arg.startswith("--config=")] or [""]
    overrides = [arg.removeprefix("--config.") for arg in args if arg.startswith("--config.")]
    if CHECKED_ONLY.search(line) and name != "data":
        load = comparison.load_comparison if name == "compare" else config.load_config
        if spec.split(":")[0].endswith("compare_lra") and not any(given.startswith("variants=") for given in overrides):
            overrides.append("variants=full,bigbird")  # all twelve take minutes, in test_config.py
        if spec:
            load(spec, overrides)
        return
    if name == "bench":
        args = [*args, *TINY_BENCH]
    elif name in ("predict", "generate", "data", "variants", "check-device") or spec.startswith("gpt3"):
        pass  # gpt3 is abstract at any size
    else:
        keys = {key: value for key, value in tiny(spec).items() if not any(f"{key}=" in o for o in overrides)}
        small = [f"{key}={value}" for key, value in keys.items()]
        small = [f"base.{item}" for item in small] + TINY_REPORT if name == "compare" else small
        args = [*args, *(f"--config.{item}" for item in small)]
    command = importlib.import_module(f"xformer.commands.{name.replace('-', '_')}").command
    assert cli.exit_code(command, args) == 0, line


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def project(tmp_path, data_dir, monkeypatch):
    """A user's folder, with documents of two classes."""
    rows = [
        {"text": f"{'good' if i % 2 else 'bad'} text number {i}", "label": "ab"[i % 2], "price": i} for i in range(60)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {"en": ("first", "second", "third", "last"), "de": ("erste", "zweite", "dritte", "letzte")}
    for side, text in (("en", "the {} house is red {}\n"), ("de", "das {} Haus, rot {}\n")):
        (tmp_path / f"mine.{side}").write_text("".join(text.format(words[side][i % 4], i) for i in range(60)))
    fashion = data_dir / "fashion-mnist"
    fashion.mkdir(exist_ok=True)
    write_images(fashion)
    write_image_folder(tmp_path / "pictures")
    for name in ("boot.png", "shirt.jpg"):
        PIL.Image.fromarray(np.full((30, 20, 3), 90, np.uint8)).save(tmp_path / name)
    reports = [{"source": f"machine {i} stood still for {i} hours", "target": f"still: {i}"} for i in range(60)]
    (tmp_path / "reports.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reports))
    write_treebank(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(ROOT / "tests" / "fixtures" / "weights" / "roberta_masked_lm", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer.json").write_text(tokenizer_json())
    fit = xformer.fit

    def tiny_fit(given, workdir, *, overrides=()):
        return fit(given, workdir, overrides=dict(overrides) | tiny(str(given)))

    monkeypatch.setattr(xformer, "fit", tiny_fit, raising=False)
    monkeypatch.setattr(style, "DPI", 50)  # pictures take most of a report's time
    monkeypatch.setenv("XFORMER_DATA", str(data_dir))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.full if page.name in SLOW else ()) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_what_a_page_shows_runs(page, project):
    names = {}
    for language, title, block in BLOCK.findall(page.read_text()):
        if title:
            Path(title).write_text(block)
        if language == "python":
            exec(compile(block, str(page), "exec"), names)
        elif language == "bash":
            for words in commands(block):
                run_command(words)


def test_every_block_is_marked_as_what_it_is():
    """A block without a language is run by nobody: only text that is no command may stand in one."""
    assert len(PAGES) >= 8
    for page in PAGES:
        for language, _, block in BLOCK.findall(page.read_text()):
            assert language in ("python", "bash", "text"), f"{page}: {block}"
