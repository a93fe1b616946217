"""Scaling laws: synthetic losses of known exponents, curves of equal compute, and the command on a folder of runs."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from xformer import comparison, experiment
from xformer.commands import scaling as command
from xformer.scaling import Law, Observation, bootstrap, fit, iso_flop, read
from xformer.scaling.study import study
from xformer.schema import ConfigError
from xformer.train.step import num_params

CONFIGS = Path(__file__).parent.parent / "configs"

TRUE = Law(floor=0.9, a=20.0, alpha=0.35, b=60.0, beta=0.3)
BUDGETS, SIZES = (1e11, 1e12, 1e13), tuple(np.geomspace(1e4, 1e6, 7))


def section(name, position="none", **keys):
    return json.dumps({"name": name, "position": {"name": position}, **keys}, sort_keys=True)


FULL = section("full")


def runs(noise=0.0, seed=0, attention=FULL, sizes=SIZES, budgets=BUDGETS, law=TRUE):
    """A run for each size and budget, of 6 FLOPs for each parameter and token."""
    generator = np.random.default_rng(seed)
    found = []
    for budget in budgets:
        for params in sizes:
            tokens = budget / (6 * params)
            loss = law.loss(params, tokens) * math.exp(noise * generator.normal())
            found.append(Observation(attention, params, tokens, budget, loss, budget))
    return found


def test_losses_of_a_law_give_it_back():
    found = fit(runs())
    for field in dataclasses.fields(Law):
        assert getattr(found, field.name) == pytest.approx(getattr(TRUE, field.name), rel=0.02)


def test_a_diverged_run_hardly_moves_it():
    observations = runs()
    observations[3] = observations[3]._replace(loss=4 * observations[3].loss)
    assert fit(observations).alpha == pytest.approx(TRUE.alpha, rel=0.05)


@pytest.mark.full
def test_intervals_hold_the_true_exponents_about_as_often_as_they_say():
    inside, trials = {"alpha": 0, "params_exponent": 0}, 12
    for seed in range(trials):
        observations = runs(noise=0.005, seed=seed)
        law = fit(observations)
        found = study("full", observations, samples=200)
        assert found.law == law
        for name in inside:
            low, high = found.interval(name)
            inside[name] += low <= getattr(TRUE, name) <= high
    assert min(inside.values()) >= 9  # of 12 intervals of 95 % fewer hold with a probability of 0.2 %


def test_the_bootstrap_holds_the_true_exponents_and_foretells_a_larger_run():
    observations = runs(noise=0.003, seed=1)
    larger = runs(noise=0.0, sizes=(2e6,), budgets=(1e14,))
    found = study("full", observations, larger, samples=60)
    for name in ("alpha", "beta", "params_exponent", "tokens_exponent", "floor"):
        low, high = found.interval(name)
        assert low <= getattr(TRUE, name) <= high and high - low > 0
    value, low, high = found.foretold(larger[0])
    assert low <= value <= high and abs(value / larger[0].loss - 1) < 0.05
    assert found.flops_per_product == pytest.approx(6)
    assert len(bootstrap(observations, found.law, samples=3)) == 3


def test_the_best_model_for_its_compute_has_the_least_loss():
    params, tokens = TRUE.best(1e13, 6.0)
    assert params * tokens * 6 == pytest.approx(1e13)
    others = np.geomspace(params / 10, params * 10, 201)
    assert TRUE.loss(params, tokens) <= TRUE.loss(others, 1e13 / (6 * others)).min() + 1e-12
    more, _ = TRUE.best(1e14, 6.0)
    assert math.log10(more / params) == pytest.approx(TRUE.params_exponent)


def test_curves_of_equal_compute_find_their_lowest_point():
    sizes = np.geomspace(1e3, 1e5, 5)
    runs_of = [Observation("full", n, 1.0, 1.0, 2.0 + 0.1 * math.log(n / 7e3) ** 2, 1e12) for n in sizes]
    curve = iso_flop.parabola(runs_of)
    assert curve.params == pytest.approx(7e3) and curve.loss == pytest.approx(2.0) and curve.inside
    np.testing.assert_allclose(curve.at(sizes), [o.loss for o in runs_of])
    assert not iso_flop.parabola(
        [o for o in runs_of if o.params > 7e3] + [runs_of[-1]._replace(params=2e5, loss=3.2)]
    ).inside
    falling = [o._replace(loss=3 - math.log(o.params) / 10) for o in runs_of]
    assert not iso_flop.parabola(falling).inside
    assert iso_flop.parabola(runs_of[:3]) is None


def test_the_exponent_of_the_curves_is_that_of_the_law():
    curves = {
        budget: iso_flop.parabola(some)
        for budget, some in iso_flop.by_budget(runs(sizes=np.geomspace(1e3, 1e7, 60))).items()
    }
    assert iso_flop.optimum_exponent(curves) == pytest.approx(TRUE.params_exponent, abs=0.05)
    assert math.isnan(iso_flop.optimum_exponent({1e11: None}))


@pytest.mark.parametrize("some", [runs()[:5], runs(sizes=SIZES[:2]), runs()[:6] * 2])
def test_too_few_runs_are_refused(some):
    if some == runs()[:6] * 2:
        some = [o._replace(tokens=1e6) for o in some]
    with pytest.raises(ValueError, match="a law needs at least 6 runs, of 3 sizes and 3 numbers of tokens, got"):
        fit(some)


@pytest.mark.full
def test_the_shipped_comparison_spans_two_decades_of_parameters_at_equal_compute():
    loaded = comparison.load_comparison(f"{CONFIGS}/scaling.py:1e11")
    assert loaded.budget.to_dict() == {"train_flops": 1e11}
    params = {}
    for _, _, run in comparison.comparison_runs(loaded):
        built = experiment.build(run)
        model = nnx.eval_shape(lambda built=built: built.model_fn(**built.task.sizes())(nnx.Rngs(0)))
        params.setdefault(run.attention.name, []).append(num_params(nnx.state(model, nnx.Param)))
    assert set(params) == {"full", "window"} and params["full"] == params["window"]
    assert len(params["full"]) == 6 and max(params["full"]) >= 100 * min(params["full"])


def write_comparison(folder, observations):
    """The files of a comparison whose runs have these sizes, costs and losses."""
    variants = {f"variant_{index}": {} for index in range(len(observations))}
    folder.mkdir(parents=True)
    config = {"name": "sizes", "base": {"attention": {"name": "full"}}, "variants": variants, "seeds": [0]}
    (folder / "config.json").write_text(json.dumps(config | {"budget": {"train_flops": observations[0].budget}}))
    for name, o in zip(variants, observations, strict=True):
        run = folder / "runs" / f"{name}-0"
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({"attention": json.loads(o.attention)}))
        result = {
            "name": name,
            "attention": json.loads(o.attention)["name"],
            "num_params": o.params,
            "tokens_per_step": o.tokens / 10,
        }
        result |= {"last_step": 10, "train_flops": o.flops, "test": {"loss": o.loss}, "select_metric": "loss"}
        (run / "result.json").write_text(json.dumps(result))


@pytest.fixture
def folder(tmp_path):
    for budget in BUDGETS:
        both = [o for name in ("full", "window") for o in runs(0.002, attention=section(name), budgets=(budget,))]
        write_comparison(tmp_path / "runs" / f"{budget:g}", both)
    write_comparison(tmp_path / "larger", runs(sizes=(2e6,), budgets=(1e14,)))
    return tmp_path


def test_the_command_fits_each_attention_and_holds_a_larger_run_against_its_law(folder, capsys):
    assert len(read(folder / "runs")) == 2 * len(BUDGETS) * len(SIZES)
    command.command([f"--workdir={folder / 'runs'}", f"--held_out={folder / 'larger'}", "--samples=20"])
    shown = capsys.readouterr().out
    found = json.loads((folder / "runs/scaling.json").read_text())
    assert set(found) == {"full", "window"} and found["full"]["runs"] == 21
    for study_of in found.values():
        assert study_of["alpha"]["value"] == pytest.approx(TRUE.alpha, rel=0.2)
        assert len(study_of["curves"]) == 3
    (held,) = found["full"]["held_out"]
    assert held["measured"] == pytest.approx(float(TRUE.loss(2e6, 1e14 / 12e6))) and not found["window"]["held_out"]
    assert abs(held["foretold"] / held["measured"] - 1) < 0.05
    assert "full: 21 runs" in shown and "held out, 2.00 M parameters" in shown and "not told from 0" not in shown
    assert (folder / "runs/scaling.png").read_bytes().startswith(b"\x89PNG")


def test_a_floor_that_is_not_told_from_0_is_said_to_be_so():
    found = runs(0.02, law=dataclasses.replace(TRUE, floor=0.0))
    assert ", not told from 0\n" in command.text(study("full", found, (), samples=20))


def test_wrong_folders_and_runs_are_one_line(folder, tmp_path):
    write_comparison(tmp_path / "few", runs(budgets=(1e11,))[:4])
    write_comparison(tmp_path / "other", runs(attention=section("linear"), budgets=(1e14,)))
    (tmp_path / "empty").mkdir()
    for flags, message in (
        ([f"--workdir={tmp_path / 'empty'}"], "--workdir: .*empty holds no comparison: neither it nor a folder in it"),
        ([f"--workdir={tmp_path / 'few'}"], "--workdir: full: a law needs at least 6 runs"),
        ([f"--workdir={folder / 'runs'}", f"--held_out={tmp_path / 'other'}"], "--held_out: got runs of linear, takes"),
        (
            [f"--workdir={folder / 'runs'}", f"--held_out={folder / 'runs' / '1e+11'}"],
            "--held_out: got .*, of whose runs 14 are in --workdir too; takes runs that the laws are not fitted to",
        ),
        ([f"--workdir={folder / 'runs'}", "--samples=0"], "--samples: got 0, takes an integer from 1"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            command.command(flags)
        assert "\n" not in str(error.value)


def test_a_run_that_diverged_is_left_out(folder, caplog):
    path = next((folder / "runs").glob("*/runs/*/result.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"test": {"loss": None}}))
    assert len(read(folder / "runs")) == 2 * len(BUDGETS) * len(SIZES) - 1
    assert "left out, as its loss, size or cost is not a positive number" in caplog.text


def test_what_is_not_finished_or_damaged_is_named(folder, caplog):
    damaged, gone, diverged = sorted((folder / "runs").glob("*/runs/*/result.json"))[:3]
    damaged.write_text("{")
    gone.unlink()
    diverged.write_text(json.dumps(json.loads(diverged.read_text()) | {"num_params": "many"}))
    config = folder / "runs/1e+12/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"budget": {"train_flops": None}}))
    found = read(folder / "runs")
    assert len(found) == 2 * len(BUDGETS) * len(SIZES) - 3 and sum(math.isnan(o.budget) for o in found) == 14
    assert f"{damaged.parent}: left out, as the run is damaged" in caplog.text
    assert f"{gone.parent}: left out, as the run is not started" in caplog.text
    assert f"{diverged.parent}: left out, as its loss, size or cost" in caplog.text


def test_runs_of_other_data_are_not_fitted_without_a_word(folder, caplog):
    paths = sorted((folder / "runs").glob("*/runs/*/result.json"))
    for path, digest in zip(paths, "abbb", strict=False):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"info": {"digest": digest * 64}}))
    read(folder / "runs")
    assert "runs holds runs of different data (3 of bbbbbbbb and 1 of aaaaaaaa)" in caplog.text


def test_runs_beside_comparisons_are_no_comparisons(folder):
    alone = folder / "runs" / "alone"
    alone.mkdir()
    (alone / "config.json").write_text(json.dumps({"name": "alone", "attention": {"name": "full"}, "train": {}}))
    assert len(read(folder / "runs")) == 2 * len(BUDGETS) * len(SIZES)
    with pytest.raises(ValueError, match="holds no comparison: a single run"):
        read(alone)


def test_what_differs_in_positions_or_a_hyperparameter_is_not_mixed(tmp_path, capsys):
    four = [section("full"), section("full", "shaw"), section("window", left=32), section("window", left=8)]
    laws = [dataclasses.replace(TRUE, floor=floor) for floor in (0.9, 1.1, 1.3, 1.5)]
    write_comparison(
        tmp_path / "runs", [o for one, law in zip(four, laws, strict=True) for o in runs(attention=one, law=law)]
    )
    command.command([f"--workdir={tmp_path / 'runs'}", "--samples=1"])
    found = json.loads((tmp_path / "runs/scaling.json").read_text())
    assert {name: round(own["law"]["floor"], 1) for name, own in found.items()} == {
        "full": 0.9,
        "full+shaw": 1.1,
        "window (left=32)": 1.3,
        "window (left=8)": 1.5,
    }
    assert all(own["runs"] == 21 for own in found.values())
