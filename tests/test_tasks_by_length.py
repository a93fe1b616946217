"""Texts of like length in a batch: every example as often as ever, exact state, the same metrics, counted FLOPs."""

import collections
import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import xformer
from xformer import config as configs
from xformer.commands import budgets, cli, dry_run, inspect, run
from xformer.config import ConfigError
from xformer.experiment import check_cuts
from xformer.tasks import TaskData, pipeline, store, vocab
from xformer.tasks.ragged import Ragged
from xformer.train.engine import Engine
from xformer.train.example_values import Kept

MAX_LEN, BUCKETS = 32, 3
PADDED = (8, 16, 32)
COUNT = 150


def make_data() -> TaskData:
    """Example i begins with i // 50 + 1 and i % 50 + 1; lengths from 2 to 40."""
    random = np.random.default_rng(0)
    texts = [[i // 50 + 1, i % 50 + 1] + [7] * random.integers(0, 39) for i in range(COUNT)]
    examples = Ragged.from_lists(texts, [i % 3 for i in range(COUNT)], np.uint8)
    corpus = store.Corpus({"train": examples, "test": examples}, vocab.Bytes(), ["a", "b", "c"], {"source": "made"})
    return TaskData(corpus, MAX_LEN)


def who(batch) -> list[int]:
    real = batch["weights"] > 0
    return ((batch["inputs"][real, 0] - 1) * 50 + batch["inputs"][real, 1] - 1).tolist()


def batches(data, split="train", size=4, *, shuffle=True, epochs=None, seed=0, **options):
    return data.batches(split, size, seed=seed, shuffle=shuffle, epochs=epochs, length_buckets=BUCKETS, **options)


@pytest.mark.parametrize(
    ("max_len", "buckets", "expected"),
    [(32, 1, (32,)), (32, 3, PADDED), (33, 3, (9, 17, 33)), (5, 16, (1, 2, 3, 5))],
)  # fmt: skip
def test_lengths_are_halves(max_len, buckets, expected):
    assert pipeline.bucket_lengths(max_len, buckets) == expected


def test_batches_are_as_long_as_their_texts_need():
    data = make_data()
    lengths = np.minimum(data.examples("train").lengths, MAX_LEN)
    group = list(itertools.islice(batches(data), pipeline.SORTED))
    for batch in group:
        longest = lengths[who(batch)].max()
        assert batch["inputs"].shape == (4, min(length for length in PADDED if length >= longest))
        assert set(batch) == {"inputs", "targets", "weights"} and batch["weights"].all()
        assert (batch["targets"] == np.asarray(who(batch)) % 3).all()
        np.testing.assert_array_equal((batch["inputs"] > 0).sum(axis=1), lengths[who(batch)])
    # Sorted: no two batches of a group overlap in length, but where they touch; and in no order of it.
    spans = sorted((lengths[who(batch)].min(), lengths[who(batch)].max()) for batch in group)
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(spans))
    assert [lengths[who(batch)].max() for batch in group] != sorted(lengths[who(batch)].max() for batch in group)
    tokens = sum(batch["inputs"].size for batch in group)
    assert tokens < 0.8 * len(group) * 4 * MAX_LEN


def test_every_example_is_seen_equally_often_in_another_order_each_time():
    """Three groups of 32 batches of 4 are two epochs and 84 examples of a third."""
    seen = [who(batch) for batch in itertools.islice(batches(make_data()), 96)]
    times = collections.Counter(itertools.chain(*seen))
    assert sorted(times) == list(range(COUNT)) and collections.Counter(times.values()) == {2: COUNT - 84, 3: 84}
    first = collections.Counter(itertools.chain(*seen[:32]))
    assert set(first.values()) == {1} and len({tuple(batch) for batch in seen}) > 90
    assert [who(batch) for batch in itertools.islice(batches(make_data(), seed=1), 96)] != seen


@pytest.mark.parametrize("size", [4, 7, 200])
def test_evaluation_sees_every_example_once_and_says_which(size):
    data, seen = make_data(), []
    for batch in batches(data, "test", size, shuffle=False, epochs=1):
        real = batch["weights"] > 0
        assert batch["example_index"][real].tolist() == who(batch) and (batch["example_index"][~real] == -1).all()
        seen += who(batch)
    assert sorted(seen) == list(range(COUNT)) != seen


@pytest.mark.parametrize("shuffle", [True, False])
def test_shards_together_are_the_global_batches_and_equally_long(shuffle):
    options = {"shuffle": shuffle, "epochs": None if shuffle else 1}
    whole = list(itertools.islice(batches(make_data(), size=12, **options), 20))
    parts = [
        list(itertools.islice(batches(make_data(), size=4, **options, shard_index=s, shard_count=3), 20))
        for s in range(3)
    ]
    assert len({len(part) for part in [whole, *parts]}) == 1
    for batch, *shards in zip(whole, *parts, strict=True):
        for key in batch:
            np.testing.assert_array_equal(batch[key], np.concatenate([shard[key] for shard in shards]))


def test_state_resumes_within_a_group():
    first = batches(make_data())
    for _ in range(37):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    expected = [who(batch) for batch in itertools.islice(first, 40)]
    again = batches(make_data())
    again.set_state(state)
    assert [who(batch) for batch in itertools.islice(again, 40)] == expected


@pytest.fixture
def documents(tmp_path):
    """The config file of a small run on documents of very different lengths."""
    random = np.random.default_rng(0)
    rows = [{"text": " ".join(random.choice(["red", "blue", "old", "new"], random.integers(1, 14))), "label": i % 2}
            for i in range(60)]  # fmt: skip
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "name": "short",
        "attention": {"name": "full"},
        "model": {"num_layers": 1, "width": 8, "num_heads": 2, "mlp_dim": 8, "dropout_rate": 0.1},
        "task": {"name": "documents", "path": str(tmp_path / "texts.jsonl"), "max_len": 64},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "train": {"num_steps": 9, "batch_size": 4, "eval_every": 3, "checkpoint_every": 3, "log_every": 1,
                  "mesh": {"data": 1}, "length_buckets": 3},
    }  # fmt: skip
    (tmp_path / "config.py").write_text(f"def get_config():\n    return {config!r}\n")
    return tmp_path / "config.py"


