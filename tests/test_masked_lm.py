"""Masked language modelling: what is hidden and how it is drawn, the model's head, the baseline, training and after."""

import hashlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xformer
from xformer import experiment as experiments
from xformer.attention import Full
from xformer.models import MODELS, MaskedLanguageModel
from xformer.tasks import Documents, MaskedLM, Needle, Retrieval, vocab
from xformer.train import Interrupted, warm_start

TEXTS = [f"Straße {i} – größer als {'x' * (i % 30)}" for i in range(60)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """(task, opened data) of texts of 20 to 50 characters, not all of one byte, cut at 48 bytes."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [json.dumps({"text": text, "label": index % 2}) for index, text in enumerate(TEXTS)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    task = MaskedLM(Documents(path=str(folder / "texts.jsonl"), max_len=48))
    task.prepare(folder / "data")
    return task, task.open(folder / "data")


@pytest.fixture(scope="module")
def symbols(tmp_path_factory):
    """(task, opened data) of 400 texts of 64 symbols."""
    folder = tmp_path_factory.mktemp("symbols")
    task = MaskedLM(Needle(max_len=64, num_train=400, num_validation=8, num_test=8))
    task.prepare(folder)
    return task, task.open(folder)


def batches(data, count, split="train", size=20, seed=0, **more):
    more = {"shuffle": False, "epochs": None, **more}
    found = data.batches(split, size, seed=seed, **more)
    return [next(found) for _ in range(count)]


def whole(batch):
    """The texts, hidden tokens put back."""
    restored, (rows, columns) = batch["inputs"].copy(), np.nonzero(batch["targets"] >= 0)
    restored[rows, batch["places"][rows, columns]] = batch["targets"][rows, columns]
    return restored


# What is hidden.


def test_padding_is_never_hidden_and_every_text_has_its_share(texts):
    task, data = texts
    examples, (batch,) = data.examples("train"), batches(data, 1, size=30)
    for row in range(30):
        text = np.asarray(examples[row][:48])
        np.testing.assert_array_equal(whole(batch)[row, : len(text)], text)
        assert not batch["inputs"][row, len(text) :].any()
        hidden = batch["targets"][row] >= 0
        assert hidden.sum() == max(round(0.15 * len(text)), 1) and hidden[: hidden.sum()].all()
        places = batch["places"][row, hidden]
        assert len(set(places.tolist())) == len(places) and places.max() < len(text)
    assert batch["places"].shape == (30, task.num_places) == (30, round(0.15 * 48))


def test_four_fifths_are_masked_a_tenth_random_at_places_that_are_all_alike(symbols):
    _, data = symbols
    found = batches(data, 100)  # five epochs
    inputs, places, targets = (
        np.concatenate([batch[key] for batch in found]) for key in ("inputs", "places", "targets")
    )
    assert (targets > 0).all() and targets.shape == (2000, 10)
    seen = np.take_along_axis(inputs, places, axis=1)
    tokens, mask_id = data.vocabulary.size, data.vocabulary.size
    assert data.sizes["vocab_size"] == tokens + 1 and inputs.max() == mask_id
    near = lambda count, share, of: abs(count - share * of) < 5 * math.sqrt(of * share * (1 - share))
    assert near((seen == mask_id).sum(), 0.8, seen.size)
    kept = 0.1 + 0.1 / (tokens - 1)  # a random token may be the one that stood there
    assert near((seen == targets).sum(), kept, seen.size)
    others = seen[(seen != mask_id) & (seen != targets)]
    counts = np.bincount(others, minlength=tokens)
    assert counts[0] == 0 and all(near(count, 1 / (tokens - 1), others.size) for count in counts[1:])
    assert all(near(count, 10 / 64, 2000) for count in np.bincount(places.reshape(-1), minlength=64))
    # Nothing else of the texts is changed.
    rest = np.ones_like(inputs, bool)
    np.put_along_axis(rest, places, False, axis=1)
    restored = np.concatenate([whole(batch) for batch in found])
    np.testing.assert_array_equal(inputs[rest], restored[rest])


def test_draws_depend_on_seed_epoch_and_example_alone(symbols):
    _, data = symbols
    first, again, other = (batches(data, 1, seed=seed)[0] for seed in (3, 3, 4))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    np.testing.assert_array_equal(whole(first), whole(other))
    assert (first["places"] != other["places"]).any(axis=1).all()
    second_epoch = batches(data, 21, seed=3)[20]
    np.testing.assert_array_equal(whole(first), whole(second_epoch))
    assert (first["places"] != second_epoch["places"]).any(axis=1).all()
    # The same for every number of processes, and in whatever order the examples come.
    shards = [batches(data, 3, size=10, seed=3, shuffle=True, shard_index=index, shard_count=2) for index in (0, 1)]
    for number, batch in enumerate(batches(data, 3, seed=3, shuffle=True)):
        for name in batch:
            np.testing.assert_array_equal(batch[name], np.concatenate([shard[number][name] for shard in shards]))
    plain = {row.tobytes(): places for batch in batches(data, 20, seed=3) for row, places in zip(
        whole(batch), batch["places"], strict=True)}  # fmt: skip
    for batch in batches(data, 20, seed=3, shuffle=True):
        for row, places in zip(whole(batch), batch["places"], strict=True):
            np.testing.assert_array_equal(plain[row.tobytes()], places)


def test_validation_and_test_are_hidden_the_same_for_every_seed(symbols):
    _, data = symbols
    for split in ("validation", "test"):
        one, other = (batches(data, 1, split, size=8, seed=seed)[0] for seed in (0, 5))
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    train, validation = (batches(data, 1, split, size=8)[0]["places"] for split in ("train", "validation"))
    assert (train != validation).any(axis=1).all()


def test_draws_are_those_of_every_other_process(symbols):
    """A digest made in another process, on another day."""
    (batch,) = batches(symbols[1], 1, seed=7)
    total = hashlib.sha256()
    for name in ("places", "inputs", "targets"):
        total.update(np.ascontiguousarray(batch[name], "<i4").tobytes())
    assert total.hexdigest()[:16] == "a1c5cdf8d1fa2edc"


def test_an_iterator_goes_on_exactly(symbols):
    _, data = symbols
    iterator = data.batches("train", 30, seed=1, shuffle=True, epochs=None)
    for _ in range(14):  # across the end of an epoch
        next(iterator)
    state, expected = iterator.get_state(), next(iterator)
    resumed = data.batches("train", 30, seed=1, shuffle=True, epochs=None)
    resumed.set_state(state)
    found = next(resumed)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_pairs_of_texts_are_so_many_texts(tmp_path):
    rows = [json.dumps({"text": f"a {i}", "text2": f"second {i}", "label": i % 2}) for i in range(30)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    source = Retrieval(path=str(tmp_path / "pairs.jsonl"), max_len=16)
    task = MaskedLM(source)
    task.prepare(tmp_path / "data")
    data, pairs = task.open(tmp_path / "data"), source.open(tmp_path / "data")
    assert data.num_examples("train") == 2 * pairs.num_examples("train")
    (batch,) = batches(data, 1, size=data.num_examples("train"))
    read = [data.vocabulary.decode(row) for row in whole(batch)]
    half = len(read) // 2
    assert [text.split()[1] for text in read[:half]] == [text.split()[1] for text in read[half:]]
    assert {text.split()[0] for text in read[half:]} == {"second"}


@pytest.mark.parametrize("source", [None, {"name": "imdb"}, MaskedLM(Needle())])
def test_a_source_is_a_task_with_texts_of_its_own(source):
    with pytest.raises(ValueError, match="masked_lm: source must be a task with texts of its own, got"):
        MaskedLM(source)


# Metrics.


def test_characters_are_counted_where_they_begin():
    text = "naïve – 中文 😀"
    subword = vocab.Subword.train([text, "hello hello world"], 280)
    for vocabulary in (vocab.Bytes(), subword):
        assert vocabulary.characters.shape == (vocabulary.size,) and vocabulary.characters[0] == 0
        assert vocabulary.characters[vocabulary.encode(text)].sum() == len(text)
    assert vocab.Symbols(("a", "bc")).characters.tolist() == [0, 1, 1]


def test_bits_per_character_scales_by_tokens_and_characters(texts):
    task, data = texts
    count = data.num_examples("test")
    (batch,) = batches(data, 1, "test", size=count + 2, epochs=1)  # with fillers
    outputs = jnp.zeros((*batch["targets"].shape, data.num_classes))
    sums = {
        name: (float((entry[0] * entry[1]).sum()), float(entry[1].sum())) if isinstance(entry, tuple) else entry
        for name, entry in task.metrics(outputs, batch).items()
    }
    found = task.finish(sums)
    read = [bytes(row[row > 0] - 1).decode("utf-8", errors="ignore") for row in whole(batch)[:count].astype(np.uint8)]
    num_tokens, num_characters = (whole(batch) > 0).sum(), sum(map(len, read))
    assert num_characters < num_tokens  # some take two bytes
    assert found["loss"] == pytest.approx(math.log(257), rel=1e-6) and found["perplexity"] == pytest.approx(
        257, rel=1e-5
    )
    assert found["bits_per_character"] == pytest.approx(math.log2(257) * num_tokens / num_characters, rel=1e-2)
    assert next(iter(task.better)) == "bits_per_character"


def test_the_baseline_is_the_cross_entropy_of_the_tokens_shares(texts):
    task, data = texts
    counts = np.ones(257)
    for index in range(data.num_examples("train")):
        for token in np.asarray(data.examples("train")[index]).tolist():
            counts[token] += 1
    (batch,) = batches(data, 1, "test", size=data.num_examples("test"), epochs=1)
    told = batch["targets"][batch["targets"] >= 0]
    scores = task.baseline(data)["scores"]["test"]
    assert scores["loss"] == pytest.approx(-np.log(counts / counts.sum())[told].mean(), abs=1e-5)
    assert scores["accuracy"] == pytest.approx((told == counts.argmax()).mean(), abs=1e-6)


def test_only_hidden_places_have_a_gradient(texts):
    task, data = texts
    (batch,) = batches(data, 1, size=8)
    outputs = jnp.asarray(np.random.default_rng(0).normal(size=(*batch["targets"].shape, 257)), jnp.float32)

    def total(outputs):
        values, weights = task.metrics(outputs, batch)["loss"]
        return (values * weights).sum()

    moved = jnp.abs(jax.grad(total)(outputs)).max(axis=-1) > 0
    assert (batch["targets"] < 0).any()
    np.testing.assert_array_equal(moved, batch["targets"] >= 0)


# The model.


def make(pooling="mean", cls=MaskedLanguageModel, sizes=(12, 16)):
    return cls(
        *sizes, pooling=pooling, attention=Full(), num_layers=2, width=8, num_heads=2, mlp_dim=12,
        position_embedding="learned", rngs=nnx.Rngs(0),
    )  # fmt: skip


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_logits_are_those_of_the_head_of_bert(pooling):
    model = make(pooling)
    random = np.random.default_rng(0)
    inputs = random.integers(1, 12, (2, 9))
    inputs[:, 2] = model.mask_id
    places = np.array([[2, 5, 0], [1, 2, 8]])
    mask = np.ones((2, 9), bool)
    encoded = np.asarray(model.encode(inputs, mask), np.float64)[:, 1 if pooling == "cls" else 0 :]
    x = np.take_along_axis(encoded, places[..., None], axis=1)
    x = x @ model.transform.kernel[...] + model.transform.bias[...]
    x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    x = x * model.transform_norm.scale[...] + model.transform_norm.bias[...]
    logits = model(inputs, mask, places=places)
    np.testing.assert_allclose(logits, x @ model.embed.table[...].T + model.bias[...], rtol=1e-4, atol=1e-5)
    assert logits.shape == (2, 3, 11) and logits.dtype == jnp.float32
    everywhere = model(inputs, mask)
    np.testing.assert_allclose(logits, np.take_along_axis(everywhere, places[..., None], axis=1), atol=1e-6)
    # The mask has a vector of its own, and no row of the table.
    moved = model.embed_tokens(jnp.asarray(inputs))
    np.testing.assert_allclose(moved[:, 2], np.tile(model.mask_vector[...] * math.sqrt(8), (2, 1)), rtol=1e-6)
    np.testing.assert_allclose(moved[:, 3], model.embed.table[...][inputs[:, 3]] * math.sqrt(8), rtol=1e-6)


@pytest.mark.parametrize("name", ["classifier", "two_tower"])
def test_the_encoder_has_the_paths_and_shapes_of_other_models(name):
    def shapes(model):
        return {"/".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}

    own = shapes(nnx.eval_shape(lambda: make("cls")))
    other = shapes(nnx.eval_shape(lambda: make("cls", MODELS[name], (11, 3, 16))))
    head = {path for path in other if path.startswith(("classify/", "head/"))}
    assert {path: other[path] for path in other.keys() - head}.items() <= own.items()
    assert {path.partition("/")[0] for path in own.keys() - other.keys()} == {
        "mask_vector", "transform", "transform_norm", "bias",
    }  # fmt: skip


# Training.

SMALL = {
    "name": "tiny",
    "attention": {"name": "full"},
    "model": {"name": "masked_lm", "num_layers": 1, "width": 8, "num_heads": 2, "mlp_dim": 8, "dropout_rate": 0.1},
    "optimizer": {"name": "adamw", "learning_rate": 0.01},
    "train": {"num_steps": 6, "batch_size": 8, "eval_every": 3, "checkpoint_every": 3, "mesh": {"data": 1}},
}


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """(workdir, data folder, config, engine) of a run of six steps on the texts."""
    folder = tmp_path_factory.mktemp("run")
    source = {"name": "documents", "path": texts[0].source.path, "max_len": 48}
    config = SMALL | {"task": {"name": "masked_lm", "source": source}}
    trainer = experiments.build(config).trainer(folder / "whole", folder / "data")
    trainer.fit()
    return folder / "whole", folder / "data", config, trainer.engine


def stored(workdir, step):
    return warm_start.read(workdir / "checkpoints" / str(step), "model")


@pytest.mark.full
def test_a_stopped_run_goes_on_exactly(trained, tmp_path):
    workdir, data_dir, config, engine = trained
    stop = config | {"train": config["train"] | {"stop_at_step": 3}}
    with pytest.raises(Interrupted):
        experiments.build(stop).trainer(tmp_path, data_dir).fit()
    result = experiments.build(config).trainer(tmp_path, data_dir, like=engine).fit()
    jax.tree.map(np.testing.assert_array_equal, stored(tmp_path, 6), stored(workdir, 6))
    assert result["test"] == json.loads((workdir / "result.json").read_text())["test"]
    assert result["select_metric"] == "bits_per_character" and result["baseline"]["scores"]["test"]["perplexity"] > 1


def test_a_classifier_starts_from_its_encoder_bit_for_bit(trained, tmp_path):
    workdir, data_dir, config, _ = trained
    best = json.loads((workdir / "result.json").read_text())["best_step"]
    model = config["model"] | {"name": "classifier"}
    train = config["train"] | {"num_steps": 1, "init_from": str(workdir)}
    task = config["task"]["source"]
    trainer = experiments.build(config | {"model": model, "train": train, "task": task}).trainer(tmp_path, data_dir)
    state, line = trainer._start_from(str(workdir), trainer.engine, trainer.engine.init())
    theirs = stored(workdir, best)
    mine = {f"params/{warm_start.path_name(p)}": x for p, x in jax.tree_util.tree_leaves_with_path(state.params)}
    fresh = mine.keys() - theirs.keys()
    assert fresh == {"params/classify/kernel", "params/classify/bias"} and "classify/kernel" in line
    for name in mine.keys() - fresh:
        np.testing.assert_array_equal(mine[name], theirs[name])
    assert "mask_vector" in line and "differs" not in line


def test_a_loaded_model_names_hidden_tokens_and_predicts_nothing(trained):
    run = xformer.load(trained[0])
    inputs = run.preprocess(["Straße 1"])
    inputs["inputs"][0, 2] = run.model.mask_id
    assert run.model(**inputs, places=np.array([[2]])).shape == (1, 1, 257)
    with pytest.raises(ValueError, match="a masked language model has no prediction for a text"):
        run.predict(["Straße 1"])
