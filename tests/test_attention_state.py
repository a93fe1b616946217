"""The running state: chunks, segments, what is hidden, decoding, random features, meshes."""

import dataclasses
import functools

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import as_jax, close, expected, forward, forward_and_gradients, inputs, padding, refuses
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_attention_cost import counted

from xformer import cost
from xformer.attention import Full, Linear, Options, Performer, Retention, Rotary, Shape
from xformer.attention.state import attend as engine
from xformer.nn import AttentionFn, MultiHeadAttention

CASES = {case.name: case for case in conformance.CASES if case.name in ("linear", "performer", "retention")}
OPS = {name: case.op for name, case in CASES.items()}
LENGTH = 75


def row_of(name, **fields):
    return conformance.Row(name, CASES[name], dataclasses.replace(OPS[name], **fields))


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 16 and of 32 tokens, so that 75 tokens have several and a part of one."""
    monkeypatch.setattr(engine, "CHUNK", 16)
    monkeypatch.setattr(engine, "LONG_CHUNK", 32)
    jax.clear_caches()  # traces don't know of the constants
    yield
    jax.clear_caches()


def segments(length=LENGTH):
    """Segments in one piece each, not in ascending order; the second example's last one is padding's."""
    ids = np.zeros((2, length), np.int32)
    ids[0, :7], ids[0, 7:40], ids[0, 40:] = 5, 2, 9
    ids[1, :33], ids[1, 33:] = 1, 0
    return ids


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("segmented", [False, True], ids=["one", "segments"])
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients_across_chunks(name, causal, segmented):
    row = row_of(name, causal=causal, position=Rotary(100.0) if segmented else None)
    call = inputs(q_len=LENGTH) | {"mask": padding([LENGTH, 50], LENGTH)}
    call |= {"segment_ids": segments()} if segmented else {}
    cotangent = conformance.random_cotangent(call)
    out, *gradients = forward_and_gradients(row.op, {}, as_jax(call), cotangent)
    close(out, expected(row, {}, call))
    conformance.check_gradients(row, {}, call, cotangent, gradients)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("name", ["performer", "retention"])
def test_queries_among_the_keys(name, causal):
    """From an offset known at run time, with segments; before the first key, and far beyond the last."""
    row = row_of(name, causal=causal)
    call, ids = inputs(q_len=37, kv_len=LENGTH), segments()
    beside = call | {"segment_ids": (ids[:, 20:57], ids)}
    cotangent = conformance.random_cotangent(call)
    at = lambda call, offset: as_jax(call) | {"query_offset": np.int32(offset)}
    run = lambda call, offset: forward_and_gradients(row.op, {}, at(call, offset), cotangent)
    out, *gradients = run(beside, 20)
    close(out, expected(row, {}, beside, 20))
    conformance.check_gradients(row, {}, beside, cotangent, gradients, offset=20)
    for offset in (-20, 60, 200):
        close(run(call, offset)[0], expected(row, {}, call, offset), message=f"offset {offset}")


@pytest.mark.usefixtures("small_chunks")
def test_cost_is_that_of_the_chunks():
    """Of keys and queries side by side, and of a few queries at an offset that is known at run time only."""
    some = Shape(1, 5, LENGTH, 2, 4)
    for op in OPS.values():
        for causal, implementation in ((False, None), (True, None), (False, "reference"), (True, "reference")):
            own = dataclasses.replace(op, causal=causal, implementation=implementation)
            assert own.cost(side := Shape(2, LENGTH, LENGTH, 4, 4, 2)).flops == counted(own, side).flops, own
            array = lambda length: jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32)
            run = lambda q, k, v, offset, own=own: own(q, k, v, query_offset=offset)
            at = array(5), array(LENGTH), array(LENGTH), jax.ShapeDtypeStruct((), jnp.int32)
            assert own.cost(some).flops == cost.count(run, *at).flops, own


@pytest.mark.sampled(3)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("hiding", ["segments", "causal"])
@pytest.mark.parametrize("name", ["performer", "retention"])
def test_what_is_hidden_moves_no_output_and_no_gradient(name, hiding, implementation):
    """NaN and infinity in queries, keys, values and gradients of the second half, in the same chunk as the first."""
    length, half = 16, 8
    op = dataclasses.replace(OPS[name], causal=hiding == "causal", implementation=implementation)
    options = {"segment_ids": (np.arange(length) >= half).astype(np.int32)[None]} if hiding == "segments" else {}
    arrays = [jnp.asarray(x) for x in inputs(q_len=length, batch=1, heads=2, kv_heads=2).values()]
    arrays.append(jnp.asarray(np.random.default_rng(9).normal(size=arrays[0].shape).astype(np.float32)))

    @jax.jit
    def attend_and_pull(q, k, v, cotangent):
        out, pull = jax.vjp(lambda q, k, v: op(q, k, v, **options), q, k, v)
        return out, pull(cotangent)

    out, gradients = attend_and_pull(*arrays)
    for index in range(4):
        for bad in (np.nan, np.inf):
            changed = list(arrays)
            changed[index] = changed[index].at[:, half + 3, :, 1].set(bad)
            got, got_gradients = attend_and_pull(*changed)
            np.testing.assert_array_equal(got[:, :half], out[:, :half])
            if index < 3:
                assert not np.isfinite(got[:, half:]).all(), "what is visible shows"
            if hiding == "causal":  # earlier keys are seen by the later query that is not finite
                np.testing.assert_allclose(got_gradients[0][:, :half], gradients[0][:, :half], rtol=1e-5, atol=1e-6)
                assert np.isfinite(got_gradients[1][:, half + 4 :]).all() or index in (1, 2)
                continue
            for a, b in zip(got_gradients, gradients, strict=True):
                np.testing.assert_allclose(a[:, :half], b[:, :half], rtol=1e-5, atol=1e-6)
            assert not all(np.isfinite(x).all() for x in got_gradients), "what is visible shows in the gradient"


def test_segments_that_a_state_does_not_serve():
    """In pieces, or with queries apart from their keys: refused, and NaN rows where it is known at run time only."""
    call = as_jax(inputs(q_len=9))
    pieces = np.array([[0, 0, 1, 1, 1, 0, 0, 2, 2], [3, 3, 3, 1, 1, 1, 0, 0, 0]])
    apart = (np.roll(pieces[1:], 3, axis=1), pieces[1:])
    for op in OPS.values():
        for ids in (pieces, apart):
            with refuses(NotImplementedError, type(op).__name__, "segment_ids", "use Full"):
                op(**call, segment_ids=ids)
    op = Linear(causal=True)
    out = forward(op, {}, call | {"segment_ids": jnp.asarray(pieces)})
    assert np.isnan(out[0]).all()
    alone = {name: x[1:] for name, x in call.items()}
    close(out[1:], np.asarray(op(**alone, segment_ids=pieces[1:])))
    # Queries of a segment without keys see nothing: that is how `query_seq_lengths` hides them.
    past = np.asarray(op(**call, segment_ids=(np.arange(9) // 5, np.zeros(9, int))))
    assert not past[:, 5:].any() and past[:, :5].any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("position", [None, Rotary(50.0)], ids=["none", "rotary"])
@pytest.mark.parametrize("name", OPS)
def test_decoding_gives_the_whole_sequence_at_once(name, position):
    """A prompt of a length of its own for each example, padded by NaN, then token by token; in a state of one size."""
    op = dataclasses.replace(OPS[name], causal=True, position=position)
    layer = MultiHeadAttention(4, 12, attention_fn=op, num_kv_heads=2, head_dim=6, rngs=nnx.Rngs(1))
    graph, state = nnx.split(layer)
    step = jax.jit(lambda state, x, cache, mask=None: nnx.merge(graph, state)(x, mask, cache=cache))
    x = jax.random.normal(jax.random.key(0), (2, 14, 12))
    whole, real = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x), np.array([6, 3])
    mask = jnp.arange(6) < real[:, None]
    empty = layer.init_cache(2, 14)
    out, cache = step(state, jnp.where(mask[:, :, None], x[:, :6], jnp.nan), empty, mask)
    np.testing.assert_allclose(out[1, :3], whole[1, :3], atol=1e-5)
    for index in range(6):
        tokens = jnp.stack([x[row, real[row] + index] for row in range(2)])[:, None]
        out, cache = step(state, tokens, cache)
        for row in range(2):
            np.testing.assert_allclose(out[row, 0], whole[row, real[row] + index], atol=1e-5)
    np.testing.assert_array_equal(cache.length, real + 6)
    sizes = lambda cache: jax.tree.map(jnp.shape, cache.state)
    assert sizes(cache) == sizes(layer.init_cache(2, 65_536))
    out, cache = step(state, jnp.full((2, 1, 12), jnp.nan), cache)
    out, cache = step(state, x[:, -1:], cache)
    assert np.isnan(out).all(), "a visible NaN shows later too"
    with pytest.raises(ValueError, match="cache: 14 \\+ 1 tokens, made for max_len 14"):
        layer(x[:, :1], cache=cache)


def test_decoding_needs_a_causal_op():
    op, call = Linear(), as_jax(inputs(q_len=2))
    state = op.decode_state(conformance.shape_of(call), jnp.float32)
    with refuses(ValueError, "causal", "Linear"):
        op.decode(*call.values(), state)
    with refuses(NotImplementedError, "Full", "cache of keys"):
        Full(causal=True).decode(*call.values(), state)


def test_the_state_knows_no_length():
    op = Linear(causal=True)
    short, long = (op.decode_state(Shape(2, 1, length, 4, 4, 2), jnp.float32) for length in (1_024, 65_536))
    assert jax.tree.map(jnp.shape, short) == jax.tree.map(jnp.shape, long)
    assert short.sums.sums.shape == (2, 2, 4, 4)


def test_random_features_are_orthogonal_and_estimate_softmax_attention():
    projection = np.asarray(Performer(num_features=20).constants(jax.random.key(1), Shape(1, 1, 1, 1, 8))["projection"])
    assert projection.shape == (20, 8)
    for block in (projection[:8], projection[8:16], projection[16:]):
        products = block @ block.T
        np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-4)
    many = np.asarray(Performer(num_features=8_000).constants(jax.random.key(2), Shape(1, 1, 1, 1, 8))["projection"])
    np.testing.assert_allclose(many.mean(0), 0, atol=0.05)
    np.testing.assert_allclose(many.T @ many / 8_000, np.eye(8), atol=0.1)
    call = {name: x if name == "value" else 0.5 * x for name, x in as_jax(inputs(q_len=20, head_dim=8)).items()}
    for causal in (False, True):
        want = np.asarray(Full(causal=causal)(**call))
        errors = []
        for features in (64, 2048):
            op = Performer(features, causal=causal)
            draws = [op.constants(jax.random.key(seed), Shape(1, 20, 20, 4, 8, 2)) for seed in range(2)]
            outs = [np.asarray(op(**call, params={"constants": drawn})) for drawn in draws]
            errors.append(np.mean([np.abs(out - want).mean() for out in outs]))
        assert errors[1] < 0.4 * errors[0] and errors[1] < 0.02, errors
    with refuses(ValueError, "projection", "(3, 8)"):
        Performer(4)(**call, params={"constants": {"projection": jnp.ones((3, 8))}})


@pytest.mark.parametrize("causal", [False, True])
def test_exponentials_stay_within_float32(causal):
    """Keys and queries a thousand times too long: one key gets all the weight, and nothing is NaN."""
    call = inputs(q_len=20, batch=1)
    call |= {"key": call["key"] * 1000, "query": call["query"] * 1000}
    out, _, gradients = forward_and_gradients(Performer(16, causal=causal), {}, as_jax(call), np.ones((1, 20, 4, 4)))
    assert np.isfinite(out).all() and all(np.isfinite(x).all() for x in gradients.values())
    small = {name: x * 1e-3 if name != "value" else x for name, x in call.items()}
    assert np.abs(forward(Linear(causal=causal), {}, as_jax({**call, "query": small["query"]}))).max() < 10


def test_decays_of_ones_own():
    call = as_jax(inputs())
    row = row_of("retention", decays=(0.5, 0.9, 0.99, 1.0))
    close(row.op(**call), expected(row, {}, inputs()))
    assert Retention(decays=[0.5]) == Retention(decays=(0.5,))
    with refuses(ValueError, "decays", "2 numbers", "4 query heads"):
        Retention(decays=(0.5, 0.9))(**call)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "op", [Performer(6), Retention(decays=(0.9,) * 4, causal=True)], ids=["performer", "retention"]
)
def test_transformations_and_meshes(op):
    """vmap, scan with remat, a caller's shard_map over examples or heads, arrays on an explicit mesh."""
    call = as_jax(inputs(q_len=20, batch=4, heads=4, kv_heads=4))
    data = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    explicit = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    plain = lambda call: op(**call)
    of_one_head = dataclasses.replace(op, decays=(0.9,)) if isinstance(op, Retention) else op
    pulled = lambda attend, call: jax.jit(jax.value_and_grad(lambda call: (attend(call) ** 2).sum()))(call)
    same = functools.partial(jax.tree.map, lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5))
    want = pulled(plain, call)
    same(pulled(jax.vmap(plain), call), want)
    same(pulled(lambda call: jax.lax.scan(lambda _, x: (None, jax.checkpoint(plain)(x)), None, call)[1], call), want)
    for spec, own in ((P("data"), plain), (P(None, None, "data"), lambda call: of_one_head(**call))):
        same(pulled(jax.shard_map(own, mesh=data, in_specs=(spec,), out_specs=spec), call), want)
    if not op.causal:  # each device has some of the queries, and all keys
        specs = {"query": P(None, "data"), "key": P(), "value": P()}
        cut = jax.shard_map(plain, mesh=data, in_specs=(specs,), out_specs=P(None, "data"))
        same(pulled(cut, call), want)
    placed = jax.device_put(call, NamedSharding(explicit, P("data")))
    assert jax.jit(plain)(placed).sharding.spec[0] == "data"
    same(pulled(plain, placed), want)


def test_weights_are_those_of_the_output():
    call = as_jax(inputs())
    for op in OPS.values():
        layer = AttentionFn(op)
        weights = op.attention_weights(*call.values(), Options(mask=jnp.ones((1, 1, 1, 45), bool)))
        values = jnp.repeat(call["value"], 2, axis=2)
        close(jnp.einsum("bhqk,bkhd->bqhd", weights, values), np.asarray(layer(**call), np.float64))
