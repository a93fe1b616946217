"""Faults that users of similar software reported, by the number in which this project lists them.

Elsewhere in the suite, on every variant: 1, 5 (test_attention_masks), 2 (_dtypes), 4, 14 (_causal), 8 (_cost), 10
(_patterns), 11, 12, 13 (_positions). Here: what those don't say in so many words.
"""

import conformance
import jax
import numpy as np
import pytest
from conformance import as_jax, close, expected, forward, forward_and_gradients, inputs, padding, parameters, rows
from flax import nnx

import xformer.nn
from xformer.attention import BigBird, Full, Window

BIGBIRD = next(case for case in conformance.CASES if case.name == "bigbird")


@pytest.mark.parametrize("masked", [False, True], ids=["lengths-only", "mask"])
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("op", [Full(), Window(left=2, right=1), BigBird(block_size=4)], ids=str)
def test_fault_03_options_alone_and_combined(op, causal, masked):
    """Perturb token t: outputs before it (causal) or out of its reach (window) don't move at all."""
    at = 12
    call = inputs(q_len=24, seed=1) | ({"mask": padding([24, 20], 24)} if masked else {})
    moved = call | {name: np.array(call[name]) for name in ("query", "key", "value")}
    for name in ("query", "key", "value"):
        moved[name][:, at] += 3.0
    options = (("is_causal", True),) if causal else ()
    before, after = (np.asarray(forward(op, {}, as_jax(c), options)) for c in (call, moved))
    still = np.arange(24) < at if causal else np.zeros(24, bool)
    if isinstance(op, Window):
        still |= (np.arange(24) > at + 2) | (np.arange(24) < at - 1)
    np.testing.assert_array_equal(before[:, still], after[:, still])
    assert np.abs(before[:, at:] - after[:, at:]).max() > 1e-2


@pytest.mark.sampled(5)
@rows(implementations=("xla",), where=lambda case: case.pairs)
@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_fault_06_places_added_inside_are_never_attended(row, dtype):
    """A mask of ones at a length that fits no block says the same as no mask, whatever its dtype and shape."""
    length = 45
    call = inputs(q_len=length, batch=1)
    params = parameters(row.op, call)
    plain = np.asarray(forward(row.op, params, as_jax(call)))
    close(plain, expected(row, params, call))
    for shape in ((1, 1, 1, length), (1, 1, length, length)) if row.case.masks else ((1, 1, 1, length),):
        close(forward(row.op, params, as_jax(call | {"mask": np.ones(shape, dtype)})), plain, 1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [1, 8, 9, 63, 64, 65, 77])
def test_fault_07_bigbird_at_every_edge(length):
    """One token, one block, and around the 8 blocks below which every block is visible; output and gradient."""
    op = BigBird(8, num_random_blocks=3, num_window_blocks=3, num_global_blocks=2, implementation="xla")
    row = conformance.Row("bigbird", BIGBIRD, op)
    call = inputs(q_len=length, batch=1, heads=2, kv_heads=1, seed=length)
    cotangent = conformance.random_cotangent(call)
    out, *gradients = forward_and_gradients(op, {}, as_jax(call), cotangent)
    close(out, expected(row, {}, call))
    conformance.check_gradients(row, {}, call, cotangent, gradients)
    if length <= 3 * 8:
        close(out, np.asarray(forward(Full(), {}, as_jax(call))))


@pytest.mark.parametrize("causal", [False, True])
def test_fault_09_sparse_equals_dense_at_640_with_blocks_of_64(causal):
    op = BigBird(causal=causal, implementation="xla")
    assert op.block_size == 64
    call = inputs(q_len=640, batch=1, heads=2, kv_heads=2, head_dim=8)
    mask = padding([601], 640)
    dense = forward(Full(), {}, as_jax(call | {"mask": mask & op.pattern(640, 640, 2)[None]}))
    close(forward(op, {}, as_jax(call | {"mask": mask})), np.asarray(dense))


@pytest.mark.sampled(2)
@rows(where=lambda case: case.dropout and conformance.one_of_each(case))
def test_fault_15_dropout_masks_differ_by_layer_step_and_example(row):
    """Two layers of equal parameters under one rngs stream, two steps of it, and two equal examples."""
    x = np.repeat(np.random.default_rng(0).normal(size=(1, 33, 16)).astype(np.float32), 2, axis=0)
    shared = {"share_qk": row.op.SHARES_QK, "dropout_rate": 0.5}
    one, two, fresh = (
        xformer.nn.MultiHeadAttention(4, 16, attention_fn=row.op, **shared, rngs=nnx.Rngs(0)) for _ in range(3)
    )
    np.testing.assert_array_equal(one(x), two(x))
    stream = nnx.Rngs(dropout=3)
    outs = [np.asarray(layer(x, deterministic=False, rngs=stream)) for layer in (one, two, one)]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(outs[first] - outs[second]).max() > 1e-2
    assert np.abs(outs[0][0] - outs[0][1]).max() > 1e-2
    again = np.asarray(fresh(x, deterministic=False, rngs=nnx.Rngs(dropout=3)))
    np.testing.assert_array_equal(outs[0], again)
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(one, nnx.Param), nnx.state(fresh, nnx.Param)))
