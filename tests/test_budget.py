"""`budget` in a comparison: how many steps each variant gets, recomputed from what the comparison writes."""

import json
import math

import pytest
import tiny_comparison

from xformer import budget as budgets
from xformer import comparison as comparisons
from xformer import config as configs
from xformer import experiment as experiments
from xformer.commands import budgets as settling
from xformer.commands import cli, compare, dry_run
from xformer.cost import Cost
from xformer.report import page, results
from xformer.train.step import TrainState


@pytest.fixture
def config(tmp_path):
    return tiny_comparison.write(
        tmp_path / "config.py",
        base={
            "task": {"max_len": 64},
            "optimizer": {"warmup_steps": 10},
            "train": {"num_steps": 100, "eval_every": 20, "checkpoint_every": 50, "log_every": 10},
        },
        variants={"wide": {"model": {"mlp_dim": 64}}},
        seeds=(0,),
    )


@pytest.fixture
def run(config, tmp_path, capsys, monkeypatch):
    """Calls the command in this process: run(*overrides) -> (exit code, stdout, stderr); nothing is drawn or trained.

    A fake run takes the steps of its config, at the counted FLOPs of its step, each counted once.
    """
    count, counted = settling.count_step, {}

    def count_once(config, data_dir):
        key = json.dumps(experiments.as_json({"model": config.model, "attention": config.attention}))
        counted[key] = counted[key] if key in counted else count(config, data_dir)
        return counted[key]

    monkeypatch.setattr(settling, "count_step", count_once)
    monkeypatch.setattr(page, "_plots", lambda *given: [])
    monkeypatch.setattr(compare.attention_costs, "cached", lambda *given: [])
    monkeypatch.setattr(compare.pictures, "pattern", lambda *given: None)

    def trainer(self, workdir, data_dir=None, progress=None, like=None, test=True):
        class Fake:
            engine = None

            def fit(self):
                workdir.mkdir(parents=True, exist_ok=True)
                (workdir / "config.json").write_text(json.dumps(experiments.as_json(config)))
                steps, each = config.train.num_steps, settling.count_step(config, data_dir)
                result = {"seed": config.seed, "eval": {"accuracy": 0.5}, "select_metric": "accuracy",
                          "better": {"accuracy": "max"}, "flops_per_step": each, "train_flops": steps * each,
                          "train_seconds": steps * 0.01, "last_step": steps,
                          "test": {"accuracy": 0.5, "examples": 8} if test else {}}  # fmt: skip
                (workdir / "result.json").write_text(json.dumps(result))

        config, fake = self.config, Fake()
        fake.data = self.task.open(data_dir)
        return fake

    monkeypatch.setattr(experiments.Experiment, "trainer", trainer)

    def call(*more):
        flags = [f"--config={config}", f"--workdir={tmp_path / 'work'}", f"--data_dir={tmp_path / 'data'}"]
        code = cli.exit_code(compare.command, [*flags, *more])
        return code, *capsys.readouterr()

    return call


def rows(tmp_path, role="run"):
    lines = (tmp_path / "work" / "results.jsonl").read_text().splitlines()
    return {(row["variant"], row["seed"]): row for row in map(json.loads, lines) if row["role"] == role}