def rows_of(workdir):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def go(documents, name, *more):
    flags = [f"--config={documents}", f"--workdir={documents.parent / name}", f"--data_dir={documents.parent / 'data'}"]
    return cli.exit_code(run.command, [*flags, *more])


def test_a_run_counts_what_its_batches_cost(documents, tmp_path, caplog):
    data_dir, two = str(tmp_path / "data"), "train.length_buckets=2"  # each length takes compiling
    assert go(documents, "whole", f"--config.{two}") == cli.FINISHED
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    experiment = configs.load_experiment(str(documents), [two])
    data = experiment.task.open(data_dir)
    sizes = experiment.task.sizes(data.preprocess)
    feed = data.batches("train", 4, seed=experiment.seed, shuffle=True, epochs=None, length_buckets=2)
    shapes = [{name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()} for batch in
              itertools.islice(feed, 9)]  # fmt: skip
    costs = {batch["inputs"].shape: inspect.training_cost(experiment, sizes, batch)[1].flops for batch in shapes}
    assert len(costs) > 1
    counted = [costs[batch["inputs"].shape] for batch in shapes]
    assert result["train_flops"] == sum(counted) and result["flops_per_step"] == round(sum(counted) / 9)
    assert (
        result["step_time_ms"] == pytest.approx(1e3 * result["train_seconds"] / 9) and "step_time_p90_ms" not in result
    )
    rows = [row for row in rows_of(tmp_path / "whole") if row["split"] == "train"]
    assert [row["train_flops"] for row in rows] == list(itertools.accumulate(counted))
    assert not any("compiled again" in record.message for record in caplog.records)

    loaded = xformer.load(tmp_path / "whole")
    texts = ["red", "blue " * 12, "old new", "new " * 5, "red red", "old " * 7, "blue"]
    found = loaded.predict(texts, batch_size=2).probabilities
    one_length = ConfigDict({**loaded.config, "train": {**loaded.config.train, "length_buckets": 1}})
    whole = dataclasses.replace(loaded, config=one_length).predict(texts).probabilities
    np.testing.assert_allclose(found, whole, rtol=1e-5)  # full attention sees no padding
    assert len(np.unique(np.round(whole[:, 0], 7))) > 4  # so it would show if they were in another order


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on_exactly(documents, tmp_path):
    assert go(documents, "whole") == cli.FINISHED
    for stop in (2, 5):
        assert go(documents, "parts", f"--config.train.stop_at_step={stop}") == cli.RESUMABLE
    assert go(documents, "parts") == cli.FINISHED
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


