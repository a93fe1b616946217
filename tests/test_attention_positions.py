"""Position terms against golden values and their papers' formulas, alone."""

import math

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from conformance import as_jax, close, expected, forward, inputs, parameters

from xformer.attention import ALiBi, Full, MusicRelative, Rotary, Shaw, T5Bias, Window
from xformer.attention.rotary_scaling import frequencies

FULL = conformance.CASES[0]


def row_of(position, causal=False, **fields):
    return conformance.Row("full", FULL, Full(position=position, causal=causal, **fields))


# T5's own setting, 32 buckets up to 128. Bidirectional: 8 exact distances a side, then from these distances on one
# bucket more. One direction: 16 exact distances, then these.
BOTH_SIDES = {8: 8, 12: 9, 16: 10, 23: 11, 32: 12, 46: 13, 64: 14, 91: 15}
PAST_ONLY = {16: 16, 19: 17, 21: 18, 24: 19, 27: 20, 31: 21, 35: 22, 40: 23,
             46: 24, 52: 25, 59: 26, 67: 27, 77: 28, 87: 29, 99: 30, 113: 31}  # fmt: skip


def golden(distance, bidirectional):
    steps = BOTH_SIDES if bidirectional else PAST_ONLY
    far = abs(distance) if bidirectional else max(-distance, 0)
    bucket = max((step for start, step in steps.items() if far >= start), default=far)
    return bucket + (16 if bidirectional and distance > 0 else 0)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_reference_has_the_golden_buckets(bidirectional):
    for distance in range(-200, 201):
        want = golden(distance, bidirectional)
        assert references.t5_bucket(distance, 32, 128, bidirectional) == want, distance


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("query", [0, 200])
def test_t5_buckets_of_the_op(causal, query):
    """Fault 11: distances -200..200. With bucket numbers as the table, softmax weights tell each key's bucket."""
    op = Full(position=T5Bias(num_buckets=32, max_distance=128), causal=causal, implementation="reference")
    keys = 201
    call = {"query": jnp.zeros((1, 1, 1, keys)), "key": jnp.zeros((1, keys, 1, keys))}
    call |= {"value": jnp.eye(keys)[None, :, None], "query_offset": query}
    shaped = op.init(conformance.jax.random.key(0), conformance.Shape(1, keys, keys, 1, keys))
    table = jnp.arange(32.0) / 8
    params = conformance.jax.tree.map(lambda x: table.reshape(x.shape), shaped)
    weights = np.asarray(conformance.attend(op, params, call))[0, 0, 0]
    seen = np.arange(keys) <= query if causal else np.ones(keys, bool)
    buckets = 8 * (np.log(weights[seen]) - np.log(weights[query]))
    want = [golden(key - query, not causal) for key in np.arange(keys)[seen]]
    close(buckets + golden(0, not causal), want, 1e-3)


