"""experiments.compare: a real comparison of two tiny runs a variant, and everything that may go wrong with it."""

import dataclasses
import json
import math
import textwrap

import jax
import numpy as np
import pytest

from xformer import comparison as comparisons
from xformer import experiment as experiments
from xformer.attention import BigBird, Full, Linformer, MusicRelative, Shape, Window
from xformer.bench import attention_costs
from xformer.commands import cli, compare, comparison_plan, comparison_runs, compile_cache, pictures
from xformer.report import formatting, style
from xformer.report.costs import CostRow
from xformer.tasks import Documents
from xformer.train import Diverged, Interrupted

CONFIG = """
    def get_config():
        return {
            "name": "tiny",
            "base": {
                "name": "base",
                "seed": 0,
                "attention": {"name": "full"},
                "model": {"num_layers": 1, "width": 8, "num_heads": 2, "mlp_dim": 8},
                "task": {"name": "documents", "path": PATH, "max_len": 32},
                "optimizer": {"name": "adamw", "learning_rate": 0.01},
                "train": {"num_steps": 4, "batch_size": 4, "eval_every": 2, "checkpoint_every": 2, "log_every": 1,
                          "mesh": {"data": 1}},
            },
            "variants": {
                "full": {"attention": {"name": "full"}},
                "win-1_+": {"attention": {"name": "window", "left": 4, "right": 4}},
            },
            "seeds": (0, 1),
            "report": {"cost_lengths": (32, 64), "measure_up_to": 0},
        }
"""


@pytest.fixture
def config(tmp_path):
    """The path of a comparison config over 40 documents of two classes."""
    documents = tmp_path / "documents.jsonl"
    rows = [{"text": f"{'good' if i % 2 else 'bad'} film number {i}", "label": i % 2} for i in range(40)]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "config.py"
    path.write_text(textwrap.dedent(CONFIG).replace("PATH", repr(str(documents))))
    return path


@pytest.fixture
def run(config, tmp_path, capsys, monkeypatch):
    """Calls the command in this process: run(*overrides) -> (exit code, stdout, stderr)."""

    monkeypatch.setattr(style, "DPI", 50)  # pictures take most of a report's time

    def call(*more):
        flags = [f"--config={config}", f"--workdir={tmp_path / 'work'}", f"--data_dir={tmp_path / 'data'}"]
        code = cli.exit_code(compare.command, [*flags, *more])
        return code, *capsys.readouterr()

    return call


def test_compiled_programs_are_kept_in_the_workdir(tmp_path):
    """By the file of a program, also after others were compiled without; a user's own folder stays."""
    setting = "jax_compilation_cache_dir"
    before = getattr(jax.config, setting)
    jax.config.update(setting, None)
    try:
        compile_new = lambda number: jax.jit(lambda x: x * number + 1.25).lower(1.0).compile()
        compile_new(1)
        with compile_cache.kept(tmp_path):
            compile_new(2)
        kept = list((tmp_path / "compiled").rglob("*-cache"))
        assert len(kept) == 1 and getattr(jax.config, setting) is None
        compile_new(3)
        assert len(list((tmp_path / "compiled").rglob("*-cache"))) == 1
        jax.config.update(setting, str(tmp_path / "own"))
        with compile_cache.kept(tmp_path):
            assert getattr(jax.config, setting) == str(tmp_path / "own")
    finally:
        jax.config.update(setting, before)


def test_a_dry_run_counts_the_steps_that_the_epochs_allow(run, tmp_path):
    once = ("--dry_run", "--config.train.num_steps=400", "--config.train.num_epochs=1")
    code, guessed, err = run(*once)
    assert code == cli.FINISHED and "num_steps, though num_epochs may end a run before" in guessed, err
    task = Documents(path=str(tmp_path / "documents.jsonl"), max_len=32)
    task.prepare(tmp_path / "data")
    steps = math.ceil(task.open(tmp_path / "data").num_examples("train") / 4)
    assert run(*once)[1] == run("--dry_run", f"--config.train.num_steps={steps}")[1] != guessed


def folders(tmp_path):
    return tmp_path / "work" / "runs"


