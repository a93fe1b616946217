"""Masks, padding, segments: every form works in every variant, and what is hidden can't move the result."""

import conformance
import jax
import numpy as np
import pytest
from conformance import (
    BATCH,
    BOTH,
    HEADS,
    LENGTH,
    as_jax,
    close,
    expected,
    forward,
    forward_and_gradients,
    inputs,
    one_of_each,
    padding,
    parameters,
    rows,
)

PADDED = padding([LENGTH - 9, 7], LENGTH)


@pytest.mark.sampled(3)
@rows(where=one_of_each)
@pytest.mark.parametrize("dtype", [bool, np.float32, np.int32])
def test_padding_mask_of_any_dtype(row, dtype):
    call = inputs()
    params = parameters(row.op, call)
    close(
        forward(row.op, params, as_jax(call | {"mask": PADDED.astype(dtype)})),
        expected(row, params, call | {"mask": PADDED}),
    )


@pytest.mark.sampled(7)
@rows(where=one_of_each)
@pytest.mark.parametrize("shape", [(LENGTH,), (1, HEADS, 1, LENGTH)], ids=str)
def test_padding_mask_broadcasts(row, shape):
    mask = np.random.default_rng(0).random(shape) < 0.6
    call = inputs() | {"mask": mask}
    params = parameters(row.op, call)
    close(forward(row.op, params, as_jax(call)), expected(row, params, call))


@pytest.mark.sampled(8)
@rows(where=lambda case: case.pairs and case.masks)
@pytest.mark.parametrize(
    "shape",
    [(LENGTH, LENGTH), (BATCH, 1, LENGTH, 1), (1, HEADS, LENGTH, LENGTH)],
    ids=str,
)
def test_general_mask_broadcasts(row, shape):
    """Any shape broadcastable to `[batch, heads, q_len, kv_len]`, here float: attends where above zero, -1 hides."""
    mask = np.random.default_rng(0).choice([-1.0, 0.0, 0.5], size=shape, p=[0.2, 0.2, 0.6]).astype(np.float32)
    call = inputs() | {"mask": mask}
    params = parameters(row.op, call)
    close(forward(row.op, params, as_jax(call)), expected(row, params, call))


@pytest.mark.sampled(2)
@rows(where=lambda case: case.pairs, implementations=BOTH)
@pytest.mark.parametrize("shape", [(LENGTH, LENGTH), (BATCH, 1, 1, LENGTH)], ids=str)
def test_bias_broadcasts_and_its_gradient_sums_back(row, shape):
    call = inputs() | {"bias": np.random.default_rng(1).normal(size=shape).astype(np.float32)}
    cotangent = conformance.random_cotangent(call)
    params = parameters(row.op, call)
    out, *gradients = forward_and_gradients(row.op, params, as_jax(call), cotangent)
    close(out, expected(row, params, call))
    conformance.check_gradients(row, params, call, cotangent, gradients)


@pytest.mark.sampled(5)
@rows(positions=True, implementations=BOTH)
def test_padded_places_cannot_move_the_result(row):
    """Real outputs are the same whatever stands in padding, and padded keys and values get exactly no gradient."""
    call = inputs()
    params = parameters(row.op, call)
    garbage = dict(call)
    hidden = ~PADDED[:, 0, 0]
    for name in call:
        other = np.random.default_rng(8).normal(size=call[name].shape).astype(np.float32) * 50
        garbage[name] = np.where(hidden[:, :, None, None], other, call[name])
    cotangent = np.where(hidden[:, :, None, None], 0, conformance.random_cotangent(call))
    first = forward_and_gradients(row.op, params, as_jax(call | {"mask": PADDED}), cotangent)
    second = forward_and_gradients(row.op, params, as_jax(garbage | {"mask": PADDED}), cotangent)
    close(first[0][~hidden], np.asarray(second[0][~hidden]), rounding(row))
    for one, two in zip(jax.tree.leaves(first[1:]), jax.tree.leaves(second[1:]), strict=True):
        close(two, np.asarray(one), 1e-5)
    for name in ("key", "value"):
        assert not np.any(np.asarray(second[2][name])[hidden]), f"gradient reaches padded {name}"


@pytest.mark.sampled(2)
@rows(causal=(False, True), where=lambda case: case.appendable)
def test_appended_padding_changes_nothing(row):
    check_appended_padding(row)


@rows(causal=(True,), where=lambda case: case.causal and not case.appendable)
def test_appended_padding_changes_nothing_where_the_pattern_is_causal(row):
    check_appended_padding(row)


