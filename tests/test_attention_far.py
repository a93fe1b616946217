"""Tiles beyond the reach of a position term: one value for all their keys, and nothing else may show."""

import conformance
import jax
import numpy as np
import pytest
from conformance import as_jax, close, expected, forward, forward_and_gradients, inputs, parameters
from test_attention_cost import counted

from xformer.attention import (
    ALiBi,
    BigBird,
    Full,
    MusicRelative,
    Rotary,
    Shape,
    Shaw,
    T5Bias,
    Window,
)
from xformer.attention.engine import relative_tiles, tile_policy

LENGTH = 150
POSITIONS = [Shaw(20), Shaw(20, values=False), T5Bias(num_buckets=8, max_distance=20)]
OPS = {
    "full": Full(),
    "causal": Full(causal=True),
    "window": Window(left=90, right=70),
    "bigbird": BigBird(block_size=8, num_random_blocks=6, num_window_blocks=1, num_global_blocks=1),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of at most 16 x 8, so that 150 tokens have some of all kinds."""
    monkeypatch.setattr(tile_policy, "MAX_TILE", (16, 8))


def row_of(op, position):
    case = next(case for case in conformance.CASES if type(case.op) is type(op))
    return conformance.with_fields(conformance.Row(case.name, case, op), position=position)


BY_ROW = [(name, position, relative_tiles.LONGEST_ROW) for position in POSITIONS for name in OPS]
BY_TILE = [("full", POSITIONS[0], 8), ("bigbird", POSITIONS[0], 8), ("causal", POSITIONS[1], 8)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "position", "longest"),
    BY_ROW + BY_TILE,
    ids=lambda x: f"rows up to {x}" if isinstance(x, int) else str(x),
)
def test_values_and_gradients(name, position, longest, monkeypatch):
    """Products with tables by row, and, where rows would be longer than 8 distances, by tile."""
    monkeypatch.setattr(relative_tiles, "LONGEST_ROW", longest)
    jax.clear_caches()  # traces don't know of the constant
    row = row_of(OPS[name], position)
    groups = row.op.tile_plan(LENGTH, LENGTH, 4).groups
    if name != "bigbird":  # random blocks: another number of far ones in each row
        assert any(group.distant_chunks for group in groups) and not all(
            group.distant_chunks == group.key_tiles.shape[2] for group in groups
        )
    call = inputs(q_len=LENGTH, batch=1)
    call["mask"] = conformance.padding([LENGTH - 9], LENGTH)
    params, cotangent = parameters(row.op, call), conformance.random_cotangent(call)
    out, *gradients = forward_and_gradients(row.op, params, as_jax(call), cotangent)
    close(out, expected(row, params, call))
    conformance.check_gradients(row, params, call, cotangent, gradients)
    jax.clear_caches()


@pytest.mark.parametrize("position", POSITIONS, ids=str)
@pytest.mark.parametrize("offset", [7, 100])
def test_queries_somewhere_in_the_sequence(position, offset):
    """Which tiles are far depends on the offset; one known only at run time is taken for any."""
    row = row_of(Full(), position)
    call = inputs(q_len=40, kv_len=LENGTH, batch=1)
    params = parameters(row.op, call)
    want = expected(row, params, call, offset)
    assert any(group.distant_chunks for group in row.op.tile_plan(40, LENGTH, 4, query_offset=offset).groups)
    close(forward(row.op, params, as_jax(call), (("query_offset", offset),)), want)
    assert not any(group.distant_chunks for group in row.op.tile_plan(40, LENGTH, 4, query_offset=None).groups)
    close(forward(row.op, params, as_jax(call | {"query_offset": np.int32(offset)})), want)


@pytest.mark.parametrize("position", [None, ALiBi(), Rotary(), MusicRelative(LENGTH)], ids=str)
def test_terms_without_a_reach_have_no_far_tiles(position):
    plan = Full(position=position).tile_plan(LENGTH, LENGTH, 4)
    assert not any(group.distant_chunks for group in plan.groups)


@pytest.mark.parametrize("name", OPS)
def test_far_chunks_hold_far_full_tiles_and_come_first(name):
    reach = 20
    plan = row_of(OPS[name], Shaw(reach)).op.tile_plan(LENGTH, LENGTH, 4)
    for group in plan.groups:
        assert group.distant_chunks <= group.unmasked_chunks
        columns, tests = group.key_tiles[:, :, : group.distant_chunks], group.mask_ids[:, :, : group.distant_chunks]
        assert not tests.any()
        first_query, first_key = group.query_tiles[:, None, None] * plan.q_block, columns * plan.kv_block
        ahead = first_key - (first_query + plan.q_block - 1)
        behind = first_query - (first_key + plan.kv_block - 1)
        assert (np.maximum(ahead, behind) >= reach).all()


@pytest.mark.parametrize("longest", [relative_tiles.LONGEST_ROW, 8], ids=["by row", "by tile"])
def test_cost_counts_what_far_tiles_need(longest, monkeypatch):
    monkeypatch.setattr(relative_tiles, "LONGEST_ROW", longest)
    jax.clear_caches()
    shape = Shape(2, LENGTH, LENGTH, 4, 8, 2)
    for op in OPS.values():
        op = row_of(op, Shaw(20)).op
        assert op.cost(shape).flops == counted(op, shape).flops
    jax.clear_caches()
