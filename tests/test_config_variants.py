"""A variant or a position is one line in its table; configs take its hyperparameters from its class."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Self

import pytest
from test_config import EXPERIMENTS, load, refusal

from xformer import attention, experiment, presets
from xformer.attention import ATTENTIONS, POSITIONS, BigBird, Full, Linformer, Performer, Window
from xformer.attention.position import MusicRelative, Position, Shaw, T5Bias
from xformer.checks import ArgumentError

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Stripes(Full):
    """A variant that nobody but this test knows."""

    every: int = 2

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        return cls(**{"every": num_positions, **overrides})


@dataclasses.dataclass(frozen=True)
class Waves(Position):
    reach: int = 3

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        return cls(**{"reach": num_positions - 1, **overrides})


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_line_in_the_table_is_all_that_a_variant_needs(name, monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "stripes", Stripes)
    monkeypatch.setitem(POSITIONS, "waves", Waves)
    config = load(f"{name}.py:stripes+waves")
    length = experiment.build(config).num_positions
    assert config.attention.to_dict() == {
        "name": "stripes",
        "position": {"name": "waves", "reach": length - 1},
        "every": length,
        "causal": load(f"{name}.py:full").attention.causal,
        "implementation": None,
    }
    assert load(f"{name}.py:stripes", "attention.every=5").attention.every == 5
    assert load(f"{name}.py:waves").attention.name == "full"
    assert "stripes" in refusal(f"{name}.py:strips") and "did you mean stripes?" in refusal(f"{name}.py:strips")


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_variant_of_the_table_is_a_config(name):
    built = experiment.build(load(f"demo.py:{name}"))
    assert type(built.attention) is ATTENTIONS[name]


# What the shipped configs get at their lengths, number by number: defaults don't move unseen.
BLOCK = {"listops": 16, "lra/listops": 64, "imdb": 16, "documents": 16, "demo": 8}
LENGTH = {"listops": 512, "lra/listops": 2001, "imdb": 512, "documents": 512, "demo": 128}
RANK = {"listops": 128, "lra/listops": 16, "imdb": 128, "documents": 128, "demo": 16}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BLOCK)
def test_shipped_experiments_have_these_hyperparameters(name):
    block, length = BLOCK[name], LENGTH[name]
    projection = "learned" if name in ("demo", "lra/listops") else "conv"
    want = {
        "full": Full(),
        "window": Window(block, block),
        "bigbird": BigBird(block, 1 if name == "demo" else 3, 3, 2),
        "linformer": Linformer(RANK[name], length, "key_value", projection),
        "performer": Performer(32 if name == "demo" else 128 if length == 512 else 256),
        "shaw": Full(position=Shaw(block)),
        "music": Full(position=MusicRelative(length)),
        "t5": Full(position=T5Bias(max_distance=length)),
        "bigbird+t5": BigBird(block, 1 if name == "demo" else 3, 3, 2, position=T5Bias(max_distance=length)),
    }
    for variant, op in want.items():
        assert experiment.build(load(f"{name}.py:{variant}")).attention == op, variant


def test_a_variant_without_weights_to_drop_trains_in_the_arena_without_their_dropout():
    rates = {name: load(f"lra/listops.py:{name}").model.attention_dropout_rate for name in ("full", "linear")}
    assert rates == {"full": 0.1, "linear": 0.0}


@pytest.mark.parametrize(
    ("variant", "read"),
    [
        ("linformer", lambda c: c.attention.max_len),
        ("music", lambda c: c.attention.position.max_len),
        ("t5", lambda c: c.attention.position.max_distance),
    ],
)
def test_what_is_unset_follows_length_and_pooling(variant, read):
    assert read(load(f"documents.py:{variant}")) == 512
    assert read(load(f"documents.py:{variant}", "task.max_len=3000")) == 3000
    assert read(load(f"documents.py:{variant}", "task.max_len=3000", "model.pooling=cls")) == 3001
    assert load("documents.py:linformer", "task.max_len=40").attention.rank == 10


def test_a_complete_config_is_not_chosen_again():
    config = experiment.as_json(load("documents.py:bigbird+shaw"))
    config["task"]["max_len"] = 4096
    built = experiment.build(json.loads(json.dumps(config)))
    assert (built.attention.block_size, built.attention.position.max_distance) == (16, 16)
    assert experiment.as_json(experiment.build(built.config).config) == experiment.as_json(built.config)


@pytest.mark.parametrize("num_positions", [1, 2, 31, 32, 33, 500, 2001, 65_536])
def test_for_length_works_at_every_length(num_positions):
    for name, cls in ATTENTIONS.items():
        op = cls.for_length(num_positions)
        assert op == attention.build({"name": name}, num_positions)
    for term in filter(None, POSITIONS.values()):
        assert Full(position=term.for_length(num_positions)).position is not None


@pytest.mark.parametrize(
    ("cls", "overrides"),
    [
        (Window, {"left": 3}),
        (BigBird, {"block_size": 5, "causal": True}),
        (Linformer, {"max_len": 7, "projection": "mean"}),
        (Shaw, {"max_distance": 9, "values": False}),
        (MusicRelative, {"max_len": 600}),
        (T5Bias, {"max_distance": 99}),
        (T5Bias, {"num_buckets": 4096}),
    ],
)
def test_overrides_win(cls, overrides):
    made = cls.for_length(512, **overrides)
    assert all(getattr(made, key) == value for key, value in overrides.items())


@pytest.mark.parametrize(("cls", "overrides"), [(Linformer, {"max_len": "long"}), (T5Bias, {"num_buckets": 2.5})])
def test_for_length_refuses_what_the_constructor_refuses(cls, overrides):
    with pytest.raises(ValueError, match=next(iter(overrides))):
        cls.for_length(512, **overrides)


def test_variant_names():
    assert presets.attention("bigbird+shaw", bigbird={"seed": 3}, shaw={"values": False}, window={"left": 1}) == {
        "name": "bigbird",
        "seed": 3,
        "position": {"name": "shaw", "values": False},
    }
    for wrong in ("", "+", "full+", "full+none", "none", "shaw+full", "full+shaw+t5"):
        with pytest.raises(ArgumentError, match="takes full, window"):
            presets.attention(wrong)
    with pytest.raises(ArgumentError, match=r"did you mean bigbird\+shaw"):
        presets.attention("bigbrid+shaw")
    with pytest.raises(ArgumentError, match=r"bigbrid must be one of full, .*; did you mean bigbird"):
        presets.attention("full", bigbrid={"seed": 3})


def test_config_files_need_no_package_around_them(tmp_path, monkeypatch):
    """They are data: copied elsewhere, and beside another `configs`, they give the same."""
    for file in (ROOT / "configs").glob("*.py"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    loaded = presets.load_module(tmp_path / "compare_demo.py").get_config()
    assert list(loaded.variants) == ["full", "window", "bigbird", "linformer-4", "linformer-16", "shaw"]
