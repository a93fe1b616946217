"""Metrics of any shape are exact over devices, micro-batches, processes' shards and restarts; examples are kept."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from train_fake import SIZES, FakeData, FakeTask, compile_cache, make_trainer  # noqa: F401

from xformer.train import Interrupted, sums
from xformer.train.example_values import FILE
from xformer.train.step import count
from xformer.train.sums import Totals

pytestmark = pytest.mark.usefixtures("compile_cache")


@dataclasses.dataclass(frozen=True)
class CountingTask(FakeTask):
    """FakeTask with a sum of shape [2, 2]: how often each class is guessed for each class."""

    better = {"recall": "max", "accuracy": "max", "loss": "min"}  # noqa: RUF012

    def metrics(self, outputs, batch):
        guess = jnp.argmax(outputs, axis=1)
        confusion = jnp.zeros((2, 2)).at[batch["targets"], guess].add(batch["weights"])
        return super().metrics(outputs, batch) | {"confusion": confusion}

    def finish(self, sums):
        confusion = sums["confusion"]
        assert confusion.dtype == np.float64 and confusion.shape == (2, 2)
        own = {name: pair for name, pair in sums.items() if name != "confusion"}
        recall = np.diag(confusion) / np.maximum(confusion.sum(axis=1), 1)
        return super().finish(own) | {"recall": float(recall.mean())}


def expected(workdir):
    """What the test metrics must be, from the kept examples."""
    with np.load(workdir / FILE) as kept:
        targets, predictions = kept["targets"], kept["predictions"]
        recall = np.mean([np.mean(predictions[targets == one] == one) for one in (0, 1)])
        means = {name: np.average(kept[name][0], weights=kept[name][1]) for name in ("loss", "accuracy")}
    return means | {"recall": recall}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eval_batch_size": 1},
        {"eval_batch_size": 3, "accumulate": 4},
        {"mesh": {"data": 4}},
        {"mesh": {"data": 2, "sequence": 2}, "accumulate": 2},
        {"mesh": {"data": 4}, "parallel": "pmap", "eval_batch_size": 4},
    ],
    ids=str,
)
def test_the_result_follows_from_the_kept_examples(tmp_path, settings):
    settings = {"num_steps": 4, "eval_every": 4, "checkpoint_every": 4} | settings
    result = make_trainer(tmp_path, task=CountingTask(), dropout_rate=0.0, **settings).fit()
    assert result["select_metric"] == "recall" and result["baseline"]["name"] == "answers 0"
    with np.load(tmp_path / FILE) as kept:
        assert set(kept) == {"loss", "accuracy", "targets", "predictions", "length"}
        assert kept["loss"].shape == (2, SIZES["test"]) and kept["loss"].dtype == np.float32
        assert kept["targets"].tolist() == FakeData().arrays("test")[1].tolist()  # in the order of the examples
        assert (kept["accuracy"][0] == (kept["targets"] == kept["predictions"])).all()
        assert (kept["accuracy"][1] == 1).all()
    for name, value in expected(tmp_path).items():
        assert result["test"][name] == pytest.approx(value, rel=1e-6)
    assert not list(tmp_path.glob("*.tmp"))


def test_sums_go_on_after_an_interruption(tmp_path):
    """The train row of steps 1 to 6 is the same whether or not the run was stopped after step 4."""
    settings = {"num_steps": 6, "log_every": 6, "eval_every": 6, "checkpoint_every": 6}
    make_trainer(tmp_path / "whole", task=CountingTask(), **settings).fit()
    with pytest.raises(Interrupted):
        make_trainer(tmp_path / "cut", task=CountingTask(), stop_at_step=4, **settings).fit()
    make_trainer(tmp_path / "cut", task=CountingTask(), **settings).fit()
    read = lambda name: [
        {key: value for key, value in json.loads(line).items() if key != "seconds"}
        for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    ]
    assert read("cut") == read("whole") and "recall" in read("whole")[0]


def test_totals_pass_through_json():
    report = {"sums": {"loss": (1.0, 2.0), "f1": np.array([[1, 2], [3, 4]])}, "counts": {"examples": 2}}
    one = Totals()
    one.add(report)
    again = Totals(json.loads(json.dumps(one.sums)), json.loads(json.dumps(one.counts)))
    again.add(report)
    assert again.counts == {"examples": 4} and again.loss == 0.5
    finish = lambda sums: {"loss": sums["loss"][0], "f1": sums["f1"].sum()}
    assert again.means(finish) == {"loss": 2.0, "f1": 20.0}
    assert Totals({"loss": [3.0, 4.0]}).loss == 0.75  # as an older version saved it


def test_values_without_weight_add_nothing_and_keep_the_gradient_finite():
    values, weights = jnp.array([1.0, jnp.nan, 3.0]), jnp.array([1.0, 0.0, 2.0])
    reduced = sums.reduce({"loss": (values, weights), "n": jnp.arange(3)})
    assert reduced["loss"] == (7.0, 3.0) and reduced["n"].tolist() == [0, 1, 2]
    by_example = sums.by_example({"loss": (values[None], weights[None]), "n": jnp.arange(3)})
    np.testing.assert_allclose(by_example["loss"], [[7 / 3, 3]], rtol=1e-6)
    assert set(by_example) == {"loss"}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            {"accuracy": (jnp.ones(2), jnp.ones(2))},
            "metrics must hold the pair 'loss' of values and weights, got accur",
        ),
        ({"loss": jnp.ones(2)}, "metrics must hold the pair 'loss'"),
        (
            {"loss": (jnp.ones(()), jnp.ones(()))},
            r"metric 'loss' must be values and weights \[batch, ...\] of one shape",
        ),
        ({"loss": (jnp.ones(2), jnp.ones((2, 3)))}, r"got \(2,\) and \(2, 3\)"),
    ],
)
def test_wrong_metrics_are_refused(metrics, message):
    with pytest.raises(ValueError, match=message):
        sums.reduce(metrics)


def test_all_masks_are_counted():
    class Pairs:
        def inputs(self, batch):
            return {"inputs": batch["a"], "mask": batch["a"] > 0, "inputs2": batch["b"], "mask2": batch["b"] > 0}

    batch = {"a": jnp.array([[1, 0], [1, 1]]), "b": jnp.array([[1, 1, 1], [1, 0, 0]]), "weights": jnp.array([1.0, 0.0])}
    assert {name: int(number) for name, number in count(Pairs(), batch).items()} == {"examples": 1, "tokens": 4}


def test_tokens_of_images_are_the_patches_that_a_model_reads_or_the_pixels():
    class Images:
        def inputs(self, batch):
            return {"images": batch["images"]}

    class Patches:
        tokens_per_example = 4

    batch = {"images": jnp.zeros((3, 6, 6, 3)), "weights": jnp.array([1.0, 1.0, 0.0])}
    assert [int(count(Images(), batch, model)["tokens"]) for model in (Patches(), None)] == [2 * 4, 2 * 36]