def test_a_comparison_is_run_reported_skipped_and_refused(run, tmp_path):
    """One story, since every run costs compilation."""
    work = tmp_path / "work"
    code, dry, err = run("--dry_run")
    assert code == cli.FINISHED and not work.exists() and "4 runs, 4 to train" in dry, err
    code, out, err = run()
    assert code == cli.FINISHED, err
    assert "report.html" in out.splitlines()[-1] and "full" in out and "win-1_+" in out
    # Every variant has its first seed before any has its second.
    started = [line for line in err.splitlines() if line.startswith("run ")]
    assert [line.split(": ")[1].split(", about")[0] for line in started] == [
        "full, seed 0", "win-1_+, seed 0", "full, seed 1", "win-1_+, seed 1"
    ]  # fmt: skip
    assert "left" in started[-1]
    results = [json.loads(line) for line in (work / "results.jsonl").read_text().splitlines()]
    assert {(row["variant"], row["seed"]) for row in results} == {(v, s) for v in ("full", "win-1_+") for s in (0, 1)}
    for row in results:
        folder = work / "runs" / f"{row['variant']}-{row['seed']}"
        assert row["train_flops"] == json.loads((folder / "result.json").read_text())["train_flops"] > 0
        assert row["last_step"] == 4 and row["status"] == "finished" and row["role"] == "run"
        assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(row["best_step"])], "not thinned"
    for name in ("quality", "pareto", "costs", "patterns"):
        assert (work / f"{name}.png").exists(), name
    assert "The data is not prepared yet; assumed: num_classes" in dry
    code, dry, _ = run("--dry_run")
    assert code == cli.FINISHED and dry.splitlines()[-1] == "4 runs, 0 to train: 0 FLOP"
    for row in results:
        told = next(line for line in dry.splitlines() if line.startswith(row["variant"]))
        assert f" {formatting.si(row['train_flops'])} " in told and f" {row['num_params']:,} " in told
    page = (work / "report.html").read_text()
    assert "Attention only: every other key" in page and "attention.left" in page

    before = (work / "costs.json").stat().st_mtime_ns
    code, out, err = run()
    assert code == cli.FINISHED and "4 of 4 runs are finished already" in err and "run 1" not in err
    assert (work / "costs.json").stat().st_mtime_ns == before, "costs were measured again"

    code, out, err = run("--config.base.train.num_steps=6")
    assert code == cli.WRONG_ARGUMENTS
    assert "base.train.num_steps: 4 there, 6 now" in err and len(err.splitlines()) == 1

    # What a crash of the machine may leave: each is made again.
    kept = json.loads((folders(tmp_path) / "full-0" / "result.json").read_text())
    (folders(tmp_path) / "full-0" / "result.json").write_text('{"name": "cut')
    (work / "costs.json").write_text("")
    (work / "results.jsonl").write_text('5\n{"var')
    code, out, err = run()
    assert code == cli.FINISHED and "3 of 4 runs are finished already" in err, err
    assert "result.json is damaged: it is made again from the run's last checkpoint" in err
    assert "costs.json is damaged; the costs are measured again" in err
    again = json.loads((folders(tmp_path) / "full-0" / "result.json").read_text())
    assert again["test"] == kept["test"] and len((work / "results.jsonl").read_text().splitlines()) == 4

    code, out, err = run("--config.report.cost_lengths=(32,)", "--report_only")
    assert code == cli.FINISHED, "what is reported may change"
    assert (work / "costs.json").stat().st_mtime_ns != before


class FakeTrainer:
    """Writes a result without training, or raises."""

    engine = None

    def __init__(self, folder, seed, error, task, data):
        self.folder, self.seed, self.error, self.task, self.data = folder, seed, error, task, data

    def fit(self):
        if self.error is not None:
            raise self.error
        self.folder.mkdir(parents=True, exist_ok=True)
        result = {"seed": self.seed, "test": {"accuracy": 0.5, "examples": 4}, "train_seconds": 1.0}
        (self.folder / "result.json").write_text(json.dumps(result))


@pytest.fixture
def errors(monkeypatch):
    """Runs train nothing; a run whose (variant, seed) is in this dict raises the error that stands there."""
    found: dict[tuple[str, int], BaseException] = {}

    def trainer(self, workdir, data_dir=None, progress=None, like=None, test=True):
        variant = self.name.removeprefix("tiny-")
        return FakeTrainer(workdir, self.seed, found.get((variant, self.seed)), self.judged, self.task.open(data_dir))

    monkeypatch.setattr(experiments.Experiment, "trainer", trainer)
    return found


