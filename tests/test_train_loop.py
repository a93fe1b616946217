"""A run from start to result: rows, counts, best and last, divergence."""

import dataclasses
import io
import json
import math
from typing import ClassVar

import jax
import numpy as np
import pytest
from flax import nnx
from train_fake import SIZES, FakeData, FakeTask, TinyModel, compile_cache, make_trainer, rows  # noqa: F401

from xformer.train import Diverged, Interrupted, WorkdirMismatch, restore_model
from xformer.train.engine import Engine
from xformer.train.progress import Progress

pytestmark = pytest.mark.usefixtures("compile_cache")
KEYS = {
    "name", "attention", "seed", "num_params", "flops_per_step", "train_flops", "step_time_ms",
    "step_time_p10_ms", "step_time_p90_ms", "peak_memory_bytes",
    "eval", "test", "best_step", "versions", "device", "info", "batch_size", "tokens_per_step", "input_wait_share",
}  # fmt: skip


def tokens(split, data=None):
    return int((data or FakeData()).arrays(split)[0].astype(bool).sum())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compile_cache):  # noqa: F811
    """(trainer, result) of an undisturbed run."""
    trainer = make_trainer(tmp_path_factory.mktemp("finished"))
    return trainer, trainer.fit()


def test_result(finished):
    trainer, result = finished
    assert result.keys() >= KEYS
    assert json.loads((trainer.workdir / "result.json").read_text()) == result
    assert result["num_params"] == 266 and result["seed"] == 3 and result["info"] == trainer.data.info
    assert result["train_flops"] == 10 * result["flops_per_step"] > 0 and result["flops_uncounted"] == []
    assert 0 < result["step_time_p10_ms"] <= result["step_time_ms"] <= result["step_time_p90_ms"]
    assert result["step_time_ms"] > 0 and result["peak_memory_bytes"] > 266 * 3 * 4
    assert 0 <= result["input_wait_share"] <= 1
    assert result["tokens_per_step"] == tokens("train") / SIZES["train"] * 8  # ten steps of eight are two epochs
    assert json.loads((trainer.workdir / "config.json").read_text())["train"]["num_steps"] == 10


def test_flops_are_those_of_the_matrix_products(finished):
    # Forward 2 per multiply-add; backward twice that. Tokens through two square layers, pooled rows through the last.
    assert finished[1]["flops_per_step"] == 3 * 2 * (8 * 6 * (2 * 8 * 8) + 8 * 8 * 2)


def test_two_steps_are_always_under_way(tmp_path, monkeypatch):
    """Reports are fetched two steps later, so that a device never waits for the process; at log points too."""
    dispatched, fetched, step, get = [], [], Engine.step, jax.device_get

    def fetch(tree):
        if isinstance(tree, dict) and "health" in tree:  # of a training step
            fetched.append(len(dispatched))
        return get(tree)

    monkeypatch.setattr(Engine, "step", lambda *given: dispatched.append(1) or step(*given))
    monkeypatch.setattr(jax, "device_get", fetch)
    make_trainer(tmp_path, num_steps=9, log_every=2, eval_every=9, checkpoint_every=9).fit()
    assert fetched == [3, 4, 5, 6, 7, 8, 9, 9, 9]


def test_nothing_else_is_waited_for_between_evaluations(tmp_path, monkeypatch):
    """No value of an array is read on the host while steps are under way, at log points neither, but of reports."""
    array, (reading, read) = type(jax.numpy.ones(())), ([], [])
    value, get, step, evaluate = array._value, jax.device_get, Engine.step, Engine.evaluate

    def fetch(tree):
        reading.append("report" if isinstance(tree, dict) and "health" in tree else "other")
        try:
            return get(tree)
        finally:
            reading.pop()

    def log(name, run):
        def logged(*args, **kwargs):
            read.append(name)
            return run(*args, **kwargs)

        return logged

    monkeypatch.setattr(jax, "device_get", fetch)
    monkeypatch.setattr(array, "_value", property(lambda x: (read.append([*reading]), value.fget(x))[1]))
    monkeypatch.setattr(array, "block_until_ready", log("waited", array.block_until_ready))
    monkeypatch.setattr(Engine, "step", log("step", step))
    monkeypatch.setattr(Engine, "evaluate", log("evaluate", evaluate))
    make_trainer(tmp_path, num_steps=9, log_every=2, eval_every=9, checkpoint_every=9).fit()
    trained = read[read.index("step") : len(read) - read[::-1].index("step")]
    assert trained.count("step") == 9 and ["report"] in trained
    assert [x for x in trained if x not in ("step", ["report"])] == []


