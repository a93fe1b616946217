"""What own documents need in practice: cuts, class weights, metrics by class, lengths, near-duplicates, epochs."""

import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xformer.attention import Full
from xformer.models import EncoderClassifier
from xformer.tasks import Classification, Documents, MultiLabel, load_preprocessing
from xformer.train import TrainConfig


def opened(tmp_path, rows, **options):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in rows))
    task = Documents(**{"path": str(path), "max_len": 8, **options})
    task.prepare(tmp_path / "data")
    return task, task.open(tmp_path / "data")


@pytest.mark.parametrize(
    ("cut", "max_len", "kept"), [("head", 8, "01234567"), ("tail", 8, "cdefghij"), ("head_tail", 7, "0123hij")]
)
def test_what_is_kept_of_longer_texts_in_training_and_in_predictions(tmp_path, cut, max_len, kept):
    rows = [(f"01234567{i % 10}abcdefghij", i % 2) for i in range(30)] + [("short", 0)]
    _, data = opened(tmp_path, rows, cut=cut, max_len=max_len)
    batch = next(data.batches("train", data.num_examples("train"), seed=0, shuffle=False, epochs=1))
    assert {data.vocabulary.decode(row) for row in batch["inputs"]} <= {kept, "short"}
    data.save(tmp_path / "run")
    preprocess = load_preprocessing(tmp_path / "run")
    assert preprocess.cut == cut and preprocess.fingerprint == data.preprocess.fingerprint
    (long, short), truncated = (found := preprocess.encode([rows[3][0], "short"]))[0]["inputs"], found[1]
    assert (data.vocabulary.decode(long), data.vocabulary.decode(short)) == (kept, "short")
    assert truncated.tolist() == [True, False]