def test_a_failed_run_costs_only_itself_and_is_tried_again(run, errors, tmp_path):
    errors["full", 0] = Diverged("loss is nan at step 3", 3)
    errors["win-1_+", 1] = RuntimeError("a bug")
    code, out, err = run()
    assert code == cli.FAILED
    assert "2 of 4 runs failed: full, seed 0 and win-1_+, seed 1" in err.splitlines()[-1]
    assert "Traceback" in err and err.count("Traceback") == 1, "a traceback for the bug, none for what is foreseen"
    assert (folders(tmp_path) / "full-1" / "result.json").exists()
    assert (folders(tmp_path) / "win-1_+-0" / "result.json").exists()
    assert "full, seed 0: failed: Diverged: loss is nan at step 3" in out
    assert "loss is nan at step 3" in (tmp_path / "work" / "report.html").read_text()

    errors.clear()
    code, out, err = run()
    assert code == cli.FINISHED and "failed:" not in out
    assert [line.split(",")[0] for line in err.splitlines() if line.startswith("run ")] == [
        "run 3 of 4: full", "run 4 of 4: win-1_+"
    ]  # fmt: skip


@pytest.mark.usefixtures("errors")
def test_a_metric_from_outside_is_no_other_data(run, tmp_path, monkeypatch):
    (tmp_path / "own_metric.py").write_text(
        "from xformer.tasks import Metric\n"
        "class Hits(Metric):\n"
        "    name, better = 'hits', 'max'\n"
        "    def of_batch(self, outputs, batch):\n"
        "        return (outputs.argmax(-1) == batch['targets']) * 1.0, batch['weights']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = run("--config.base.train.metrics=('own_metric:Hits',)", "--config.seeds=(0,)")
    assert code == cli.FINISHED, err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.param("signal", id="signal")])
def test_an_interruption_says_what_is_done_and_how_to_go_on(run, errors, error):
    errors["win-1_+", 0] = Interrupted("SIGTERM came", 2) if error == "signal" else error
    code, _, err = run()
    assert code == cli.RESUMABLE
    last = err.splitlines()[-1]
    assert last.startswith("stopped: 1 of 4 runs are finished") and "the same command goes on" in last


@pytest.mark.full
def test_runs_that_stop_at_stop_at_step_do_not_keep_the_others_from_starting(run, errors):
    for variant in ("full", "win-1_+"):
        errors[variant, 0] = Interrupted("stop_at_step is 2", 2)
    code, out, err = run("--config.base.train.stop_at_step=2")
    assert code == cli.RESUMABLE and "2 of 4 runs stopped at stop_at_step" in err.splitlines()[-1]
    assert "1 of 2" in out
    errors.clear()
    assert run()[0] == cli.FINISHED, "stop_at_step may change"


def test_variants_are_compared_on_several_tasks(run, errors, tmp_path):
    work = tmp_path / "work"
    tasks = ["--config.tasks.short.task.max_len=32", "--config.tasks.long.task.max_len=48"]
    for task in ("short", "long"):
        errors[f"{task}-full", 1] = Diverged("loss is nan at step 3", 3)
    code, out, err = run(*tasks)
    started = [line.split(": ")[1].split(", about")[0] for line in err.splitlines() if line.startswith("run ")]
    assert started[:4] == [
        "full on short, seed 0", "win-1_+ on short, seed 0", "full on long, seed 0", "win-1_+ on long, seed 0"
    ]  # fmt: skip
    assert code == cli.FAILED and err.splitlines()[-1].startswith("error: 2 of 8 runs failed: full on short, seed 1")
    assert {path.name for path in (work / "long" / "runs").iterdir()} == {"full-0", "full-1", "win-1_+-0", "win-1_+-1"}
    results = [json.loads(line) for line in (work / "results.jsonl").read_text().splitlines()]
    assert [(row["task"], row["variant"], row["seed"]) for row in results[::4]] == [
        ("short", "full", 0),
        ("long", "full", 0),
    ]
    header, _, first, *_ = out.splitlines()
    assert header.split() == ["variant", "short:", "test", "accuracy", "long:", "test", "accuracy", "mean", "training",
                              "FLOPs", "step", "time"]  # fmt: skip
    assert first.split()[:6] == ["full", "50.0", "%", "50.0", "%", "50.0"]
    page = (work / "report.html").read_text()
    assert page.count("Which pairs each variant considers") == 2 * 2  # lengths differ: a heading and an alt text each
    assert "long: full, seed 1: failed: Diverged" in out and "![" in (work / "report.md").read_text()

    errors.clear()
    code, out, err = run(*tasks)
    assert code == cli.FINISHED and "6 of 8 runs are finished already" in err
    code, _, err = run(tasks[0], "--config.tasks.long.task.max_len=64")
    assert code == cli.WRONG_ARGUMENTS and "tasks.long.task.max_len: 48 there, 64 now" in err


