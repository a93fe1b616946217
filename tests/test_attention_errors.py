"""Ops as values, `build`, and refusals: one line that says what is wrong, before any compute."""

import dataclasses
import pickle

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import as_jax, inputs, padding, parameters, refuses, rows
from ml_collections import ConfigDict, FrozenConfigDict

from xformer.attention import (
    ATTENTIONS,
    POSITIONS,
    ALiBi,
    Attention,
    BigBird,
    Full,
    Linformer,
    MusicRelative,
    Rotary,
    Shape,
    Shaw,
    T5Bias,
    Window,
    build,
)


@rows(positions=True, causal=(False, True))
def test_ops_are_values(row):
    """Frozen, hashable, equal when made anew, printable, picklable, jit-static."""
    again = dataclasses.replace(row.op)
    assert again == row.op and hash(again) == hash(row.op) and again is not row.op
    assert pickle.loads(pickle.dumps(row.op)) == row.op
    assert repr(row.op).startswith(type(row.op).__name__ + "(") and "\n" not in repr(row.op)
    assert eval(repr(row.op), {cls.__name__: cls for cls in (*ATTENTIONS.values(), *_terms())}) == row.op
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.op.causal = True
    assert isinstance(row.op, Attention) and dataclasses.replace(row.op, implementation="reference") != row.op


def _terms():
    return Shaw, MusicRelative, T5Bias, ALiBi, Rotary


def test_tables():
    assert {"full": Full, "window": Window, "bigbird": BigBird, "linformer": Linformer}.items() <= ATTENTIONS.items()
    assert {"none", "shaw", "music", "t5", "alibi", "rotary"} <= POSITIONS.keys()
    for cls in ATTENTIONS.values():
        fields = {field.name for field in dataclasses.fields(cls)}
        assert {"causal", "implementation"} <= fields
        assert cls() == cls(causal=False, implementation=None)


def test_every_attention_of_the_table_has_a_row():
    assert {type(case.op) for case in conformance.CASES} == set(ATTENTIONS.values())
    shown = {type(position) for case in conformance.CASES for position in case.positions.values()}
    assert set(_terms()) <= shown


@pytest.mark.parametrize("wrap", [dict, ConfigDict, FrozenConfigDict])
def test_build(wrap):
    assert build(wrap({"name": "full"})) == Full()
    assert build(wrap({"name": "full", "position": None, "causal": True})) == Full(causal=True)
    assert build(wrap({"name": "full", "position": {"name": "none"}})) == Full()
    built = build(wrap({"name": "bigbird", "block_size": 8, "position": {"name": "shaw", "max_distance": 4}}))
    assert built == BigBird(block_size=8, position=Shaw(max_distance=4))
    assert build(wrap({"name": "window", "position": {"name": "rotary", "base": 500.0}})).position == Rotary(base=500.0)
    assert build(wrap({"name": "linformer", "sharing": "none"})) == Linformer(sharing="none")
    for name, position in (("music", MusicRelative()), ("t5", T5Bias()), ("alibi", ALiBi())):
        assert build(wrap({"name": "full", "position": {"name": name}})) == Full(position=position)