def test_rows(finished):
    trainer, result = finished
    train, validation = rows(trainer.workdir, "train"), rows(trainer.workdir, "validation")
    assert [row["step"] for row in train] == [2, 4, 6, 8, 10]
    assert [row["step"] for row in validation] == [4, 8, 10]
    for row in train:
        assert row["examples"] == 8 * row["step"] and row["train_flops"] == row["step"] * result["flops_per_step"]
        assert min(row[name] for name in ("grad_norm", "update_norm", "param_norm", "loss")) > 0
        assert row["learning_rate"] == pytest.approx(float(trainer.schedule(row["step"] - 1)), rel=1e-6)
    assert train[-1]["tokens"] == 2 * tokens("train")
    for row in validation:
        assert (row["examples"], row["tokens"]) == (SIZES["validation"], tokens("validation"))
    assert list(trainer.workdir.glob("events.out.tfevents.*"))


def test_a_finished_run_is_not_run_again(finished):
    trainer, result = finished
    broken = dataclasses.replace(trainer, model_fn=None)
    assert broken.fit() == result


def test_best_and_last_are_kept_and_the_result_says_which(finished):
    trainer, result = finished
    validation = {row["step"]: row for row in rows(trainer.workdir, "validation")}
    best = max(validation, key=lambda step: (validation[step]["accuracy"], -step))
    kept = {path.name for path in (trainer.workdir / "checkpoints").iterdir()}
    assert result["best_step"] == best and result["last_step"] == 10
    assert kept == {"9", "10", str(best)}
    assert result["eval"] == {k: validation[best][k] for k in ("loss", "accuracy", "examples", "tokens")}
    assert trainer.evaluate("validation", "best") == result["eval"]
    assert trainer.evaluate("test") == result["test"]
    last = {k: validation[10][k] for k in ("loss", "accuracy", "examples", "tokens")}
    assert trainer.evaluate("validation", "last") == last != result["eval"]


def test_select_by_least_loss(tmp_path):
    result = make_trainer(tmp_path, select_metric="loss", eval_every=1).fit()
    losses = [row["loss"] for row in rows(tmp_path, "validation")]
    assert result["best_step"] == 1 + int(np.argmin(losses)) and result["eval"]["loss"] == min(losses)


def test_a_falling_loss_keeps_the_last(tmp_path):
    """The issue's own run: validation losses that fall from evaluation to evaluation."""

    class TrainingData(FakeData):
        """Every split is the training split."""

        def arrays(self, split):
            return super().arrays("train")

    data = TrainingData(sizes=dict.fromkeys(SIZES, 40))
    settings = {"select_metric": "loss", "eval_every": 5, "num_steps": 20}
    result = make_trainer(tmp_path, data=data, dropout_rate=0.0, **settings).fit()
    losses = [row["loss"] for row in rows(tmp_path, "validation")]
    assert losses == sorted(losses, reverse=True) and len(losses) == 4
    assert result["best_step"] == 20 and result["eval"]["loss"] == losses[-1]
    assert result["select_metric"] == "loss" and result["better"] == {"accuracy": "max", "loss": "min"}


def test_a_direction_against_the_metric_s_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match="select_mode must be 'min' for loss, or None, got 'max'"):
        make_trainer(tmp_path, select_metric="loss", select_mode="max").fit()


def test_a_batch_far_larger_than_the_split_is_refused(tmp_path):
    message = "batch_size must be at most 4 times the 40 training examples, got 3,000,000"
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, batch_size=3_000_000).fit()
    assert not list(tmp_path.iterdir())


def test_restored_model_predicts_what_was_evaluated(finished):
    trainer, result = finished
    model = TinyModel(nnx.Rngs(99), 0.2, np.float32)
    assert restore_model(trainer.workdir, model) == result["best_step"]
    inputs, targets = trainer.data.arrays("test")
    accuracy = np.mean(np.argmax(model(inputs, inputs > 0), axis=1) == targets)
    assert accuracy == pytest.approx(result["test"]["accuracy"])
    with pytest.raises(ValueError, match="which must be 'best' or 'last', got 'first'"):
        restore_model(trainer.workdir, model, "first")