def test_each_variant_takes_the_steps_that_its_flops_pay_for(run, tmp_path):
    budget = 1e8
    code, dry, err = run(f"--config.budget.train_flops={budget}", "--dry_run")
    assert code == cli.FINISHED and not (tmp_path / "work").exists(), err
    code, _, err = run(f"--config.budget.train_flops={budget}")
    assert code == cli.FINISHED, err
    found = rows(tmp_path)
    for row in found.values():
        # Recomputed: as many as fit, and not one more.
        assert row["last_step"] == row["num_steps"] == math.floor(budget / row["flops_per_step"])
        assert row["budget"] == {"train_flops": budget}
        assert budget - row["flops_per_step"] < row["train_flops"] <= budget
    assert found["wide", 0]["num_steps"] < found["full", 0]["num_steps"]
    # The whole run is stretched: warmup and intervals are the shares of it that they were.
    for variant in ("full", "window", "wide"):
        ran = json.loads((tmp_path / "work" / "runs" / f"{variant}-0" / "config.json").read_text())
        steps = found[variant, 0]["num_steps"]
        assert ran["optimizer"]["warmup_steps"] == round(0.1 * steps)
        shares = {"eval_every": 0.2, "checkpoint_every": 0.5, "log_every": 0.1}
        assert {key: ran["train"][key] for key in shares} == {key: round(x * steps) for key, x in shares.items()}
    total = sum(row["train_flops"] for row in found.values())
    assert f"{total / 1e6:.0f} MFLOP" in dry.splitlines()[-1]
    assert "at equal training FLOPs" in (tmp_path / "work" / "report.md").read_text()
    assert json.loads((tmp_path / "work" / "comparison.json").read_text())["budget"] == {"train_flops": budget}

    before = (tmp_path / "work" / "budget.json").read_text()
    assert run(f"--config.budget.train_flops={budget}", "--config.seeds=0,1")[0] == cli.FINISHED
    assert (tmp_path / "work" / "budget.json").read_text() == before
    code, _, err = run("--config.budget.train_flops=2e8")
    assert code == cli.WRONG_ARGUMENTS and "budget.train_flops: 100000000.0 there, 200000000.0 now" in err
    assert run()[0] == cli.WRONG_ARGUMENTS


def training_cost(experiment, sizes, batch):
    """Stands for what `inspect` counts."""
    return None, Cost(cheap(experiment.config, None), 0, 0, ()), TrainState((), {}, {}, (), ())


def cheap(config, data_dir):
    """FLOPs of a step that nobody counts."""
    return 1000.0 * config.model.mlp_dim


def test_time_of_a_step_is_measured_once_and_kept(run, tmp_path, monkeypatch):
    monkeypatch.setattr(settling, "count_step", cheap)
    monkeypatch.setattr(dry_run.inspect, "training_cost", training_cost)
    measured = []

    def measure(planned, data_dir):
        measured.append(planned.cost_key)
        return {"full": 0.5, "window": 0.25, "wide": 1.0}[planned.variant]

    monkeypatch.setattr(settling, "measure_step", measure)
    code, dry, err = run("--config.budget.seconds=30", "--dry_run")
    assert code == cli.FINISHED and "about 90 s of training steps" in dry and "FLOPs known when" in dry, err
    assert run("--config.budget.seconds=30")[0] == cli.FINISHED
    assert measured == ["full", "window", "wide"]
    assert {key[0]: row["num_steps"] for key, row in rows(tmp_path).items()} == {"full": 60, "window": 120, "wide": 30}
    for folder in (tmp_path / "work" / "runs").iterdir():
        (folder / "result.json").unlink()
    assert run("--config.budget.seconds=30", "--config.seeds=0,1")[0] == cli.FINISHED
    assert measured == ["full", "window", "wide"], "never measured again"
    assert all(
        row["num_steps"] == {"full": 60, "window": 120, "wide": 30}[key[0]] for key, row in rows(tmp_path).items()
    )