def test_build_leaves_its_argument_alone():
    config = {"name": "full", "position": {"name": "shaw"}}
    build(config)
    assert config == {"name": "full", "position": {"name": "shaw"}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "bigbrid"}, ["bigbrid", "bigbird"]),
        ({"name": "fulll"}, ["fulll", "full", "linformer"]),
        ({"name": None}, ["name"]),
        ({}, ["name"]),
        ({"block_size": 3}, ["name"]),
        ({"name": "bigbird", "blocksize": 8}, ["blocksize", "block_size"]),
        ({"name": "full", "left": 8}, ["left"]),
        ({"name": "full", "position": {"name": "show"}}, ["show", "shaw"]),
        ({"name": "full", "position": {"name": "shaw", "max_distnace": 3}}, ["max_distnace", "max_distance"]),
        ({"name": "full", "position": {}}, ["name"]),
        ({"name": "full", "position": "show"}, ["position", "show"]),
        ({"name": "linformer", "position": {"name": "shaw"}}, ["position"]),
        ({"name": "linformer", "sharing": "headwize"}, ["sharing", "headwize", "headwise"]),
        ({"name": "full", "implementation": "cuda"}, ["implementation", "cuda"]),
        ({"name": "window", "left": "4"}, ["left", "'4'"]),
        ({"name": "window", "left": 4.5}, ["left", "4.5"]),
        ({"name": "window", "left": True}, ["left", "True"]),
        ({"name": "full", "causal": 1}, ["causal", "1"]),
        ({"name": "full", "causal": "no"}, ["causal", "no"]),
    ],
    ids=str,
)
def test_build_refuses(config, words):
    with refuses((ValueError, NotImplementedError), *words):
        build(config)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Window(left=-1), "left"),
        (lambda: Window(right=-2), "right"),
        (lambda: BigBird(num_window_blocks=2), "num_window_blocks"),
        (lambda: BigBird(num_window_blocks=0), "num_window_blocks"),
        (lambda: BigBird(block_size=0), "block_size"),
        (lambda: BigBird(num_random_blocks=-1), "num_random_blocks"),
        (lambda: BigBird(num_global_blocks=-1), "num_global_blocks"),
        (lambda: BigBird(num_global_tokens=-1), "num_global_tokens"),
        (lambda: BigBird(seed=1.5), "seed"),
        (lambda: Linformer(rank=0), "rank"),
        (lambda: Linformer(max_len=0), "max_len"),
        (lambda: Linformer(rank=65, max_len=64), "rank"),
        (lambda: Linformer(projection="max"), "projection"),
        (lambda: Linformer(sharing="all"), "sharing"),
        (lambda: Full(position=3), "position"),
        (lambda: Full(implementation="fast"), "implementation"),
        (lambda: Shaw(max_distance=-1), "max_distance"),
        (lambda: MusicRelative(max_len=0), "max_len"),
        (lambda: T5Bias(num_buckets=1), "num_buckets"),
        (lambda: T5Bias(num_buckets=32, max_distance=4), "max_distance"),
        (lambda: Rotary(base=0.0), "base"),
    ],
)
def test_impossible_hyperparameters_are_refused(make, word):
    with refuses((ValueError, NotImplementedError), word):
        make()


def changed(name, shape, dtype=np.float32):
    return {name: np.zeros(shape, dtype)}


@rows()
@pytest.mark.parametrize(
    "change",
    [
        changed("value", (2, 44, 2, 4)),
        changed("key", (2, 45, 2, 6)),
        {**changed("key", (2, 45, 3, 4)), **changed("value", (2, 45, 3, 4))},
        {**changed("key", (2, 45, 2, 4)), **changed("value", (2, 45, 4, 4))},
        {**changed("key", (3, 45, 2, 4)), **changed("value", (3, 45, 2, 4))},
        changed("query", (45, 4)),
        changed("mask", (2, 1, 1, 44), bool),
        changed("mask", (3, 1, 1, 45), bool),
        changed("mask", (2, 3, 1, 45), bool),
        changed("mask", (1, 2, 1, 1, 45), bool),
    ],
    ids=lambda change: "-".join(f"{name}{x.shape}" for name, x in change.items()),
)
def test_shapes_that_do_not_fit_are_refused(row, change):
    call = as_jax(inputs())
    params = parameters(row.op, call)
    with refuses(ValueError):
        conformance.attend(row.op, params, as_jax(call | change))


@rows(where=lambda case: case.pairs and case.masks)
def test_other_arguments_that_do_not_fit_are_refused(row):
    call = as_jax(inputs())
    with refuses(ValueError, "bias"):
        row.op(**call, bias=np.zeros((2, 3, 45, 45), np.float32))
    with refuses(ValueError, "segment_ids"):
        row.op(**call, segment_ids=np.zeros((2, 44), np.int32))
    with refuses(ValueError, "segment_ids"):
        row.op(**(call | {"query": call["query"][:, :5]}), segment_ids=np.zeros((2, 45), np.int32), query_offset=3)


@rows(positions=True)
def test_missing_parameters_are_refused(row):
    call = as_jax(inputs())
    params = parameters(row.op, call)
    if params:
        for missing in (None, {}):
            with refuses(ValueError, "params"):
                row.op(**call, params=missing)
        first = jax.tree.leaves(params)[0].shape
        wrong = jax.tree.map(lambda x: np.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype), params)
        with refuses(ValueError, str(first[-1] + 1)):
            row.op(**call, params=wrong)
    else:
        assert row.op.init(jax.random.key(0), conformance.shape_of(call)) == {}