def test_variants_of_a_comparison_with_tasks_are_picked_and_added():
    """Tasks say what a variant changes on them; what is not picked is left out there too."""
    picked = comparisons.load_comparison("compare_lra", ["variants=full,performer"])
    assert list(picked.variants) == ["full", "performer"]
    for part in comparisons.comparison_parts(picked).values():
        rates = {
            variant: run.model.get("attention_dropout_rate") for variant, _, run in comparisons.comparison_runs(part)
        }
        assert list(rates) == ["full", "performer"] and not rates["performer"], "it has no weights to drop"


@pytest.mark.usefixtures("errors")
def test_variants_and_seeds_are_added_to_a_finished_comparison(run, tmp_path):
    runs = lambda: {path.name for path in folders(tmp_path).iterdir()}
    few = ("--config.seeds=0", "--config.variants=full,win-1_+")
    assert run(*few)[0] == cli.FINISHED and runs() == {"full-0", "win-1_+-0"}
    before = (folders(tmp_path) / "full-0" / "result.json").stat().st_mtime_ns
    code, out, err = run("--config.seeds=0,3", "--config.variants=full,linformer")  # one of the table of variants
    assert code == cli.FINISHED, err
    assert runs() == {"full-0", "win-1_+-0", "full-3", "linformer-0", "linformer-3"}
    assert "1 of 4 runs are finished already" in err
    assert (folders(tmp_path) / "full-0" / "result.json").stat().st_mtime_ns == before
    # What was not asked for this time stays in the report.
    stored = json.loads((tmp_path / "work" / "config.json").read_text())
    assert list(stored["seeds"]) == [0, 3] and set(stored["variants"]) == {"full", "win-1_+", "linformer"}
    assert "win-1_+" in out and "linformer" in out
    rows = [json.loads(line) for line in (tmp_path / "work" / "results.jsonl").read_text().splitlines()]
    assert {(row["variant"], row["seed"], row["status"]) for row in rows if row["variant"] == "win-1_+"} == {
        ("win-1_+", 0, "finished"),
        ("win-1_+", 3, "not started"),
    }
    code, _, err = run("--config.seeds=0", "--config.variants.win-1_+.attention.left=5")
    assert code == cli.WRONG_ARGUMENTS and "variants.win-1_+.attention.left: 4 there, 5 now" in err
    code, _, err = run("--config.variants=full,lokal")
    assert code == cli.WRONG_ARGUMENTS and err.startswith("error: variants: got 'lokal'; has full, win-1_+, and ")
    code, _, err = run("--config.variants=full,full")
    assert code == cli.WRONG_ARGUMENTS and err == "error: variants: got 'full' twice, takes each name once\n"
    # One of an older version, without a key that is newer, is the same comparison.
    stored = json.loads((tmp_path / "work" / "config.json").read_text())
    del stored["base"]["train"]["init_positions"]
    (tmp_path / "work" / "config.json").write_text(json.dumps(stored))
    code, _, err = run("--config.seeds=0", "--config.variants=full")
    assert code == cli.FINISHED, err


@pytest.mark.full
def test_seeds_share_what_is_compiled_and_change_nothing_by_it(config, tmp_path):
    """A run in a comparison is, bit for bit, the run alone: BigBird, whose random blocks no seed of a run decides."""
    overrides = [
        "train.num_steps=2",
        "variants.win-1_+.attention.name=bigbird",
        "variants.win-1_+.attention.block_size=4",
    ]
    overrides += ["variants.win-1_+.attention.num_random_blocks=1", "base.model.dropout_rate=0.1"]
    for key in ("left", "right"):
        config.write_text(config.read_text().replace(f', "{key}": 4', ""))
    runs = [
        planned
        for planned in comparison_plan.plan(
            {"": comparisons.load_comparison(str(config), overrides)}, tmp_path / "work"
        )
        if planned.variant != "full"
    ]
    fingerprints = comparison_runs.prepare(runs, str(tmp_path / "data"))
    engines: dict = {}
    for planned in runs:
        comparison_runs.train_one(planned, str(tmp_path / "data"), fingerprints, engines)
    assert len(engines) == 1 and len(engines.popitem()[1].train_step._by_shape) == 1
    alone = dataclasses.replace(runs[1], folder=tmp_path / "alone")
    comparison_runs.train_one(alone, str(tmp_path / "data"), fingerprints, {})
    timed = ("seconds", "step_time_ms", "step_time_p10_ms", "step_time_p90_ms", "train_seconds", "input_wait_share")
    both = [
        {key: value for key, value in json.loads((folder / "result.json").read_text()).items() if key not in timed}
        for folder in (runs[1].folder, alone.folder)
    ]
    assert both[0] == both[1] and both[0]["seed"] == 1
    kept = [np.load(folder / "test_examples.npz") for folder in (runs[0].folder, runs[1].folder, alone.folder)]
    assert (kept[1]["loss"] == kept[2]["loss"]).all() and (kept[0]["loss"] != kept[1]["loss"]).any()