def test_evaluation_is_that_of_batches_of_one_length(documents, tmp_path):
    """Full attention sees no padding: what an example costs in time is all that its batch changes."""
    found = []
    for buckets in (1, 3):
        experiment = configs.load_experiment(str(documents), [f"train.length_buckets={buckets}"])
        trainer = experiment.trainer(tmp_path / "unused", tmp_path / "data")
        engine, kept = trainer.engine, Kept()
        assert isinstance(engine, Engine)
        metrics = engine.evaluate(engine.variables(engine.init()), trainer.data, "test", kept=kept)
        found.append((metrics, kept.arrays()))
    (metrics, values), (bucketed, by_length) = found
    assert metrics.keys() == bucketed.keys() and metrics["examples"] == bucketed["examples"] > 4
    for name in metrics:
        assert metrics[name] == pytest.approx(bucketed[name], rel=1e-5)
    for name in values:
        np.testing.assert_allclose(values[name], by_length[name], rtol=1e-5)


def test_a_budget_counts_the_mean_step_of_an_epoch(documents, tmp_path):
    experiment = configs.load_experiment(str(documents))
    config, data_dir = experiment.config, str(tmp_path / "data")
    unprepared = budgets.count_step(config, data_dir)  # batches of the longest; the classes are not known either
    experiment.task.prepare(data_dir)
    mean = budgets.count_step(config, data_dir)
    longest = budgets.count_step(configs.load_experiment(str(documents), ["train.length_buckets=1"]).config, data_dir)
    assert mean < 0.8 * longest and unprepared == pytest.approx(longest, rel=0.01)
    assert (
        dry_run.inspect.mean_training_cost(experiment, inspect.data_sizes(experiment, data_dir)[0], data_dir)[0] == mean
    )


def test_a_mesh_that_cuts_the_length_divides_every_length(documents):
    sequence = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 2}
    check_cuts(configs.load_experiment(str(documents)), sequence)
    experiment = configs.load_experiment(str(documents), ["task.max_len=36"])  # 36, 18 and 9
    with pytest.raises(
        ConfigError, match=r"sequence: got 2, takes a divisor of a length of .*length_buckets, which is 9"
    ):
        check_cuts(experiment, sequence)


def test_what_cannot_be_by_length_is_one_line(documents, tmp_path):
    with pytest.raises(ConfigError, match=r"^train.length_buckets: length_buckets must be .*, got 0$"):
        configs.load_experiment(str(documents), ["train.length_buckets=0"])
    (tmp_path / "play.txt").write_text("All the world is a stage.\n" * 40)
    section = {"name": "language_model", "source": "files", "path": str(tmp_path / "play.txt"), "max_len": 16}
    plays = configs.load_experiment("language_model", ["train.length_buckets=2", f"task={section}"])
    with pytest.raises(ConfigError, match=r"^train.length_buckets: length_buckets must be 1 where all .*, got 2$"):
        plays.trainer(tmp_path / "run", tmp_path / "data")