@rows(where=lambda case: not case.pairs)
def test_what_has_no_token_pairs_refuses_what_needs_them(row):
    call = as_jax(inputs())
    params = parameters(row.op, call)
    general = np.ones((2, 1, 45, 45), bool)
    cases = [({"bias": np.zeros((2, 4, 45, 45), np.float32)}, "bias"), ({"mask": general}, "mask")]
    cases += [({"segment_ids": np.zeros((2, 45), np.int32)}, "segment")]
    for extra, word in cases:
        with refuses(NotImplementedError, word):
            conformance.attend(row.op, params, call | extra)
    if row.case.max_len < 49:
        with refuses(ValueError, "max_len"):
            conformance.attend(row.op, params, as_jax(inputs(q_len=49) | {"mask": padding([49, 3], 49)}))


@pytest.mark.parametrize("implementation", ["pallas", "splash", "cudnn"])
def test_an_implementation_that_cannot_run_here_says_why(implementation):
    for op in (Full(), Window(left=4, right=4), BigBird(block_size=8), Linformer(rank=6, max_len=48)):
        with refuses((NotImplementedError, ValueError), implementation):
            named = dataclasses.replace(op, implementation=implementation)
            conformance.attend(named, parameters(op, inputs()), as_jax(inputs()))


def test_init_ignores_the_lengths_where_there_is_a_max_len():
    for op in (Linformer(rank=6, max_len=48), Full(position=MusicRelative(max_len=20))):
        shapes = [jax.tree.map(np.shape, op.init(jax.random.key(0), Shape(1, n, n, 4, 4))) for n in (1, 48, 1000)]
        assert shapes[0] == shapes[1] == shapes[2] != {}


def test_position_parameters_sit_under_position():
    for position in (Shaw(), MusicRelative(), T5Bias()):
        params = Full(position=position).init(jax.random.key(0), Shape(1, 8, 8, 4, 4))
        assert params.keys() == {"position"} and jax.tree.leaves(params)
    for position in (ALiBi(), Rotary(), None):
        assert Full(position=position).init(jax.random.key(0), Shape(1, 8, 8, 4, 4)) == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("full", "attention: got 'full', takes a mapping"),
        (None, "attention: got None, takes a mapping"),
        ({"name": ["full"]}, r"attention.name: got \['full'\], allowed are full"),
        ({"name": "full", "position": 5}, "attention.position: got 5, takes a mapping"),
        ({"name": "full", "position": ["shaw"]}, "attention.position: got .*takes a mapping"),
        (
            {"name": "full", "position": {"name": "rotary", "base": float("nan")}},
            "Rotary.base must be a number above 1",
        ),
        ({"name": "full", "position": {"name": "shaw", "values": "no"}}, "Shaw.values must be True or False"),
    ],
)
def test_odd_mappings_are_refused_in_one_line(config, message):
    with pytest.raises(ValueError, match=message) as error:
        build(config)
    assert "\n" not in str(error.value)


def test_linformer_with_a_position_by_name_is_refused():
    with pytest.raises(NotImplementedError, match="no token positions left"):
        build({"name": "linformer", "position": "shaw"})


def test_scale_is_a_number_not_a_vector():
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="scale must be a number"):
        Full()(x, x, x, scale=jnp.arange(8.0))


@pytest.mark.parametrize("dtype", [jnp.int32, "float17", bool])
def test_a_dtype_that_is_not_floating_point_is_refused(dtype):
    x = jnp.ones((1, 4, 2, 4))
    with pytest.raises(ValueError, match="dtype must be a floating point type, got"):
        Full()(x, x, x, dtype=dtype)


def test_tables_that_no_memory_holds_are_refused():
    with pytest.raises(ValueError, match=r"Shaw\.max_distance must be at most 16,777,216, got 1,000,000,000,000"):
        Shaw(10**12)
    with pytest.raises(ValueError, match=r"T5Bias\.max_distance must be at most"):
        T5Bias(32, 10**15)


def test_a_block_beyond_the_length_is_the_length():
    """What a block may hold does not size the tiles: those are no longer than the sequence."""
    x = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))
    huge, full = BigBird(100_000), Full()
    assert huge.tile_plan(16, 16, 4).pair_masks.shape[1:] == (16, 16)
    np.testing.assert_allclose(huge(x, x, x), full(x, x, x), rtol=1e-5, atol=1e-6)
    for block in (1000, 1024, 5000):
        plan = BigBird(block).tile_plan(4096, 4096, 4)
        assert max(plan.q_block, plan.kv_block) <= 512