@pytest.mark.full
def test_tuned_values_that_a_step_costs_by_have_steps_of_their_own(run, tmp_path, monkeypatch):
    monkeypatch.setattr(settling, "count_step", cheap)
    tune = "--config.tune={'model.mlp_dim': (8, 128), 'optimizer.learning_rate': (1e-3, 1e-2)}"
    code, _, err = run("--config.budget.train_flops=1e7", tune, "--config.variants=full,window")
    assert code == cli.FINISHED, err
    known = results.budget_steps(tmp_path / "work")
    assert set(known) == {f"{name}, mlp_dim {size}" for name in ("full", "window") for size in (8, 128)}
    for folder in (tmp_path / "work" / "trials").iterdir():
        result = json.loads((folder / "result.json").read_text())
        assert result["last_step"] == math.floor(1e7 / result["flops_per_step"])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("budget.steps=0", "budget.steps: got 0, takes an integer above 0"),
        ("budget.steps=1.5", "budget.steps: got 1.5, takes an integer"),
        ("budget.seconds=-1", "budget.seconds: got -1.0, takes a number above 0"),
        ("budget.flops=1e9", "budget: got {'flops': 1000000000.0}, takes one of steps, train_flops, seconds"),
        ("budget={'steps': 5, 'seconds': 3}", "takes one of steps, train_flops, seconds"),
        ("train.num_epochs=1.0", "train.num_epochs: got 1.0, takes None where there is a budget"),
        ("optimizer.warmup_steps=100", "pays for 20 steps of full, all of them warmup (20 steps)"),
    ],
)
def test_a_budget_that_is_wrong_is_one_line(config, override, line):
    with pytest.raises(configs.ConfigError) as error:
        comparisons.load_comparison(str(config), [*(["budget.steps=20"] if "budget" not in override else []), override])
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_budget_below_one_step_is_one_line_and_may_be_corrected_until_something_has_run(run, tmp_path):
    code, _, err = run("--config.budget.train_flops=1000")
    assert code == cli.WRONG_ARGUMENTS and "takes what pays for a step at least: one of full costs" in err
    assert not (tmp_path / "work" / "runs").exists()
    code, _, err = run("--config.budget.train_flops=1e9")
    assert code == cli.FINISHED, err
    assert [row["budget"] for row in rows(tmp_path).values()] == [{"train_flops": 1e9}] * 3
    code, _, err = run("--config.budget.train_flops=2e9")
    assert code == cli.WRONG_ARGUMENTS and "budget.train_flops: 1000000000.0 there, 2000000000.0 now" in err


def test_equal_steps_stretch_the_run_and_leave_pretraining_alone(config, tmp_path):
    own = comparisons.load_comparison(str(config), ["budget.steps=300", "pretrain={'num_steps': 40}", "seeds=0"])
    for planned in compare.plan(comparisons.comparison_parts(own), tmp_path):
        assert (planned.config.train.num_steps, planned.config.train.eval_every) == (300, 60)
        assert planned.config.optimizer.warmup_steps == 30
        assert (planned.pretraining.train.num_steps, planned.pretraining.optimizer.warmup_steps) == (40, 10)
        assert planned.pretraining.train.eval_every == 20


def test_pretraining_takes_the_steps_that_its_own_flops_pay_for(config, tmp_path, monkeypatch):
    own = comparisons.load_comparison(
        str(config), ["pretrain={'train_flops': 6.4e5}", "tune={'optimizer.learning_rate': (1e-3, 2e-3)}"]
    )
    parts = comparisons.comparison_parts(own)
    monkeypatch.setattr(settling, "count_step", cheap)
    settling.settle([*compare.plan_trials(parts, tmp_path), *compare.plan(parts, tmp_path)], parts, tmp_path, None)
    planned = [*compare.plan_trials(parts, tmp_path), *compare.plan(parts, tmp_path)]
    assert {one.variant for one in planned} == {"full", "window", "wide"}
    for one in planned:
        steps = math.floor(6.4e5 / cheap(one.config, None))
        assert one.pretraining.train.num_steps == steps < one.config.train.num_steps == 100
        assert one.pretraining.optimizer.warmup_steps == round(0.1 * steps)
        assert one.pretraining.train.eval_every == round(0.2 * steps)
    assert len({one.pretraining.train.num_steps for one in planned}) == 2
    written = json.loads((tmp_path / "budget.json").read_text())
    assert written["pretrain"]["budget"] == {"train_flops": 6.4e5} and "steps" not in written


def test_steps_are_floored_never_rounded():
    assert budgets.affords({"train_flops": 9.99}, 1.0, "x") == 9
    assert budgets.affords({"seconds": 10.0}, 1.0, "x") == 10
    with pytest.raises(configs.ConfigError, match="a step of x costs 0"):
        budgets.affords({"train_flops": 9.99}, 0.0, "x")


@pytest.mark.full
def test_the_measured_step_time_is_a_time(config, tmp_path):
    (planned, *_) = compare.plan(comparisons.comparison_parts(comparisons.load_comparison(str(config))), tmp_path)
    planned_task = experiments.build(planned.config).task
    planned_task.prepare(str(tmp_path / "data"))
    assert 1e-5 < settling.measure_step(planned, str(tmp_path / "data")) < 5
