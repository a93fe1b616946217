"""Causality, decoding step by step, and refusals where a position is unknown."""

import dataclasses

import conformance
import numpy as np
import pytest
from conformance import (
    BOTH,
    HEADS,
    KV_HEADS,
    LENGTH,
    as_jax,
    close,
    expected,
    forward,
    forward_and_gradients,
    inputs,
    parameters,
    refuses,
    rows,
)

from xformer.attention import BigBird

DECODED = 21


@pytest.mark.sampled(10)
@rows(causal=(True,))
def test_the_past_does_not_see_a_changed_future(row):
    call = inputs()
    params = parameters(row.op, call)
    changed = {name: np.array(x) for name, x in call.items()}
    for x in changed.values():
        x[:, 17:] += 10.0
    for extra in ({}, {"mask": conformance.padding([LENGTH, 25], LENGTH)}):
        before, after = (forward(row.op, params, as_jax(c | extra)) for c in (call, changed))
        np.testing.assert_array_equal(before[:, :17], after[:, :17])


@pytest.mark.sampled(4)
@rows(causal=(True,), where=lambda case: case.causal)
def test_the_flag_equals_the_field(row):
    call = inputs() | {"mask": conformance.padding([LENGTH, 25], LENGTH)}
    params = parameters(row.op, call)
    by_flag = forward(dataclasses.replace(row.op, causal=False), params, as_jax(call), (("is_causal", True),))
    np.testing.assert_array_equal(by_flag, forward(row.op, params, as_jax(call)))
    np.testing.assert_array_equal(by_flag, forward(row.op, params, as_jax(call), (("is_causal", True),)))


@pytest.mark.sampled(6)
@rows(causal=(False,), where=lambda case: case.causal and case.pairs and case.masks)
def test_a_causal_mask_only_cuts(row):
    """Dense causal mask: the bidirectional pattern and nothing after the query."""
    call = inputs() | {"mask": np.tril(np.ones((1, 1, LENGTH, LENGTH), np.float32))}
    params = parameters(row.op, call)
    close(forward(row.op, params, as_jax(call)), expected(row, params, call))


@rows(where=lambda case: not case.causal)
def test_variants_that_mix_the_length_refuse_causal(row):
    call = inputs()
    params = parameters(row.op, call)
    with refuses((NotImplementedError, ValueError), "causal"):
        conformance.attend(row.op, params, as_jax(call), is_causal=True)
    with refuses((NotImplementedError, ValueError), "causal"):
        op = dataclasses.replace(row.op, causal=True)
        conformance.attend(op, params, as_jax(call))


@pytest.mark.sampled(5)
@rows(positions=True, causal=(True,), where=lambda case: case.offsets)
def test_decoding_step_by_step_equals_the_full_call(row):
    """One query at a time with a traced offset over a cache whose future still holds garbage; then seven at a time."""
    call = inputs(q_len=DECODED, kv_heads=HEADS if row.case.tied else KV_HEADS)
    call["key"] = call["query"] if row.case.tied else call["key"]
    params = parameters(row.op, call)
    full = np.asarray(forward(row.op, params, as_jax(call)))
    for width in (1, 7) if getattr(row.op, "position", None) is None else (1,):
        for start in range(0, DECODED, width):
            step = call | {"query": call["query"][:, start : start + width], "query_offset": np.int32(start)}
            for name in ("key", "value"):
                step[name] = np.where(np.arange(DECODED)[:, None, None] < start + width, call[name], 99.0)
            close(forward(row.op, params, as_jax(step)), full[:, start : start + width], message=f"step {start}")


@pytest.mark.parametrize("tokens", [0, 6])
def test_causal_bigbird_decodes_over_a_cache_that_grows(tokens):
    """A row's keys depend on its position alone, so the keys after it need not be there yet, not even as padding."""
    op = BigBird(
        4, num_random_blocks=1, num_window_blocks=1, num_global_blocks=2, num_global_tokens=tokens, causal=True
    )
    call = as_jax(inputs(q_len=LENGTH))
    full = np.asarray(forward(op, {}, call))
    for position in (0, 3, 4, 17, 30, LENGTH - 1):
        seen = {name: x[:, : position + 1] for name, x in call.items()}
        seen["query"] = seen["query"][:, -1:]
        step = forward(op, {}, seen, (("query_offset", position),))
        close(step, full[:, position : position + 1], message=f"step {position}")


@pytest.mark.sampled(5)
@rows(positions=True, where=lambda case: case.causal and case.offsets)
def test_an_offset_of_each_example(row):
    call = inputs(q_len=6, kv_len=LENGTH, seed=3)
    params = parameters(row.op, call)
    offsets = np.array([3, 31], np.int32)
    close(forward(row.op, params, as_jax(call | {"query_offset": offsets})), expected(row, params, call, offsets))


@pytest.mark.sampled(12)
@rows(where=lambda case: case.causal and case.offsets, implementations=BOTH)
def test_a_static_offset(row):
    call = inputs(q_len=6, kv_len=LENGTH, seed=3)
    params = parameters(row.op, call)
    close(forward(row.op, params, as_jax(call), (("query_offset", 31),)), expected(row, params, call, 31))


@pytest.mark.sampled(5)
@rows(where=lambda case: case.pairs)
def test_offset_with_every_other_argument_and_gradients(row):
    rng = np.random.default_rng(4)
    call = inputs(q_len=6, kv_len=LENGTH, seed=3)
    call |= {"mask": rng.random((2, 1, 6 if row.case.masks else 1, LENGTH)) < 0.8}
    call |= {"bias": rng.normal(size=(1, 4, 6, LENGTH)).astype(np.float32)}
    cotangent = conformance.random_cotangent(call)
    params = parameters(row.op, call)
    out, *gradients = forward_and_gradients(row.op, params, as_jax(call | {"query_offset": np.int32(20)}), cotangent)
    close(out, expected(row, params, call, 20))
    conformance.check_gradients(row, params, call, cotangent, gradients, offset=20)


@pytest.mark.sampled(25)
@rows(positions=True, causal=(False, True), where=lambda case: case.causal and case.offsets)
def test_unknown_position_is_refused(row):
    """q_len != kv_len without an offset: ValueError where positions matter, and only there."""
    call = as_jax(inputs(q_len=5, kv_len=9))
    params = parameters(row.op, call)
    if not row.local:
        assert conformance.attend(row.op, params, call).shape == call["query"].shape
        return
    with refuses(ValueError, "query_offset"):
        conformance.attend(row.op, params, call)


def test_causal_flag_on_a_call_counts_too():
    """Full attends over any lengths, but causal needs the query's position, by flag as well as by field."""
    op = conformance.CASES[0].op
    with refuses(ValueError, "query_offset"):
        op(**as_jax(inputs(q_len=5, kv_len=9)), is_causal=True)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", [case for case in conformance.CASES if case.causal], ids=lambda case: case.name)
def test_causal_without_and_with_masks_combine(case):
    """Causal alone, with padding, with segments, with both."""
    row = conformance.with_fields(conformance.Row(case.name, case, case.op), causal=True)
    ids = (np.arange(LENGTH) >= 19).astype(np.int32)[None].repeat(2, axis=0)
    masks = {"mask": conformance.padding([LENGTH, 30], LENGTH)}
    for extra in ({}, masks, {"segment_ids": ids}, masks | {"segment_ids": ids}):
        if "segment_ids" in extra and not (case.pairs and case.masks):
            continue
        call = inputs() | extra
        params = parameters(row.op, call)
        close(forward(row.op, params, as_jax(call)), expected(row, params, call))
