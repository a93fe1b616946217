"""Numbers in and out: scales, offsets, segments, precision of what is shared, strict promotion, open batch sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import BOTH, inputs, refuses
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xformer.attention import ALiBi, BigBird, Full, Linformer, MusicRelative, Rotary, Shape, Shaw, T5Bias, Window

SHAPE = Shape(2, 8, 8, 2, 4)


def qkv(**sizes):
    return [jnp.asarray(x) for x in inputs(**({"q_len": 8, "heads": 2, "kv_heads": 2} | sizes)).values()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", BOTH)
def test_an_array_scales_in_float32(implementation):
    ones = jnp.ones((1, 2, 1, 4), jnp.float16)
    op = Full(implementation=implementation)
    np.testing.assert_array_equal(op(200 * ones, 1e-3 * ones, ones, scale=jnp.asarray(1000.0)), ones)
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv())
    got, want = (np.asarray(op(q, k, v, scale=scale), np.float32) for scale in (jnp.asarray(7.3), 7.3))
    np.testing.assert_allclose(got, want, atol=0.01)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", [Full(), Window(2, 2), Linformer(rank=8, max_len=8)], ids=str)
def test_a_scale_of_each_head(op):
    q, k, v = qkv()
    params = op.init(jax.random.key(0), SHAPE)
    got = op(q, k, v, scale=jnp.array([0.3, 2.0]), params=params)
    for head, scale in enumerate((0.3, 2.0)):
        np.testing.assert_allclose(got[:, :, head], op(q, k, v, scale=scale, params=params)[:, :, head], atol=1e-5)
    slope = jax.grad(lambda scale: op(q, k, v, scale=scale, params=params)[:, :, 1].sum())(jnp.array([0.3, 2.0]))
    assert slope[0] == 0 and slope[1] != 0
    for wrong in (True, "x", jnp.ones(3), jnp.ones((2, 1))):
        with refuses(ValueError, "scale must be a number or an array"):
            op(q, k, v, scale=wrong, params=params)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("offset", [None, np.zeros(600, np.int32)], ids=["plain", "by example"])
@pytest.mark.parametrize("implementation", BOTH)
def test_gradients_of_what_a_batch_shares_are_summed_in_float32(implementation, offset):
    """600 examples, a bfloat16 bias and a bfloat16 table: half-precision sums are 11.6 % off."""
    op = Full(implementation=implementation, position=T5Bias(8, 20))
    call = dict(zip(("query", "key", "value"), qkv(batch=600), strict=True)) | {"query_offset": offset}
    shared = {"bias": jnp.zeros((1, 2, 8, 8)), "params": op.init(jax.random.key(0), SHAPE)}
    loss = lambda shared: (op(**call, **shared)[..., 0] + 0.1 * op(**call, **shared)[..., 1] ** 2).sum()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), shared)
    want = jax.grad(loss)(jax.tree.map(lambda x: x.astype(jnp.float32), half))
    for a, b in zip(jax.tree.leaves(jax.grad(loss)(half)), jax.tree.leaves(want), strict=True):
        assert np.abs(np.asarray(a, np.float32) - b).max() < 0.01 * np.abs(b).max()


WRONG_OFFSETS = [
    np.array(1.5), True, np.bool_(True), np.array(True), jnp.array(True), jnp.array(1.5), 1.5, np.array([1.0, 2.0]),
    -1, np.array([-1, 2]), 2**31, np.int64(2**31), np.array([2**31, 0]), "3",
]  # fmt: skip


@pytest.mark.parametrize("offset", WRONG_OFFSETS, ids=repr)
def test_offsets_that_are_no_positions_are_refused(offset):
    with refuses(ValueError, "query_offset"):
        Full(causal=True)(*qkv(), query_offset=offset)


@pytest.mark.parametrize("implementation", BOTH)
def test_large_numbers_do_not_overflow(implementation):
    """Windows and blocks beyond 32 bits, with offsets known only at run time too; far queries see all earlier keys."""
    q, k, v = qkv()
    want = Full()(q, k, v)
    for op in (
        Window(10**10, 10**10, implementation=implementation),
        BigBird(10**10, implementation=implementation),
        BigBird(4, num_window_blocks=10**10 + 1, num_random_blocks=10**10, implementation=implementation),
    ):
        np.testing.assert_allclose(op(q, k, v), want, atol=1e-5)
        np.testing.assert_allclose(op(q[:, 3:4], k, v, query_offset=jnp.int32(3)), want[:, 3:4], atol=1e-5)
    for far in (10**9, jnp.int32(2**31 - 1)):
        got = Full(causal=True, implementation=implementation)(q, k, v, query_offset=far)
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "end"), [(Full(position=MusicRelative(max_len=16)), 16), (BigBird(block_size=2), 8)], ids=str
)
@pytest.mark.parametrize("implementation", BOTH)
def test_beyond_the_last_position(op, end, implementation):
    """ValueError when the offset is known, NaN for just the rows beyond when it is not."""
    op = dataclasses.replace(op, implementation=implementation)
    q, k, v = qkv()
    params = op.init(jax.random.key(0), SHAPE)
    with refuses(ValueError, "query_offset 30", f"positions 0 to {end - 1}"):
        op(q, k, v, params=params, query_offset=30)
    for offset in (jnp.int32(end - 3), jnp.array([end - 3, end - 3])):
        out = np.asarray(op(q, k, v, params=params, query_offset=offset))
        assert np.isfinite(out[:, :3]).all() and np.isnan(out[:, 3:]).all()


def test_only_a_tuple_is_a_pair_of_segments():
    q, k, v = qkv()
    ids = [[0] * 4 + [1] * 4, [0] * 2 + [1] * 6]
    np.testing.assert_array_equal(Full()(q, k, v, segment_ids=ids), Full()(q, k, v, segment_ids=np.array(ids)))
    pair = (np.array(ids), np.array(ids))
    np.testing.assert_array_equal(Full()(q, k, v, segment_ids=pair), Full()(q, k, v, segment_ids=ids))


OPS = [
    Full(), Full(causal=True, position=Shaw(3)), Window(3, 2, position=T5Bias(8, 20)), BigBird(block_size=2),
    Linformer(rank=4, max_len=8), Linformer(rank=4, max_len=8, projection="mean"), Full(position=Rotary()),
    Full(position=ALiBi()), Full(position=MusicRelative(8)), Full(position=Shaw(30)),
]  # fmt: skip


def loss_of(op, options):
    params = op.init(jax.random.key(0), SHAPE)
    return lambda q, k, v: (op(q, k, v, params=params, **options) ** 2).astype(jnp.float32).sum()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_strict_promotion(op, implementation):
    """Under JAX's strictest settings every op traces, forward and gradient, in both precisions."""
    op = dataclasses.replace(op, implementation=implementation)
    dropout = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.1, "deterministic": False}
    options = [{"mask": jnp.ones((2, 1, 1, 8), bool), **dropout}, {"query_offset": jnp.zeros(2, jnp.int32)}]
    if not isinstance(op, Linformer):
        options.append({"bias": jnp.zeros((8, 8)), "segment_ids": jnp.zeros((2, 8), jnp.int32), "scale": jnp.ones(2)})
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for dtype in (jnp.float32, jnp.bfloat16):
            arrays = [x.astype(dtype) for x in qkv()]
            for given in options:
                jax.eval_shape(jax.grad(loss_of(op, given), argnums=(0, 1, 2)), *arrays)


@pytest.mark.parametrize("op", [Full(), Window(2, 2), BigBird(block_size=2), OPS[1], OPS[4]], ids=str)
def test_a_batch_size_left_open_in_export(op):
    (batch,) = export.symbolic_shape("b")
    array = jax.ShapeDtypeStruct((batch, 8, 2, 4), jnp.float32)
    run = jax.grad(loss_of(op, {}))
    got = export.export(jax.jit(run))(array, array, array).call(*qkv())
    np.testing.assert_allclose(got, run(*qkv()), rtol=1e-5, atol=1e-5)


def test_offsets_of_each_example_on_an_explicit_mesh():
    q, k, v = qkv(batch=4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    offsets = jnp.array([0, 1, 2, 3], jnp.int32)
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
    op = Full(causal=True)
    run = jax.jit(lambda q, k, v, offset: op(q[:, :1], k, v, query_offset=offset))
    np.testing.assert_allclose(run(*map(place, (q, k, v, offsets))), run(q, k, v, offsets), atol=1e-6)