def test_runs_whose_steps_come_of_other_data_share_none(tmp_path):
    """By `num_epochs` the data decides how long a run is, and with it the schedule inside the compiled step."""

    def trainer(num_train, like=None):
        built = experiments.build(
            {
                "name": f"needle-{num_train}",
                "seed": 0,
                "attention": {"name": "full"},
                "model": {"num_layers": 1, "width": 8, "num_heads": 2, "mlp_dim": 8},
                "task": {"name": "needle", "max_len": 16, "num_train": num_train, "num_validation": 4, "num_test": 4},
                "optimizer": {"name": "adamw", "learning_rate": 0.01, "schedule": "cosine"},
                "train": {"num_steps": 20, "num_epochs": 1.0, "batch_size": 4, "mesh": {"data": 1}},
            }
        )
        return built.steps_key, built.trainer(tmp_path / built.name, tmp_path / "data", like=like)

    key, first = trainer(40)
    assert first.train.num_steps == 10 and float(first.schedule(10)) < 1e-6 < float(first.schedule(9))
    for num_train, num_steps in ((32, 8), (40, 10), (800, 20)):
        other_key, other = trainer(num_train, first.engine)
        assert key == other_key and other.train.num_steps == num_steps
        assert (other.engine.steps is first.engine.steps) == (num_steps == 10)


def test_every_variant_is_checked_before_anything_runs(run, errors, tmp_path):
    code, _, err = run("--config.variants.win-1_+.attention.left=-3")
    assert code == cli.WRONG_ARGUMENTS and len(err.splitlines()) == 1 and "left" in err
    code, _, err = run("--config.sedes=(1,)")
    assert code == cli.WRONG_ARGUMENTS and "sedes" in err
    assert not (tmp_path / "work").exists()


def test_a_second_comparison_in_the_same_workdir_waits_outside(run, errors, tmp_path):
    from xformer.train import workdir

    with workdir.lock(tmp_path / "work"):
        code, _, err = run()
    assert code == cli.FAILED and "in use" in err


def test_the_workdir_of_a_single_run_is_refused(run, errors, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "config.json").write_text('{"name": "a run", "train": {}}')
    code, _, err = run()
    assert code == cli.WRONG_ARGUMENTS and "holds no comparison" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("content", ["", '{"name": "ti', "5", '{"variants": 5}'])
def test_a_damaged_config_is_refused_in_one_line(run, errors, tmp_path, content):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "config.json").write_text(content)
    for more in ((), ("--report_only",)):
        code, _, err = run(*more)
        assert code == cli.WRONG_ARGUMENTS and len(err.splitlines()) == 1
        assert "another comparison" in err if "variants" in content else "config.json is empty or damaged" in err
    assert (tmp_path / "work" / "config.json").read_text() == content