@pytest.mark.parametrize(("batch", "devices"), [(4, 2), (3, 1), (16, 8), (10, 4)])
def test_every_example_is_evaluated_once(finished, batch, devices):
    trainer, result = finished
    train = dataclasses.replace(trainer.train, eval_batch_size=batch, mesh={"data": devices})
    metrics = dataclasses.replace(trainer, train=train).evaluate("validation")
    assert (metrics["examples"], metrics["tokens"]) == (SIZES["validation"], tokens("validation"))
    assert metrics["accuracy"] == result["eval"]["accuracy"]
    assert metrics["loss"] == pytest.approx(result["eval"]["loss"], rel=1e-6)


def test_an_empty_split_is_an_error(finished):
    data = FakeData(sizes=SIZES | {"test": 0})
    engine = finished[0].engine
    state = engine.init()
    with pytest.raises(ValueError, match="the split 'test' has no examples"):
        engine.evaluate((state.params, state.rest), data, "test")


def test_nan_stops_the_run_and_names_step_checkpoint_and_layer(tmp_path):
    order = np.random.default_rng([3, 0]).permutation(SIZES["train"])  # as FakeBatches shuffles the first epoch
    poisoned = PoisonedData(order[4 * 8 + 3])  # an example of step 5
    with pytest.raises(Diverged) as caught:
        make_trainer(tmp_path, data=poisoned, task=FakeTask(poison=10), log_every=1).fit()
    message = str(caught.value)
    assert caught.value.step == 5 and "loss is inf at step 5" in message and "\n" not in message
    assert f"last good checkpoint: step 4 ({tmp_path / 'checkpoints' / '4'})" in message
    assert message.endswith("first seen in the loss: the model's outputs are finite")
    assert [row["step"] for row in rows(tmp_path, "train")] == [1, 2, 3, 4]
    assert not (tmp_path / "checkpoints" / "5").exists() and not (tmp_path / "result.json").exists()


class PoisonedData(FakeData):
    """Token 10 is in one training example only."""

    def __init__(self, example):
        super().__init__()
        object.__setattr__(self, "example", example)

    def arrays(self, split):
        inputs, targets = super().arrays(split)
        inputs = np.where(inputs == 10, 8, inputs)
        if split == "train":
            inputs[self.example, 0] = 10
        return inputs, targets


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_layer_where_a_nan_starts_is_named(tmp_path, accumulate):
    class Exploding(TinyModel):
        def __init__(self, rngs):
            super().__init__(rngs, 0.0, np.float32)
            self.layers[1].kernel[...] = self.layers[1].kernel[...] * 1e30
            self.layers[0].kernel[...] = self.layers[0].kernel[...] * 1e30

    trainer = make_trainer(tmp_path, accumulate=accumulate)
    with pytest.raises(Diverged, match=r"at step 1; .*: none; first seen in the output of layers/1 \(Linear\)"):
        dataclasses.replace(trainer, model_fn=Exploding).fit()
    assert Exploding.__call__ is TinyModel.__call__ and nnx.Linear.__call__.__name__ == "__call__"


class SometimesUnknown(FakeTask):
    """Has a metric that is no number."""

    better: ClassVar[dict[str, str]] = FakeTask.better | {"recall": "max"}

    def finish(self, sums):
        return super().finish(sums) | {"recall": math.nan}


def test_an_undefined_metric_is_null_and_a_warning(tmp_path, caplog):
    trainer = make_trainer(tmp_path, task=SometimesUnknown(), num_steps=4, log_every=1)
    result = trainer.fit()
    assert result["test"]["recall"] is result["eval"]["recall"] is None and math.isfinite(result["test"]["loss"])
    assert all(row["recall"] is None for row in rows(tmp_path))
    assert "train at step 1: recall is not finite, written as null" in caplog.text
    with pytest.raises(Diverged, match="validation recall is nan at step 4"):
        make_trainer(tmp_path / "b", task=SometimesUnknown(), num_steps=4, select_metric="recall").fit()


def test_a_longer_run_with_a_constant_schedule_goes_on(tmp_path):
    make_trainer(tmp_path / "a", schedule="constant", num_steps=6).fit()
    longer = make_trainer(tmp_path / "a", schedule="constant", num_steps=10).fit()
    once = make_trainer(tmp_path / "b", schedule="constant", num_steps=10).fit()
    assert longer["test"] == once["test"] and longer["train_flops"] == once["train_flops"]
    with pytest.raises(WorkdirMismatch, match=r"train\.num_steps: 10 there, 6 now"):
        make_trainer(tmp_path / "a", schedule="constant", num_steps=6).fit()


