"""Variants that choose pairs or mixtures by what tokens hold: wraps, rounds, centres, shared projections, refusals."""

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import as_jax, close, expected, forward, inputs, padding, refuses
from flax import nnx

from xformer import presets
from xformer.attention import Reformer, Routing, Shape, Sinkhorn
from xformer.nn import AttentionFn, Constant, MultiHeadAttention

CASE = next(case for case in conformance.CASES if case.name == "reformer")


@pytest.mark.parametrize("causal", [False, True])
def test_one_bucket_of_all_wraps_to_the_last_real_chunk(causal):
    """Alike queries share every bucket, so that the first chunk sees the last one with a real token, once."""
    op = Reformer(num_hashes=2, num_buckets=2, bucket_size=5, causal=causal)
    call = inputs(q_len=23, batch=4, heads=2, kv_heads=2)
    call["query"] = (1 + 0.01 * call["query"]).astype(np.float32)
    call["mask"] = padding([23, 12, 8, 1], 23)
    want = expected(conformance.Row("wraps", CASE, op), {}, call)
    close(forward(op, {}, as_jax(call)), want)
    seen = np.asarray(op.pattern_of(call["query"], call["key"], mask=call["mask"]))
    assert seen[1, 0, 0].sum() == (1 if causal else 4 + 2) and seen[3].sum() == 2


def test_more_rounds_only_add_pairs_and_each_counts_once():
    call = inputs(q_len=30, heads=2, kv_heads=2)
    one, two = (Reformer(num_hashes=n, num_buckets=4, bucket_size=6) for n in (1, 2))
    pairs = [np.asarray(op.pattern_of(call["query"], call["key"])) for op in (one, two)]
    both = ~np.eye(30, dtype=bool)
    assert not (pairs[0] & ~pairs[1] & both).any() and (pairs[1] & ~pairs[0]).any()
    call["value"] = np.broadcast_to(np.eye(30, dtype=np.float32)[:, None], (2, 30, 2, 30))
    weights = np.asarray(forward(two, {}, as_jax(call)))
    close(weights.sum(-1), np.ones((2, 30, 2)))
    np.testing.assert_array_equal(weights > 0, np.moveaxis(pairs[1], 1, 2))


def test_our_layer_shares_the_projection_that_reformer_needs():
    op = Reformer(num_buckets=4, bucket_size=4, causal=True)
    make = lambda op, **options: MultiHeadAttention(2, 8, attention_fn=op, rngs=nnx.Rngs(0), **options)
    for given in (op, AttentionFn(op)):
        with refuses(ValueError, "Reformer needs share_qk=True", "got False"):
            make(given)
    with refuses(ValueError, "share_qk", "1 and 2"):
        make(op, share_qk=True, num_kv_heads=1)
    layer, x = make(op, share_qk=True), jax.random.normal(jax.random.key(0), (2, 7, 8))
    assert not hasattr(layer, "key")
    with refuses(ValueError, "share_qk", "no context"):
        layer(x, context=x)
    whole, cache, steps = layer(x), layer.init_cache(2, 7), []
    step = nnx.jit(lambda layer, x, cache: layer(x, cache=cache))
    for t in range(7):
        out, cache = step(layer, x[:, t : t + 1], cache)
        steps.append(out)
    close(jnp.concatenate(steps, 1), np.asarray(whole))


def test_presets_ask_for_the_shared_projection():
    of = lambda name, **model: presets.of_model(presets.attention(name), model)
    assert of("reformer") == {"share_qk": True} and of("full") == {}
    assert of("full", share_qk=True) == {"share_qk": False}
    assert of("linear", attention_dropout_rate=0.1) == {"attention_dropout_rate": 0.0}


def test_routing_moves_its_centres_to_the_means_of_what_is_nearest():
    op, rng = Routing(num_clusters=3, window=4, decay=0.5), np.random.default_rng(0)
    query, key = (rng.normal(size=(2, 9, heads, 4)).astype(np.float32) for heads in (2, 1))
    held = op.constants(jax.random.key(1), Shape(1, 9, 9, 2, 4, 1))
    mask = padding([9, 5], 9)
    key[1, 5:] = 1e6 * query[1, 5:, :1]  # padding has no part
    got = np.asarray(op.update(held, query, key, mask)["centres"])
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    real = mask[:, 0, 0]
    for head, cluster in np.ndindex(2, 3):
        centres, means = np.asarray(held["centres"])[head], []
        for x in (query[:, :, head], key[:, :, 0]):
            x = unit(x)[real]
            nearest = x[(x @ centres.T).argmax(-1) == cluster]
            means += [nearest.mean(0)] if len(nearest) else []
        want = unit(0.5 * centres[cluster] + 0.5 * np.mean(means, 0)) if means else centres[cluster]
        close(got[head, cluster], want)


def test_our_layer_moves_the_centres_in_training_only():
    layer = MultiHeadAttention(2, 8, attention_fn=Routing(num_clusters=2, window=4, decay=0.9), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 6, 8))
    centres = lambda: np.asarray(jax.tree.leaves(nnx.state(layer, Constant))[0])
    before = centres()
    layer(x)
    np.testing.assert_array_equal(before, centres())
    layer(x, deterministic=False)
    assert 1e-4 < np.abs(centres() - before).max() < 0.5


def test_causal_sinkhorn_mixes_nothing_into_the_first_block():
    """It is local attention there, and sorts afterwards; a lower temperature sorts harder."""
    call = as_jax(inputs(q_len=24))
    outs = [np.asarray(forward(Sinkhorn(8, temperature=t, causal=True), {}, call)) for t in (0.1, 1.0)]
    np.testing.assert_array_equal(outs[0][:, :8], outs[1][:, :8])
    assert np.abs(outs[0][:, 8:] - outs[1][:, 8:]).max() > 1e-3


def test_refusals():
    call = as_jax(inputs(q_len=9))
    for op in (Reformer(), Routing()):
        with refuses(NotImplementedError, "mask with query dimension 9"):
            op(**call, mask=jnp.ones((1, 1, 9, 9)))
        with refuses(NotImplementedError, "segment_ids", "batch"):
            op(**call, segment_ids=jnp.zeros((2, 9), jnp.int32))
        with refuses(NotImplementedError, "pallas", "depend on data"):
            type(op)(implementation="pallas")(**call)
    with refuses(ValueError, "Reformer.num_buckets must be even", "got 3"):
        Reformer(num_buckets=3)
    with refuses(NotImplementedError, "Routing cannot be causal", "Reformer"):
        Routing(causal=True)
    with refuses(ValueError, "centres", "(4, 32, 4)"):
        Routing()(**call, params={"constants": {"centres": jnp.ones((4, 2, 4))}})
    with refuses(NotImplementedError, "query_offset", "queries"):
        Sinkhorn(causal=True)(**call, query_offset=0)
    with refuses(ValueError, "Sinkhorn.temperature", "got 0"):
        Sinkhorn(temperature=0)