def test_a_report_that_is_interrupted_is_resumable_and_completed(run, errors, tmp_path, monkeypatch):
    def stop(*given, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(compare.report, "write", stop)
        code, _, err = run()
    assert code == cli.RESUMABLE and "4 of 4 runs are finished, the report is not written" in err.splitlines()[-1]
    code, _, err = run("--config.report.measure_up_to=0")
    assert code == cli.FINISHED and (tmp_path / "work" / "report.html").exists()


def test_far_more_parameters_are_said_before_training(run, errors):
    _, _, err = run("--config.variants.win-1_+.model.mlp_dim=64")
    assert "warning: win-1_+ has" in err and "from the prepared data" in err


def test_missing_and_faulty_data_end_it_before_the_first_run(run, tmp_path):
    code, _, err = run("--config.base.task.path=nowhere.jsonl")
    assert code == cli.WRONG_ARGUMENTS and "nowhere.jsonl" in err.splitlines()[-1] and "run 1" not in err
    (tmp_path / "documents.jsonl").write_text("no JSON\n")
    code, _, err = run("--workdir", str(tmp_path / "other"))
    assert code == cli.WRONG_ARGUMENTS and "line 1" in err.splitlines()[-1] and "Traceback" not in err


# Measuring.

OPS = {"full": Full(), "pooled": Linformer(rank=8, max_len=16), "bigbird": BigBird(block_size=8)}


def plan(**changes):
    return dataclasses.replace(attention_costs.Plan(OPS, "full", 2, 8, None, "float32", (16, 32), 16, 600.0), **changes)


def test_costs_are_counted_for_all_lengths_and_measured_up_to_one(tmp_path):
    rows = attention_costs.cached(tmp_path / "costs.json", plan(), lambda line: None)
    assert [(row.length, row.variant) for row in rows] == [(n, name) for n in (16, 32) for name in OPS]
    for row in rows:
        op = attention_costs.at_length(OPS[row.variant], row.length)
        assert row.flops == op.cost(Shape(1, row.length, row.length, 2, 8)).flops > 0
        assert row.train_flops > 2 * row.flops
        measured = (row.time_ms, row.train_time_ms, row.memory_bytes, row.forward_bytes)
        assert all(value > 0 for value in measured) if row.length <= 16 else all(map(math.isnan, measured))
    again = attention_costs.cached(tmp_path / "costs.json", plan(), lambda line: pytest.fail("measured again"))
    assert [dataclasses.astuple(row)[:4] for row in again] == [dataclasses.astuple(row)[:4] for row in rows]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "5",
        lambda text: json.dumps(json.loads(text) | {"rows": 5}),
        lambda text: json.dumps(json.loads(text) | {"rows": [5]}),
        lambda text: json.dumps(json.loads(text) | {"rows": [{"variant": "full"}]}),
        lambda text: text.replace('"length": 16', '"length": "x"'),
    ],
)
def test_damaged_costs_are_measured_again(tmp_path, damage):
    path, short = tmp_path / "costs.json", plan(measure_up_to=0, lengths=(16,))
    rows = attention_costs.cached(path, short, lambda line: None)
    whole = path.read_text()
    path.write_text(damage(whole))
    said: list[str] = []
    assert len(attention_costs.cached(path, short, said.append)) == len(rows)
    assert said == [f"{path} is damaged; the costs are measured again"] and path.read_text() == whole


def test_no_time_to_measure_is_said_and_flops_are_still_there():
    rows = attention_costs.measure(plan(seconds=0.0), lambda line: pytest.fail("measured"))
    assert all(row.flops > 0 and math.isnan(row.time_ms) for row in rows)
    assert {row.note for row in rows if row.length <= 16} == {"not measured: beyond the 0 s for measuring"}


def test_what_a_variant_cannot_do_is_named():
    row = attention_costs.count("x", BigBird(), plan(num_heads=3, num_kv_heads=2), 16)
    assert isinstance(row, CostRow) and math.isnan(row.flops) and "num_kv_heads" in row.note


def test_what_has_a_longest_input_is_built_for_the_length():
    assert attention_costs.at_length(Linformer(rank=8, max_len=16), 64) == Linformer(rank=8, max_len=64)
    assert attention_costs.at_length(Linformer(rank=8, max_len=16), 4) == Linformer(rank=8, max_len=16)
    op = Full(position=MusicRelative(max_len=16))
    assert attention_costs.at_length(op, 64) == Full(position=MusicRelative(max_len=64))
    assert attention_costs.at_length(Window(3, 3), 64) == Window(3, 3)


# Patterns.


def test_how_far_attention_reaches_from_the_first_position():
    assert pictures.reach(Window(left=2, right=3), 40, 2, 2) == 6
    assert pictures.reach(Window(left=2, right=3), 40, 20, 2) == 39
    assert pictures.reach(BigBird(block_size=4), 40, 1, 2) == 39
    assert pictures.reach(Linformer(rank=8, max_len=40), 40, 2, 2) is None
    assert pictures.reach(Full(causal=True), 40, 3, 2) == 0


def test_the_parts_of_a_pattern_make_it_up():
    op = BigBird(block_size=4, num_random_blocks=1)
    found = pictures.pattern(op, 48, 2)
    assert list(found.parts) == ["random", "window", "global"]
    union = found.parts["random"] | found.parts["window"] | found.parts["global"]
    assert (union == found.allowed).all() and (found.allowed == op.pattern(48, 48, 2)).all()
    assert pictures.pattern(Linformer(rank=8, max_len=16), 16, 2).allowed is None
    causal = pictures.pattern(dataclasses.replace(op, causal=True), 48, 2)
    assert not causal.parts["window"][0, 0, 1:].any()
