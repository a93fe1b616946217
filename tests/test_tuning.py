"""`tune` in a comparison: trials before the runs, what is chosen, what is refused, and what the report says of it."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_comparison

from xformer import comparison as comparisons
from xformer import config as configs
from xformer import experiment as experiments
from xformer import tuning
from xformer.commands import cli, compare
from xformer.report import page, results, style
from xformer.report import trials as trials_of_report
from xformer.train import Diverged, Interrupted

BEST = {"full": 1e-2, "window": 1e-1}  # what learns best; a window's lies at the edge of the grid
FLOPS, SECONDS = 1000, 2.0  # of a step


@pytest.fixture
def config(tmp_path):
    return tiny_comparison.write(tmp_path / "config.py", tune={"optimizer.learning_rate": (1e-3, 1e-2, 1e-1)})


@pytest.fixture
def run(config, tmp_path, capsys, monkeypatch):
    """Calls the command in this process: run(*overrides) -> (exit code, stdout, stderr); pictures are left out."""
    monkeypatch.setattr(page, "_plots", lambda *given: [])
    monkeypatch.setattr(compare.attention_costs, "cached", lambda *given: [])
    monkeypatch.setattr(compare.pictures, "pattern", lambda *given: None)

    def call(*more):
        flags = [f"--config={config}", f"--workdir={tmp_path / 'work'}", f"--data_dir={tmp_path / 'data'}"]
        code = cli.exit_code(compare.command, [*flags, *more])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def trained(monkeypatch):
    """Nothing is trained; what would be is listed as (variant, seed, learning rate, whether its test is scored).

    A dict of errors by (variant, learning rate) is the list's attribute `errors`.
    """

    class Trained(list):
        errors: dict = {}  # noqa: RUF012

    found = Trained()
    found.errors = {}

    def trainer(self, workdir, data_dir=None, progress=None, like=None, test=True):
        variant, rate = self.name.removeprefix("tiny-"), self.config.optimizer.learning_rate
        data = self.task.open(data_dir)

        class Fake:
            engine = None

            def fit(self):
                found.append((variant, seed, rate, test))
                workdir.mkdir(parents=True, exist_ok=True)
                row = {"step": 2, "split": "train", "train_flops": 2 * FLOPS, "seconds": 2 * SECONDS}
                (workdir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
                if error := found.errors.get((variant, rate)):
                    raise error
                accuracy = 0.9 - 0.1 * abs(math.log10(rate / BEST[variant]))
                result = {"seed": seed, "eval": {"accuracy": accuracy}, "select_metric": "accuracy",
                          "better": {"accuracy": "max"}, "train_flops": 4 * FLOPS, "train_seconds": 4 * SECONDS,
                          "test": {"accuracy": 0.5, "examples": 8} if test else {}}  # fmt: skip
                (workdir / "config.json").write_text(json.dumps(experiments.as_json(config)))
                (workdir / "result.json").write_text(json.dumps(result))

        seed, config, fake = self.seed, self.config, Fake()
        fake.data = data
        return fake

    monkeypatch.setattr(experiments.Experiment, "trainer", trainer)
    return found


def rows(tmp_path, role):
    lines = (tmp_path / "work" / "results.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["role"] == role]


def test_every_variant_is_tuned_on_validation_and_then_run(run, trained, tmp_path):
    code, out, err = run()
    assert code == cli.FINISHED, err
    grid = (1e-3, 1e-2, 1e-1)
    # Trials first, with a seed that no run has and without the test split; then the runs with what was best.
    assert trained[:6] == [(variant, 1000, rate, False) for rate in grid for variant in ("full", "window")]
    assert trained[6:] == [(variant, seed, BEST[variant], True) for seed in (0, 1) for variant in ("full", "window")]
    for row in rows(tmp_path, "run"):
        assert row["tuned"] == {"optimizer.learning_rate": BEST[row["variant"]]} and row["seed"] in (0, 1)
        assert row["num_steps"] == 4 and row["budget"] == {"steps": 4}
    trials = rows(tmp_path, "trial")
    assert len(trials) == 6 and all(trial["seed"] == 1000 and trial["test"] == {} for trial in trials)
    # The chosen one is the best on validation, recomputed from the rows.
    for variant in ("full", "window"):
        own = [trial for trial in trials if trial["variant"] == variant]
        best = max(own, key=lambda trial: trial["eval"]["accuracy"])
        assert [trial["chosen"] for trial in own] == [trial is best for trial in own]
    said = json.loads((tmp_path / "work" / "comparison.json").read_text())["variants"]
    assert said["full"]["tuned"]["at_edge"] == {}
    assert said["window"]["tuned"]["at_edge"] == {"optimizer.learning_rate": "largest"}
    assert said["window"]["tuned"]["train_flops"] == 3 * 4 * FLOPS
    assert said["full"]["tuned"]["train_seconds"] == 3 * 4 * SECONDS and said["full"]["tuned"]["trials"] == 3
    assert "! window: the best learning_rate 0.1 is the largest that was tried" in out and "full: the best" not in out
    html = (tmp_path / "work" / "report.html").read_text()
    assert "All trials together took 24.0 kFLOP, 150 % of what the runs took, and 48 s" in html
    assert trials_of_report.picture(results.load(tmp_path / "work"), style.LIGHT).startswith(b"\x89PNG")

    del trained[:]
    code, dry, _ = run("--dry_run", "--config.seeds=0,1,2")
    assert code == cli.FINISHED and dry.splitlines()[-1].startswith("6 runs, 2 to train")
    assert run("--config.seeds=0,1,2")[0] == cli.FINISHED
    assert trained == [("full", 2, 1e-2, True), ("window", 2, 1e-1, True)], "a seed that is added is not tuned again"
    del trained[:]
    assert run("--config.variants=linformer")[0] == cli.FAILED  # its fake has no best value
    assert {one[:2] for one in trained} == {("linformer", 1000)}, "a variant that is added is tuned"

    for change, line in (
        ("tune.optimizer.learning_rate=(1e-3,1e-2)", "tune.optimizer.learning_rate: [0.001, 0.01, 0.1] there"),
        ("tune_seed=7", "tune_seed: 1000 there, 7 now"),
        ("variants.full.tune={'model.mlp_dim': (8, 16, 32)}", "variants.full.tune"),
    ):
        code, _, err = run(f"--config.{change}")
        assert code == cli.WRONG_ARGUMENTS and line in err and len(err.splitlines()) == 1, err


def test_a_trial_that_diverges_is_never_chosen_nor_tried_again(run, trained, tmp_path):
    trained.errors["window", 1e-1] = Diverged("loss is nan at step 3", 3)
    code, out, err = run()
    assert code == cli.FINISHED, err
    assert {one[2] for one in trained if one[:2] == ("window", 0)} == {1e-2}
    assert "! window, trial learning_rate 0.1: failed: Diverged: loss is nan at step 3" in out
    failed = next(row for row in rows(tmp_path, "trial") if row["status"] == "failed")
    assert failed["failure"] == "Diverged: loss is nan at step 3" and not failed["chosen"]
    said = json.loads((tmp_path / "work" / "comparison.json").read_text())["variants"]["window"]["tuned"]
    assert (said["trials"], said["finished"], said["train_flops"]) == (3, 2, (4 + 4 + 2) * FLOPS)
    del trained[:]
    trained.errors.clear()
    assert run()[0] == cli.FINISHED and not trained, "what is chosen stays chosen"


@pytest.mark.full
def test_a_failure_that_is_no_outcome_keeps_the_runs_waiting(run, trained, tmp_path):
    trained.errors["window", 1e-3] = OSError("disk full")
    code, _, err = run()
    assert code == cli.FAILED and "1 trials failed: window, trial learning_rate 0.001" in err.splitlines()[-1]
    assert {one[0] for one in trained if one[1] != 1000} == {"full"}, "a window has no values yet"
    trained.errors.clear()
    del trained[:]
    assert run()[0] == cli.FINISHED
    assert trained[0] == ("window", 1000, 1e-3, False) and {one[0] for one in trained} == {"window"}


def test_where_no_trial_finishes_nothing_is_run_and_one_line_says_so(run, trained, tmp_path):
    trained.errors |= {("window", rate): Diverged("loss is nan", 3) for rate in (1e-3, 1e-2, 1e-1)}
    code, out, err = run()
    assert code == cli.FAILED and "no trial of window finished" in err.splitlines()[-1]
    assert "! window: nothing is chosen yet" in out and "window, seed 0: not started" in out


def test_trials_are_resumed_like_runs(run, trained, tmp_path):
    trained.errors["full", 1e-2] = Interrupted("SIGTERM came", 2)
    code, _, err = run()
    assert code == cli.RESUMABLE and "2 of 6 trials are finished" in err.splitlines()[-1]
    trained.errors.clear()
    del trained[:]
    code, dry, _ = run("--dry_run")
    assert dry.splitlines()[-1].startswith("6 trials and 4 runs, 8 to train"), dry
    assert run()[0] == cli.FINISHED
    assert trained[0] == ("full", 1000, 1e-2, False) and len([one for one in trained if one[1] == 1000]) == 4


def load(config, *overrides):
    return comparisons.load_comparison(str(config), overrides)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("tune_seed=1", "tune_seed: got 1, takes a seed that is none of seeds, 0, 1"),
        ("tune.optimizer.learning_rate=0.1", "tune.optimizer.learning_rate: got 0.1, takes the values to try"),
        ("tune.optimizer.learning_rate=(0.1,0.1)", "takes different values"),
        ("tune.optimizer.learning_rat=(0.1,)", "reads no such key"),
        ("tune.task.max_len=(16,32)", "tune.task.max_len: takes keys of attention, model"),
        ("tune.train.num_steps=(1,2)", "but budget decides that"),
        ("tune.optimizer.learning_rate=(0.1,-1.0)", "full with learning_rate -1: optimizer.learning_rate"),
        ("variants.full.tune={'model.mlp_dim':(8,16)}", "variants.window.tune: got 3 trials, takes 2, as many as full"),
    ],
)
def test_a_grid_that_is_wrong_is_one_line(config, override, line):
    with pytest.raises(configs.ConfigError) as error:
        load(config, override)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_variant_s_own_grid_replaces_the_common_one(config):
    own = load(config, "variants.window.tune={'attention.left':(2,4,8)}")
    found = [(variant, values) for variant, values, _ in comparisons.comparison_trials(own)]
    rates = [{"optimizer.learning_rate": rate} for rate in (1e-3, 1e-2, 1e-1)]
    lefts = [{"attention.left": left} for left in (2, 4, 8)]
    assert found == [("full", rate) for rate in rates] + [("window", left) for left in lefts]
    trials = comparisons.comparison_trials(own)
    assert [run.attention.left for variant, _, run in trials if variant == "window"] == [2, 4, 8]
    assert all(run.seed == own.tune_seed == 1000 for _, _, run in trials)
    assert comparisons.check_comparison(own) == own, "what is checked is checked again without a change"
    assert load(config, "seeds=1000,1001").tune_seed == 1002
    assert "tune_seed" not in load(config, "tune=None")


def test_points_keep_their_numbers_however_a_grid_is_written():
    nested = {"optimizer": {"learning_rate": (1, 2)}, "model": {"width": (8, 16)}}
    dotted = {"optimizer.learning_rate": (1, 2), "model.width": (8, 16)}
    expected = [(width, rate) for width in (8, 16) for rate in (1, 2)]
    for grid in (nested, dotted, dict(reversed(dotted.items()))):
        found = tuning.points(tuning.complete("tune", grid))
        assert [(point["model.width"], point["optimizer.learning_rate"]) for point in found] == expected


def test_the_best_trial_is_the_first_of_equals_and_has_a_number():
    assert tuning.best([0.5, 0.9, 0.9, None, math.nan], True) == 1
    assert tuning.best([None, 0.9, 0.4, 0.4], False) == 2
    assert tuning.best([None, math.nan], True) is None
    assert tuning.best([0.5, 1.0, 1.0, 1.0], True, [0.1, 0.3, 0.2, 0.2]) == 2  # of equals by the loss
    assert tuning.best([1.0, 1.0], True, [0.3, None]) == 0


def test_a_value_at_the_edge_that_one_between_equals_is_no_edge():
    """As at 100 % accuracy, where nothing says that beyond is a better one."""
    trial = lambda rate, accuracy: SimpleNamespace(
        values={"optimizer.learning_rate": rate},
        result={"select_metric": "accuracy", "better": {"accuracy": "max"}, "eval": {"accuracy": accuracy}},
    )
    trials = {"full": [trial(0.1, 1.0), trial(0.2, 1.0), trial(0.3, 0.9)], "window": [trial(0.1, 0.5), trial(0.2, 0.4)]}
    grid = {"optimizer": {"learning_rate": (0.1, 0.2, 0.3)}}
    comparison = SimpleNamespace(trials=trials, grids=dict.fromkeys(trials, grid), chosen=dict.fromkeys(trials, 0))
    assert trials_of_report.edges(comparison, "full") == {}
    assert trials_of_report.edges(comparison, "window") == {"optimizer.learning_rate": "smallest"}


def test_edges_are_those_of_numbers_only():
    grid = {"optimizer": {"learning_rate": (0.3, 0.1, 0.2), "name": ("adam", "sgd")}, "model": {"width": (8,)}}
    chosen = {"optimizer.learning_rate": 0.1, "optimizer.name": "sgd", "model.width": 8}
    assert tuning.edges(grid, chosen) == {"optimizer.learning_rate": "smallest"}
    assert tuning.edges(grid, chosen | {"optimizer.learning_rate": 0.2}) == {}


@pytest.mark.full
def test_a_trial_that_is_killed_goes_on_and_changes_nothing(config, tmp_path, monkeypatch):
    """Real trials and runs: stopped in the middle of every trial, then completed; a run has the values of its trial."""
    monkeypatch.setattr(style, "DPI", 50)
    flags = ["--config.variants=full", f"--config={config}", f"--data_dir={tmp_path / 'data'}", "--config.seeds=0"]
    whole, cut = ([*flags, f"--workdir={tmp_path / name}"] for name in ("whole", "cut"))
    assert cli.exit_code(compare.command, whole) == cli.FINISHED
    assert cli.exit_code(compare.command, [*cut, "--config.train.stop_at_step=3"]) == cli.RESUMABLE
    assert not results.tuned(tmp_path / "cut")
    assert cli.exit_code(compare.command, cut) == cli.FINISHED
    timed = {"seconds", "step_time_ms", "step_time_p10_ms", "step_time_p90_ms", "train_seconds", "input_wait_share"}
    for folder in ("trials/full-0", "trials/full-1", "trials/full-2", "runs/full-0"):
        both = [json.loads((tmp_path / name / folder / "result.json").read_text()) for name in ("whole", "cut")]
        assert all(both[0][key] == both[1][key] for key in both[0].keys() - timed), folder
    assert results.tuned(tmp_path / "whole") == results.tuned(tmp_path / "cut")
    rate = results.tuned(tmp_path / "whole")["full"]["optimizer.learning_rate"]
    ran = json.loads((tmp_path / "whole" / "runs" / "full-0" / "config.json").read_text())
    assert ran["optimizer"]["learning_rate"] == rate
    assert not (tmp_path / "whole" / "trials" / "full-0" / "test_examples.npz").exists()
    assert np.load(tmp_path / "whole" / "runs" / "full-0" / "test_examples.npz").files


def test_the_report_of_a_workdir_of_before_has_no_tuning(tmp_path):
    import report_fake

    report_fake.make(tmp_path, variants=("full",), seeds=(0,))
    page.write(tmp_path)
    assert ">Tuning<" not in (tmp_path / "report.html").read_text() and not (tmp_path / "tuning.png").exists()
    assert json.loads((tmp_path / "comparison.json").read_text())["variants"]["full"]["tuned"] is None