def test_alibi_slopes():
    """The paper's 8 heads: 1/2, 1/4, ... 1/256; 12 heads: those and every second one of 16 heads."""
    close(references.alibi_slopes(8), [2.0**-i for i in range(1, 9)], 1e-12)
    twelve = [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    close(references.alibi_slopes(12), twelve, 1e-12)
    close(references.alibi_slopes(1), [2.0**-8], 1e-12)
    close(references.alibi_slopes(3), [2.0**-4, 2.0**-8, 2.0**-2], 1e-12)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi_at_any_number_of_heads(heads, causal):
    row = row_of(ALiBi(), causal)
    call = inputs(q_len=33, heads=heads, kv_heads=1)
    close(forward(row.op, {}, as_jax(call)), expected(row, {}, call))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("length", [15, 16, 17, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "position",
    [MusicRelative(max_len=16), Shaw(max_distance=16, values=True), Shaw(max_distance=16, values=False)],
    ids=str,
)
def test_relative_terms_below_at_and_above_their_maximum(position, causal, length, implementation):
    """Fault 13: the skewed term equals the naive gather; an unclipped one refuses what it has no embedding for."""
    row = row_of(position, causal, implementation=implementation)
    call = inputs(q_len=length, seed=length)
    params = parameters(row.op, call)
    if length > getattr(position, "max_len", length):
        with conformance.refuses(ValueError, "max_len", "16", str(length)):
            conformance.attend(row.op, params, as_jax(call))
        return
    close(forward(row.op, params, as_jax(call)), expected(row, params, call))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rotary_angles_are_float32(dtype):
    """Fault 12: bfloat16 has no odd integer above 256, so angles in it would give neighbours the same position."""
    row = row_of(Rotary())
    call = inputs(q_len=16, kv_len=700, batch=1, heads=1, kv_heads=1, head_dim=8)
    call["query"] *= 3
    narrow = {name: jnp.asarray(x, dtype) for name, x in call.items()}
    rounded = {name: np.asarray(x, np.float32) for name, x in narrow.items()}
    out = forward(row.op, {}, narrow | {"query_offset": jnp.int32(683)})
    close(out, expected(row, {}, rounded, 683), {"bfloat16": 3e-2, "float16": 5e-3}[dtype])


def test_rotary_depends_on_distance_only():
    """Moving every position by 5000 leaves the scores: float32 angles are still exact enough there."""
    op = Window(left=3, right=3, position=Rotary())
    x = inputs(q_len=1, kv_len=1, batch=1, heads=1, kv_heads=1, head_dim=16)
    keys = np.random.default_rng(0).normal(size=(1, 9, 1, 16)).astype(np.float32)
    outs = []
    for start in (0, 5000):
        query = references.rotate(x["query"], [start + 4], 10000.0)
        key = references.rotate(keys, start + np.arange(9), 10000.0)
        outs.append(np.einsum("bqhd,bkhd->bk", query, key))
    close(outs[0], outs[1], 1e-9)
    assert op.position.base == 10000.0


@pytest.mark.parametrize("head_dim", [2, 16, 64])
def test_rotary_scaling_is_what_the_papers_say(head_dim):
    """Pair by pair; and the slowest pair of NTK is as slow as interpolation makes it."""
    base, factor, trained = 10_000.0, 4.0, 256
    for pair in range(head_dim // 2):
        theta = base ** (-2 * pair / head_dim)
        found = lambda scaling, pair=pair: frequencies(head_dim, base, scaling, factor, trained)[pair]
        np.testing.assert_allclose(found("none"), theta)
        np.testing.assert_allclose(found("linear"), theta / factor)
        ntk = base * factor ** (head_dim / (head_dim - 2)) if head_dim > 2 else base
        np.testing.assert_allclose(found("ntk"), ntk ** (-2 * pair / head_dim))
        wavelength = 2 * math.pi / theta
        ratio = trained / wavelength
        kept = 0 if ratio < 1 else 1 if ratio > 32 else (ratio - 1) / (32 - 1)
        np.testing.assert_allclose(found("yarn"), (1 - kept) * theta / factor + kept * theta)
    if head_dim > 2:
        slow = frequencies(head_dim, base)[-1] / frequencies(head_dim, base, "ntk", factor)[-1]
        np.testing.assert_allclose(slow, factor)


@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn"])
def test_scaled_rotary_turns_and_lengthens(scaling):
    term = Rotary(scaling=scaling, factor=2.0, trained_len=8)
    x = jax.random.normal(jax.random.key(0), (1, 20, 2, 16))
    angles = np.arange(20)[:, None] * frequencies(16, 10_000.0, scaling, 2.0, 8)
    length = 0.1 * math.log(2.0) + 1 if scaling == "yarn" else 1.0
    turned = (x[..., :8] + 1j * x[..., 8:]) * length * np.exp(1j * angles)[None, :, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(term.rotate(x, jnp.arange(20)), expected, atol=1e-5)
    np.testing.assert_allclose(
        Rotary(scaling=scaling, factor=1.0, trained_len=8).rotate(x, jnp.arange(20)),
        Rotary().rotate(x, jnp.arange(20)),
        atol=1e-6,
    )


def test_the_factor_is_chosen_by_the_length():
    assert Rotary.for_length(2048, scaling="yarn", trained_len=512).factor == 4
    assert Rotary.for_length(256, scaling="linear", trained_len=512).factor == 1
    assert Rotary.for_length(2048, scaling="ntk", trained_len=512, factor=8.0).factor == 8
    assert Rotary.for_length(2048) == Rotary()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scaling": "yarm"}, "Rotary.scaling must be one of none, linear, ntk, yarn, got 'yarm'"),
        ({"scaling": "linear", "factor": 0.5}, "Rotary.factor must be a number from 1, got 0.5"),
        ({"factor": 2.0}, "Rotary.scaling must be linear, ntk or yarn with factor=2.0"),
        ({"scaling": "yarn", "factor": 2.0}, "Rotary.trained_len must be given with scaling='yarn', got None"),
        ({"scaling": "yarn", "trained_len": 0}, "Rotary.trained_len must be"),
    ],
)
def test_rotary_scaling_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        Rotary(**fields)


def test_rotary_needs_an_even_head_dim():
    with conformance.refuses(ValueError, "head_dim"):
        Full(position=Rotary())(**as_jax(inputs(head_dim=5)))
