"""Callbacks: when they are called, early stopping and averaged parameters, and that a restart changes nothing of it."""

import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_fake import arrays, compile_cache, make_trainer, rows  # noqa: F401

from xformer.train import CallbackFailed, EarlyStopping, ExponentialMovingAverage, Interrupted, callbacks, warm_start
from xformer.train.callbacks import Callback

pytestmark = pytest.mark.usefixtures("compile_cache")


def with_callbacks(workdir, *named, **settings):
    """A trainer of ten steps with callbacks."""
    return make_trainer(workdir, callbacks=tuple((type(one).__name__, one) for one in named), **settings)


class Diary(Callback):
    """Writes down every call, and how often it was called before."""

    def __init__(self):
        self.calls, self.count = [], 0

    def note(self, what, run):
        self.count += 1
        self.calls.append((what, run.step))

    def on_start(self, run):
        self.note("start", run)

    def on_step(self, run, metrics):
        assert {"loss", "accuracy", "learning_rate", "grad_norm"} <= set(metrics)
        self.note("step", run)

    def on_evaluation(self, run, metrics):
        assert {"loss", "accuracy"} <= set(metrics) and run.select_mode == "max" and run.is_main
        self.note("evaluation", run)

    def on_end(self, run, result):
        assert json.loads((run.workdir / "result.json").read_text())["last_step"] == result["last_step"] == run.step
        self.note("end", run)

    def state(self):
        return {"count": self.count}

    def load_state(self, state):
        self.count = state["count"]


def test_callbacks_are_called_in_order_and_remember_over_a_restart(tmp_path):
    once = Diary()
    with_callbacks(tmp_path / "once", once).fit()
    steps = [("step", n) for n in range(1, 11)]
    expected = [("start", 0), *steps[:4], ("evaluation", 4), *steps[4:8], ("evaluation", 8), *steps[8:]]
    assert once.calls == [*expected, ("evaluation", 10), ("end", 10)]
    first, second = Diary(), Diary()
    with pytest.raises(Interrupted):
        with_callbacks(tmp_path / "twice", first, stop_at_step=5).fit()
    with_callbacks(tmp_path / "twice", second).fit()
    assert first.calls + second.calls[1:] == once.calls and second.calls[0] == ("start", 5)
    assert second.count == once.count + 1  # one more start
    assert rows(tmp_path / "once") == rows(tmp_path / "twice")


def test_a_run_without_callbacks_is_the_run_with_a_silent_one(tmp_path):
    make_trainer(tmp_path / "without").fit()
    with_callbacks(tmp_path / "with", Callback()).fit()
    for one, other in zip(arrays(tmp_path / "without", 10), arrays(tmp_path / "with", 10), strict=True):
        np.testing.assert_array_equal(one, other)


class Script(EarlyStopping):
    """Early stopping that is told other values than those of the run."""

    def __init__(self, values, **arguments):
        super().__init__(**arguments)
        self.values = values

    def on_evaluation(self, run, metrics):
        return super().on_evaluation(run, {run.select_metric: self.values[run.step]})


def test_early_stopping_ends_a_run_as_finished_and_says_why(tmp_path):
    values = {2: 0.5, 4: 0.6, 6: 0.61, 8: 0.6, 10: 1.0}
    result = with_callbacks(tmp_path, Script(values, patience=2, min_delta=0.05), eval_every=2).fit()
    assert result["last_step"] == 8
    assert result["stopped_early"] == (
        "Script: validation accuracy has not risen by more than 0.05 in 2 evaluations; its best was 0.6000 at step 4"
    )
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert [row["step"] for row in rows(tmp_path, "validation")] == [2, 4, 6, 8]
    assert with_callbacks(tmp_path, Script(values, patience=2), eval_every=2).fit() == result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [3, 5, 7])
def test_early_stopping_counts_on_after_a_restart(tmp_path, stop):
    values = {2: 0.5, 4: 0.5, 6: 0.5, 8: 0.5, 10: 0.5}
    make = lambda workdir, **more: with_callbacks(workdir, Script(values, patience=3), eval_every=2, **more)
    once = make(tmp_path / "once").fit()
    with pytest.raises(Interrupted):
        make(tmp_path / "twice", stop_at_step=stop).fit()
    twice = make(tmp_path / "twice").fit()
    assert once["last_step"] == twice["last_step"] == 8 and once["stopped_early"] == twice["stopped_early"]
    assert rows(tmp_path / "once") == rows(tmp_path / "twice")