def test_accumulation_equals_one_batch(tmp_path):
    settings = {"dropout_rate": 0.0, "log_every": 1}
    make_trainer(tmp_path / "1", **settings).fit()
    make_trainer(tmp_path / "4", accumulate=4, **settings).fit()
    for one, four in zip(rows(tmp_path / "1"), rows(tmp_path / "4"), strict=True):
        assert one.keys() == four.keys() and one["split"] == four["split"]
        for name, value in one.items():
            assert (
                four[name] == value if isinstance(value, str | int) else math.isclose(four[name], value, rel_tol=2e-5)
            )


def test_bfloat16_compute_keeps_float32_parameters(tmp_path):
    trainer = make_trainer(tmp_path, dtype=jax.numpy.bfloat16, num_steps=2)
    result = trainer.fit()
    params = jax.tree.leaves(trainer.engine.abstract.params)
    assert math.isfinite(result["test"]["loss"]) and {leaf.dtype.name for leaf in params} == {"float32"}


def test_a_misspelt_metric_is_named(tmp_path):
    with pytest.raises(ValueError, match="select_metric must be one of accuracy, loss, got 'acuracy'"):
        make_trainer(tmp_path, select_metric="acuracy").fit()


def test_stop_at_step_is_an_interruption(tmp_path):
    with pytest.raises(Interrupted, match="stop_at_step is 5: stopped after step 5 of 10, saved; the same") as caught:
        make_trainer(tmp_path, stop_at_step=5).fit()
    assert caught.value.step == 5
    with pytest.raises(Interrupted, match="stopped after step 5 of 10"):
        make_trainer(tmp_path, stop_at_step=5).fit()
    assert [row["step"] for row in rows(tmp_path, "train")] == [2, 4]
    assert make_trainer(tmp_path, stop_at_step=10).fit()["last_step"] == 10


def test_another_batch_shape_is_reported(tmp_path, caplog):
    engine = make_trainer(tmp_path).engine
    batch = next(engine.train_batches(FakeData(), seed=0))
    state, _ = engine.step(engine.init(), batch)
    state, _ = engine.step(state, batch)
    assert "compiled again" not in caplog.text
    engine.step(state, {name: array[:4] for name, array in batch.items()})
    assert "the training step is compiled again" in caplog.text and "inputs int32[4, 6]" in caplog.text


class WatchingData(FakeData):
    """Counts the arrays alive on the devices whenever a validation begins: no step is under way then."""

    def batches(self, split, *args, **kwargs):
        if split == "validation":
            self.info["alive"].append(len(jax.live_arrays()))
        return super().batches(split, *args, **kwargs)


def test_device_memory_does_not_grow_with_steps(tmp_path):
    data = WatchingData(info={"alive": []})
    make_trainer(tmp_path, data=data, num_steps=60, log_every=7, eval_every=20, checkpoint_every=20).fit()
    alive = data.info["alive"]
    assert len(alive) == 3
    assert alive[2] < alive[0] + 10, alive  # a leak of one array a step would add 40


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_on_a_terminal_and_lines_in_a_log():
    log, terminal = io.StringIO(), Terminal()
    for stream in (log, terminal):
        progress = Progress("run", 4000, stream)
        for step in range(1, 5):
            progress.step(step, 0.5, 0.25, tokens=1000.0, flops=10**9, log=step % 2 == 0)
        progress.close()
    expected = "run: step 4/4000, loss 0.5000, 250.0 ms/step, 4 ktokens/s, 4 GFLOP/s, 0:16:39 left"
    assert log.getvalue().splitlines()[-1] == expected and len(log.getvalue().splitlines()) == 2
    assert terminal.getvalue().count("\n") == 1 and 2 <= terminal.getvalue().count("\r") <= 4
    assert terminal.getvalue().strip().endswith(expected)


def test_an_engine_takes_the_steps_of_one_like_it_and_of_no_other(tmp_path, finished):
    first = finished[0].engine
    like = dataclasses.replace(make_trainer(tmp_path / "a", seed=4), like=first)
    assert like.engine.steps is first.steps
    result, alone = like.fit(), make_trainer(tmp_path / "b", seed=4).fit()
    assert (result["test"], result["eval"], result["flops_per_step"]) == (
        alone["test"], alone["eval"], alone["flops_per_step"]
    )  # fmt: skip
    other = dataclasses.replace(make_trainer(tmp_path / "c", dropout_rate=0.1), like=first)
    assert other.engine.steps is not first.steps
    shorter = dataclasses.replace(make_trainer(tmp_path / "d", num_steps=9), like=first)
    assert shorter.engine.steps is not first.steps, "schedules end at num_steps"