def check_appended_padding(row):
    call = inputs(q_len=40)
    params = parameters(row.op, call)
    short = forward(row.op, params, as_jax(call | {"mask": padding([40, 13], 40)}))
    longer = {name: np.pad(x, [(0, 0), (0, 8), (0, 0), (0, 0)], constant_values=3.0) for name, x in call.items()}
    long = forward(row.op, params, as_jax(longer | {"mask": padding([40, 13], 48)}))
    close(long[:, :40], np.asarray(short), rounding(row))


def rounding(row):
    """How far float32 sums in another order may differ: terms that are not weights may be far larger than their sum."""
    return 1e-6 if row.case.normalized else 1e-5


@pytest.mark.sampled(5)
@rows(positions=True, causal=(False, True), implementations=BOTH)
def test_fully_padded_example_gives_zeros_and_no_gradient(row):
    call = inputs() | {"mask": padding([LENGTH, 0], LENGTH)}
    params = parameters(row.op, call)
    cotangent = conformance.random_cotangent(call)
    out, params_gradient, gradients = forward_and_gradients(row.op, params, as_jax(call), cotangent)
    assert not np.any(np.asarray(out)[1]), "output of a fully padded example"
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all() and not np.any(np.asarray(gradient)[1]), name
        assert np.any(np.asarray(gradient)[0]) or not (name == "value" or row.case.keys), name
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params_gradient))


@pytest.mark.sampled(6)
@rows(positions=True, causal=(True,), implementations=BOTH)
def test_no_gradient_from_the_future(row):
    """The output at t has a gradient of exactly zero to what is after t, and to every other query."""
    call = inputs() | {"mask": padding([LENGTH, LENGTH], LENGTH)}
    params = parameters(row.op, call)
    for t in (0, 8, 30):
        cotangent = np.zeros(call["query"].shape, np.float32)
        cotangent[:, t] = 1.0
        out, _, gradients = forward_and_gradients(row.op, params, as_jax(call), cotangent)
        for name in ("key", "value"):
            assert not np.any(np.asarray(gradients[name])[:, t + 1 :]), f"{name} after {t}"
        if np.any(out[:, t]):  # the first queries of some see nothing yet
            assert np.any(np.asarray(gradients["value"])[:, : t + 1])
        others = np.delete(np.asarray(gradients["query"]), t, axis=1)
        assert not np.any(others[:, t:] if row.case.mixes_queries else others)


@pytest.mark.sampled(2)
@rows(where=lambda case: case.pairs and case.masks, implementations=BOTH)
def test_segments_as_an_array_and_as_a_pair(row):
    """The pair (query ids, key ids) with different ids on both sides; a segment of -1 is a segment like any other."""
    rng = np.random.default_rng(2)
    q_ids, k_ids = (rng.integers(-1, 2, (BATCH, LENGTH)).astype(np.int32) for _ in range(2))
    for ids in (q_ids, (q_ids, k_ids)):
        call = inputs() | {"segment_ids": ids}
        params = parameters(row.op, call)
        close(forward(row.op, params, jax.tree.map(np.asarray, call)), expected(row, params, call))


@rows(where=lambda case: case.pairs and not case.local)
def test_packed_examples_equal_separate_ones(row):
    """Two segments that meet inside a block: where the pattern is dense, packing is as good as separate calls."""
    call = inputs(batch=1)
    ids = (np.arange(LENGTH) >= 13).astype(np.int32)[None]
    packed = forward(row.op, {}, as_jax(call | {"segment_ids": ids}))
    for part in (slice(0, 13), slice(13, LENGTH)):
        alone = forward(row.op, {}, as_jax({name: x[:, part] for name, x in call.items()}))
        close(packed[:, part], np.asarray(alone))


@rows(where=lambda case: not case.local and case.pairs)
def test_mask_that_hides_every_key_of_one_query(row):
    mask = np.ones((1, 1, LENGTH, LENGTH), bool)
    mask[..., 5, :] = False
    out = forward(row.op, {}, as_jax(inputs() | {"mask": mask}))
    assert not np.any(np.asarray(out)[:, 5]) and np.all(np.any(np.asarray(out), axis=(2, 3))[:, [4, 6]])


@pytest.mark.sampled(7)
@rows()
@pytest.mark.parametrize("shape", [(), (BATCH, 1, 1, 1), (1, HEADS, 1, 1)], ids=str)
def test_a_mask_that_broadcasts_over_keys_and_hides_nothing_changes_nothing(row, shape):
    call = inputs()
    params = parameters(row.op, call)
    masked = forward(row.op, params, as_jax(call | {"mask": np.ones(shape, bool)}))
    close(masked, forward(row.op, params, as_jax(call)))