def test_a_run_killed_between_its_stop_and_its_result_trains_no_further(tmp_path):
    values = {2: 0.5, 4: 0.5, 6: 0.5, 8: 0.5, 10: 0.5}
    result = with_callbacks(tmp_path, Script(values, patience=1), eval_every=2).fit()
    (tmp_path / "result.json").unlink()
    again = with_callbacks(tmp_path, Script(values, patience=1), eval_every=2).fit()
    assert again["last_step"] == result["last_step"] == 4 and again["test"] == result["test"]


def test_a_metric_that_should_fall_stops_when_it_rises():
    run = callbacks.Run("name", None, 0, 10, "loss", "min", True)
    stopping = EarlyStopping(patience=2)
    assert [stopping.on_evaluation(run, {"loss": x}) for x in (math.nan, 1.0, 0.5, 0.7, 0.4, 0.4)] == [None] * 6
    assert "loss has not fallen by more than 0 in 2 evaluations; its best was 0.4000" in stopping.on_evaluation(
        run, {"loss": 0.41}
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 2, "mesh": {"data": 2}},
        {"mesh": {"fsdp": 2}},
        {"parallel": "pmap", "mesh": {"data": 2}},
    ],
    ids=["one device", "accumulated", "fsdp", "pmap"],
)
def test_the_average_is_the_weighted_mean_of_the_steps_and_exact_over_a_restart(tmp_path, settings):
    decay = 0.7
    settings = {"checkpoint_every": 1, "select_metric": "loss"} | settings
    make = lambda name, **more: with_callbacks(tmp_path / name, ExponentialMovingAverage(decay), **settings, **more)
    seen = []

    class Keep(Callback):
        def init_arrays(self, params):
            return jax.tree.map(lambda x: jnp.zeros((11, *x.shape), x.dtype), params)

        def update_arrays(self, kept, params, step):
            return jax.tree.map(lambda all, one: all.at[step].set(one), kept, params)

        def evaluation_params(self, kept, params):
            return params

    keep = Keep()
    trainer = make_trainer(
        tmp_path / "kept", callbacks=(("ema", ExponentialMovingAverage(decay)), ("keep", keep)), **settings
    )
    trainer.fit()
    stored = warm_start.read(tmp_path / "kept" / "checkpoints" / "10", "optimizer")
    history = {path.partition("/1/")[2]: x for path, x in stored.items() if path.startswith("callbacks/1/")}
    model = warm_start.read(tmp_path / "kept" / "checkpoints" / "10", "model")
    weights = decay ** np.arange(9, -1, -1.0)
    assert history
    for path, x in history.items():
        mean = np.tensordot(weights / weights.sum(), np.asarray(x, np.float64)[1:], 1)
        np.testing.assert_allclose(model[f"params/{path}"], mean, rtol=2e-5, atol=1e-6, err_msg=path)
        np.testing.assert_array_equal(stored[f"params/{path}"], x[10])  # training goes on with its own
        seen.append(np.abs(mean - x[10]).max())
    assert max(seen) > 1e-3  # the average is another set of parameters

    make("once").fit()
    with pytest.raises(Interrupted):
        make("twice", stop_at_step=5).fit()
    make("twice").fit()
    assert rows(tmp_path / "once") == rows(tmp_path / "twice")
    for one, other in zip(arrays(tmp_path / "once", 10), arrays(tmp_path / "twice", 10), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_average_is_what_is_evaluated_and_loaded(tmp_path):
    plain = make_trainer(tmp_path / "plain").fit()
    trainer = with_callbacks(tmp_path / "mean", ExponentialMovingAverage(0.9))
    averaged = trainer.fit()
    losses = [[row["loss"] for row in rows(tmp_path / name, "validation")] for name in ("plain", "mean")]
    assert losses[0] != losses[1] and rows(tmp_path / "plain", "train") == rows(tmp_path / "mean", "train")
    assert averaged["num_params"] == plain["num_params"]
    again = trainer.evaluate("test")
    assert {name: averaged["test"][name] for name in again} == again


class Breaks(Callback):
    def __init__(self, method):
        self.method = method
        setattr(self, method, self.broken)

    def broken(self, *args):
        raise KeyError("no such\nthing")


@pytest.mark.parametrize(
    "method", ["on_start", "on_step", "on_evaluation", "on_end", "state", "init_arrays", "update_arrays"]
)
def test_a_callback_that_raises_is_one_line_that_names_it(tmp_path, method):
    message = rf"^callback 'Breaks': {method} raised KeyError: 'no such\\nthing' \(test_train_callbacks.py, line \d+\)"
    named = [ExponentialMovingAverage(), Breaks(method)]
    with pytest.raises(CallbackFailed, match=message):
        with_callbacks(tmp_path, *named).fit()


class Remembers(Callback):
    """Has a state that JSON can't hold."""

    def state(self):
        return {"value": np.float32(1.5)}


def test_a_state_that_can_not_be_saved_is_said_before_training(tmp_path):
    with pytest.raises(CallbackFailed, match="callback 'Remembers': state gives what JSON can't hold"):
        with_callbacks(tmp_path, Remembers()).fit()
    assert rows(tmp_path) == []


class Parameters(Callback):
    """Gives the parameters themselves as its arrays."""

    def init_arrays(self, params):
        return params


def test_arrays_may_be_the_parameters(tmp_path):
    assert with_callbacks(tmp_path, Parameters(), num_steps=2).fit()["last_step"] == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping(patience=0), "EarlyStopping.patience must be an integer of at least 1, got 0"),
        (lambda: EarlyStopping(min_delta=-1.0), "EarlyStopping.min_delta must be at least 0, got -1.0"),
        (lambda: ExponentialMovingAverage(1.0), "ExponentialMovingAverage.decay must be above 0 and below 1, got 1.0"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_share_of_a_decay_close_to_one_does_not_cancel():
    params = {"x": jnp.ones(())}
    mean = {"x": jnp.zeros(())}
    after = ExponentialMovingAverage(0.999999).update_arrays(mean, params, jnp.int32(1))
    np.testing.assert_allclose(after["x"], 1, rtol=1e-6)


def test_callbacks_in_a_config(tmp_path, monkeypatch):
    from test_lookup import settings

    from xformer import config
    from xformer.schema import ConfigError, Text

    (tmp_path / "scratch_callbacks.py").write_text(
        "from xformer.train import Callback\n"
        "class Own(Callback):\n"
        "    def __init__(self, every: int = 2):\n"
        "        if every == 3:\n"
        "            raise TypeError('three')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        train = settings()["train"]
        build = lambda listed: config.build(settings(train=train | {"callbacks": listed}))
        built = build(("ema", {"name": "early_stopping", "patience": 3}, {"name": "scratch_callbacks:Own"}))
        assert built.config.train.callbacks == (
            {"name": "ema", "decay": 0.999},
            {"name": "early_stopping", "patience": 3, "min_delta": 0.0},
            {"name": "scratch_callbacks:Own", "every": 2},
        )
        assert config.build(json.loads(json.dumps(built.config.to_dict()))).config == built.config
        assert build(Text("('ema',)")).config.train.callbacks[0]["name"] == "ema"
        for listed, message in (
            (("emma",), r"^train.callbacks\[0\].name: got 'emma', takes one of 'early_stopping', 'ema'"),
            (("ema", {"name": "ema", "decay": 2}), r"^train.callbacks\[1\].decay: Expo.* below 1, got 2.0$"),
            (({"name": "ema", "dekay": 2},), r"^train.callbacks\[0\].dekay: got 2, but .* 'ema' reads no such key"),
            (
                ({"name": "scratch_callbacks:Own", "every": 3},),
                r"^train.callbacks\[0\].name: .* raised TypeError: three",
            ),
            (({"name": "xformer.attention:Full"},), r"^train.callbacks\[0\].name: .* derives from xformer.train.callb"),
        ):
            with pytest.raises(ConfigError, match=message):
                build(listed)
    finally:
        sys.modules.pop("scratch_callbacks", None)