def test_balanced_classes_have_the_same_say_in_the_loss_and_nowhere_else(tmp_path):
    rows = [(f"text {i}", "rare" if i % 10 == 0 else "common") for i in range(100)]
    task, data = opened(tmp_path, rows, class_weights="balanced")
    batch = next(data.batches("train", 100, seed=0, shuffle=False, epochs=1))
    shares = np.bincount(data.labels("train")) / data.num_examples("train")
    expected = np.where(batch["weights"] > 0, 1 / (2 * shares[batch["targets"]]), 0)
    np.testing.assert_allclose(batch["loss_weights"], expected, rtol=1e-6)
    outputs = jnp.stack([jnp.full(100, 2.0), jnp.zeros(100)], axis=1)  # always "common"
    metrics = task.metrics(outputs, batch)
    values, weights = metrics["loss"]
    log_sum = np.log(np.exp(2) + 1)
    assert float((values * weights).sum() / weights.sum()) == pytest.approx((2 * log_sum - 2) / 2, rel=1e-5)
    assert float(metrics["accuracy"][0] @ metrics["accuracy"][1]) / data.num_examples("train") == pytest.approx(0.9)
    assert "loss_weights" in task.example_batch(2) and task.example_batch(2)["loss_weights"].shape == (2,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_weights": "balanced", "kind": "labels"}, "class_weights must be 'none' for kind='labels'"),
        ({"class_weights": "all"}, "class_weights must be one of none, balanced"),
        ({"cut": "middle"}, "cut must be one of head, tail, head_tail"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Documents(path="a.csv", **options)


def test_details_of_classes():
    records = {"targets": np.array([0, 0, 0, 1, 1]), "predictions": np.array([0, 0, 1, 1, 0])}
    found = Classification().details(records, ["a", "b", "never"])
    assert found["confusion"] == [[2, 1, 0], [1, 1, 0], [0, 0, 0]]
    third = pytest.approx(2 / 3, abs=1e-6)
    assert found["classes"]["a"] == {"precision": third, "recall": third, "f1": third, "examples": 3}
    assert found["classes"]["never"] == {"precision": 0, "recall": 0, "f1": 0, "examples": 0}
    held = {"targets": np.array([[1, 0], [1, 1]], bool), "predictions": np.array([[1, 1], [0, 1]], bool)}
    assert MultiLabel().details(held, ["a", "b"])["classes"] == {
        "a": {"precision": 1, "recall": 0.5, "f1": third, "examples": 2},
        "b": {"precision": 0.5, "recall": 1, "f1": third, "examples": 1},
    }


def test_lengths_and_near_duplicates_are_said_before_training(tmp_path, caplog):
    rows = [("x" * (i + 1), i % 2) for i in range(40)]
    path = tmp_path / "test.jsonl"
    copies = [{"text": "XXX", "label": 0}, {"text": "  xxxxx\n", "label": 0}, {"text": "new", "label": 1}]
    path.write_text("\n".join(map(json.dumps, copies)))
    said = []
    with caplog.at_level(logging.WARNING):
        task, data = opened(tmp_path, rows, test_path=str(path), validation_share=0.01)
        task.prepare(tmp_path / "data", progress=said.append)
    assert data.info["near_duplicates"] == {"validation": 0, "test": 2}
    warning = f"{path}: 2 of 3 test texts are training texts too, but for case and white space"
    assert caplog.text.count(warning) == 1  # of data that is opened twice
    lengths = data.info["lengths"]["train"]
    assert list(lengths) == ["median", "90 %", "99 %", "longest"] and lengths["median"] < lengths["90 %"] <= 40
    assert f"lengths in tokens: median {lengths['median']}, 90 % {lengths['90 %']}, " in said[-1]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_text_read_in_chunks(pooling):
    """Each chunk is read by itself, and the gradient reaches every token of every chunk."""
    sizes = {"num_layers": 1, "width": 8, "num_heads": 2, "mlp_dim": 8, "pooling": pooling}
    model = EncoderClassifier(11, 3, 14, attention=Full(), chunk_len=4, rngs=nnx.Rngs(0), **sizes)
    assert EncoderClassifier.num_positions(14, pooling, 4) == 4 + (pooling == "cls")
    inputs = jnp.asarray(np.random.default_rng(0).integers(1, 11, (2, 14)))
    mask = jnp.arange(14) < jnp.asarray([14, 6])[:, None]
    call = nnx.jit(lambda model, inputs, mask: model(inputs, mask))
    logits = call(model, inputs, mask)
    assert logits.shape == (2, 3)
    np.testing.assert_array_equal(call(model, jnp.where(mask, inputs, 3), mask), logits)
    whole = EncoderClassifier(11, 3, 4, attention=Full(), rngs=nnx.Rngs(0), **sizes)  # the same parameters
    chunks, masks = (jnp.pad(x, ((0, 0), (0, 2))).reshape(8, 4) for x in (inputs, mask))
    shares = masks.sum(axis=1) if pooling == "mean" else masks.any(axis=1).astype(jnp.float32)
    each = nnx.jit(lambda model, inputs, mask: model(inputs, mask))(whole, chunks, masks).reshape(2, 4, 3)
    shares = shares.reshape(2, 4, 1) / shares.reshape(2, 4).sum(axis=1)[:, None, None]
    np.testing.assert_allclose(logits, (each * shares).sum(axis=1), atol=1e-5)  # the head is linear

    gradient = nnx.jit(nnx.grad(lambda model: (model(jnp.arange(1, 9)[None]) ** 2).sum()))(model)
    assert (np.abs(np.asarray(gradient.embed.table[...])[1:9]).max(axis=1) > 0).all()
    with pytest.raises(ValueError, match=r"length up to 14, got \(1, 15\)"):
        model(jnp.ones((1, 15), int))


def test_weights_of_tokens_are_those_of_the_whole_text_read_in_chunks():
    sizes = {"num_layers": 1, "width": 8, "num_heads": 2, "mlp_dim": 8, "pooling": "attention"}
    model = EncoderClassifier(11, 3, 8, attention=Full(), chunk_len=4, rngs=nnx.Rngs(0), **sizes)
    inputs, mask = jnp.arange(1, 9)[None], jnp.arange(8)[None] < 7
    encoded = model.encode(inputs.reshape(2, 4), mask.reshape(2, 4)).reshape(1, 8, 8)
    np.testing.assert_allclose(model(inputs, mask), model.classify(model.weighted_mean(encoded, mask)), atol=1e-6)


def test_steps_follow_the_data_where_epochs_are_given():
    config = TrainConfig(num_steps=1000, batch_size=32, num_epochs=2.5)
    assert config.steps_for(320).num_steps == 25
    assert config.steps_for(1).num_steps == 1 and config.steps_for(10**9).num_steps == 1000
    assert TrainConfig(num_steps=7, batch_size=32).steps_for(1).num_steps == 7
    for wrong in (0, -1, True, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="num_epochs must be a number above 0"):
            TrainConfig(num_steps=1, batch_size=1, num_epochs=wrong)
