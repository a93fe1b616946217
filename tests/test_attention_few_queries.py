"""A few queries to keys as a cache holds them: as the call says, in any order of places, read in part or all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xformer import cost
from xformer.attention import ALiBi, BigBird, Full, Longformer, MusicRelative, Rotary, Shape, Shaw, T5Bias, Window
from xformer.attention.engine.few_queries import CachedKeys

BATCH, KEYS, HEADS, KV_HEADS, DEPTH = 2, 24, 4, 2, 6
POSITIONS = {
    "none": None,
    "shaw": Shaw(max_distance=3),
    "music": MusicRelative(max_len=KEYS),
    "t5": T5Bias(num_buckets=8, max_distance=16),
    "alibi": ALiBi(),
    "rotary": Rotary(),
}
OPS = {
    "full": Full(causal=True),
    "window": Window(left=5, right=0, causal=True),
    "bigbird": BigBird(block_size=2, num_random_blocks=1, num_window_blocks=3, num_global_blocks=2, causal=True),
    "longformer": Longformer(window=6, num_global_tokens=1, causal=True),
}


def make(name, position, q_len=1, seed=0):
    op = dataclasses.replace(OPS[name], position=POSITIONS[position])
    keys = jax.random.split(jax.random.key(seed), 4)
    query = jax.random.normal(keys[0], (BATCH, q_len, HEADS, DEPTH))
    key, value = (jax.random.normal(k, (BATCH, KEYS, KV_HEADS, DEPTH)) for k in keys[1:3])
    params = op.init(keys[3], Shape(BATCH, q_len, KEYS, HEADS, DEPTH, KV_HEADS))
    return op, query, key, value, params


def rows(x):
    return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], x.shape[3])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("position", list(POSITIONS))
@pytest.mark.parametrize("name", list(OPS))
def test_cached_keys_give_what_the_call_gives(name, position, q_len):
    op, query, key, value, params = make(name, position, q_len)
    offset = jnp.array([KEYS - q_len, 9])  # each example its own
    positions = offset[:, None] + jnp.arange(q_len)
    call = jax.jit(lambda offset: op(query, key, value, query_offset=offset, params=params))
    expected = call(offset)
    places = jnp.arange(KEYS, dtype=jnp.int32)[None]

    def attend(*parts, at=positions):
        return jax.jit(lambda at: op.attend_cached(query, parts, at, kv_len=KEYS, params=params))(at)

    in_order = CachedKeys(rows(key), rows(value), places, in_order=True)
    np.testing.assert_allclose(attend(in_order), expected, atol=3e-6)
    # In two parts, the later one turned round as a ring is.
    turned = jnp.roll(jnp.arange(8, KEYS), 5)
    late = CachedKeys(rows(key[:, turned]), rows(value[:, turned]), turned[None], 8 - 5)
    early = CachedKeys(rows(key[:, :8]), rows(value[:, :8]), places[:, :8])
    np.testing.assert_allclose(attend(late, early), expected, atol=3e-6)
    alone = call(jnp.int32(9))
    np.testing.assert_allclose(attend(in_order, at=positions[1:]), alone, atol=3e-6)


@pytest.mark.parametrize("name", ["full", "window"])
def test_what_is_not_seen_moves_nothing_and_what_is_shows(name):
    op, query, key, value, _ = make(name, "none")
    places, at = jnp.arange(KEYS, dtype=jnp.int32)[None], jnp.full((1, 1), 12)
    attend = lambda key, held=places: op.attend_cached(
        query, [CachedKeys(rows(key), rows(value), held)], at, kv_len=KEYS
    )
    whole = attend(key)
    hidden = key.at[:, 13:].set(jnp.nan)
    hidden = hidden.at[:, 2].set(jnp.inf) if name == "window" else hidden
    np.testing.assert_array_equal(attend(hidden), whole)
    assert np.isnan(attend(key.at[0, 10].set(jnp.nan))[0]).all()
    empty = attend(key, jnp.full((1, KEYS), -1))  # no key at all
    np.testing.assert_array_equal(empty, jnp.zeros_like(empty))


def test_keys_out_of_reach_are_not_read():
    places = jnp.arange(512, dtype=jnp.int32)[None]
    query, row = jnp.ones((1, 1, HEADS, DEPTH)), jnp.ones((KV_HEADS, 512, DEPTH))
    flops = {}
    for name, op in OPS.items():
        part = CachedKeys(row, row, places, in_order=True)
        step = lambda query, at, op=op, part=part: op.attend_cached(query, [part], at, kv_len=512)
        counted = cost.count(step, query, jnp.zeros((1, 1), jnp.int32))
        assert not counted.uncounted
        flops[name] = counted.flops / (4 * HEADS * DEPTH)
    assert flops["full"] == 512  # keys
    assert flops["window"] == 6 and flops["longformer"] <= 8 and flops["bigbird"] <= 2 * 6


def test_ops_that_choose_by_what_keys_hold_are_called():
    op = Full(causal=True, implementation="reference")
    assert not op.reads_cached(1) and Full(causal=True).reads_cached(16) and not Full(causal=True).reads_cached(17)
    with pytest.raises(NotImplementedError, match="Full attends to keys in the order of tokens"):
        op.attend_cached(jnp.ones((1, 1, 1, 2)), [], jnp.zeros((1, 1), jnp.int32), kv_len=4)
