"""Host plans: the pairs of the pattern, sizes that follow from lengths alone, at a cost linear in what is listed."""

import dataclasses
import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xformer import cost
from xformer.attention import ALiBi, BigBird, Full, Shape, Window
from xformer.attention import pattern as patterns
from xformer.attention.engine import plan_making
from xformer.attention.engine.plan_making import make_tile_plan
from xformer.attention.engine.tile_listing import Grid, list_tiles
from xformer.attention.random_blocks import Random
from xformer.attention.spans import Spans, expand

ETC = BigBird(4, num_random_blocks=2, num_window_blocks=1, num_global_blocks=1, num_global_tokens=6, seed=1)
OPS = {
    "bigbird": BigBird(8, seed=2),
    "etc": ETC,
    "bigbird-7": BigBird(7, num_random_blocks=2, num_global_blocks=3),
    "window": Window(13, 5),
    "full": Full(),
}
LONGFORMER = patterns.Window(6, 6) | patterns.Global(5, 2, 120)


def pairs_of(plan, q_len, kv_len):
    """How often a plan attends to each pair, int `[heads, q_len, kv_len]`."""
    heads = plan.groups[0].key_tiles.shape[0]
    n_q, n_k = -(-q_len // plan.q_block), -(-kv_len // plan.kv_block)
    out = np.zeros((heads, n_q, n_k, plan.q_block, plan.kv_block), int)
    for group in plan.groups:
        for place, query_tile in enumerate(group.query_tiles):
            for head in range(heads):
                listed = zip(group.key_tiles[head, place].ravel(), group.mask_ids[head, place].ravel(), strict=True)
                for key_tile, mask_id in listed:
                    out[head, query_tile, key_tile] += plan.pair_masks[mask_id]
    out = out.swapaxes(2, 3).reshape(heads, n_q * plan.q_block, n_k * plan.kv_block)
    return out[:, :q_len, :kv_len]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("length", [1, 30, 117])
def test_a_plan_attends_to_every_pair_of_the_pattern_once(name, length, causal):
    op = dataclasses.replace(OPS[name], causal=causal)
    plan = op.tile_plan(length, length, 3)
    want = op.pattern(length, length, 3)
    np.testing.assert_array_equal(pairs_of(plan, length, length), np.broadcast_to(want, (len(want), length, length)))


@pytest.mark.parametrize("sizes", [(16, 16), (8, 16), (5, 3), (40, 7), (10, 5)], ids=str)
@pytest.mark.parametrize("offset", [0, 9])
def test_any_union_and_any_tile(sizes, offset):
    """Tiles that divide blocks or don't, queries that start anywhere, patterns of tokens and of blocks together."""
    near = patterns.Window(1, 0, 10)
    drawn = near | patterns.Global(1, 1, 12, 10) | Random(2, 12, 10, 2, near | patterns.Global(1, 1, 12, 10), 3)
    for pattern in (LONGFORMER, LONGFORMER & patterns.Causal(), drawn, drawn & patterns.Causal(), LONGFORMER | drawn):
        plan = make_tile_plan(pattern, 100, 120, *sizes, 32, offset)
        want = patterns.dense(pattern, 100, 120, query_offset=offset)
        np.testing.assert_array_equal(pairs_of(plan, 100, 120), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", [0, 13])
@pytest.mark.parametrize("op", [BigBird(8), ETC, BigBird(7, num_global_tokens=9)], ids=str)
def test_shapes_do_not_depend_on_the_seed(op, offset, causal):
    """Nor on the layer: what is static in a plan is one for all draws, global tokens included."""
    plans = [
        dataclasses.replace(op, seed=seed, causal=causal, position=ALiBi()).tile_plan(70, 90, 2, query_offset=offset)
        for seed in range(8)
    ]
    described = {(jax.tree.structure(plan), tuple(map(np.shape, jax.tree.leaves(plan)))) for plan in plans}
    assert len(described) == 1
    assert len({tuple(group.key_tiles.tobytes() for group in plan.groups) for plan in plans}) > 1


def test_layers_have_the_plans_that_they_have_alone():
    op = dataclasses.replace(ETC, num_random_blocks=1)
    layers = op.plans(Shape(1, 90, 90, 2, 8), 3)
    for index in range(3):
        alone = op.at_layer(index).tile_plan(90, 90, 2)
        mine = jax.tree.map(lambda x, index=index: x[index], layers.tiles)
        jax.tree.map(np.testing.assert_array_equal, mine, alone)


@pytest.mark.parametrize("op", [BigBird(8), BigBird(8, causal=True), ETC], ids=str)
def test_layers_share_what_they_do_not_draw(op, monkeypatch):
    """Planned together or one by one: for all layers and heads what one head of one layer has besides is listed."""
    listed = []

    def list_and_count(*args):
        tiles, heads = list_tiles(*args)
        listed.append(len(tiles.line))
        return tiles, heads

    monkeypatch.setattr(plan_making, "list_tiles", list_and_count)

    def entries(make):
        listed.clear()
        make_tile_plan.cache_clear()
        plan_making.share.cache_clear()
        make()
        return sum(listed)

    one = entries(lambda: op.tile_plan(400, 400, 3))
    assert 0 < one < op.tile_plan(400, 400, 1).num_tiles
    assert entries(lambda: op.plans(Shape(1, 400, 400, 3, 8), 12)) == one
    assert entries(lambda: [op.at_layer(layer).tile_plan(400, 400, 3) for layer in range(12)]) == one


def listed(op, length):
    """Entries of a plan, and the most bytes that the host held while it was made."""
    op.tile_plan(length, length, 4)  # what is made once, imports included
    make_tile_plan.cache_clear()
    tracemalloc.start()
    plan = op.tile_plan(length, length, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return sum(group.key_tiles.size for group in plan.groups), peak


@pytest.mark.parametrize(
    "op",
    [
        BigBird(16),
        BigBird(16, causal=True),
        BigBird(16, num_global_tokens=40),
        Window(32, 32),
        Window(32, causal=True),
    ],
    ids=str,
)
def test_the_cost_of_a_plan_is_linear_in_what_it_lists(op):
    """Four times the length: four times the entries, and no more bytes each."""
    (few, small), (many, large) = listed(op, 16384), listed(op, 65536)
    assert 3.5 < many / few < 5, (few, many)
    assert large < 5 * small, (small, large)
    assert large < 400 * many, (large, many)


def test_a_block_of_513_is_like_one_of_512():
    sizes = {}
    for block in (512, 513):
        plan = BigBird(block).tile_plan(65536, 65536, 2)
        sizes[block] = plan.num_tiles * plan.q_block * plan.kv_block, plan.pair_masks.size
    assert sizes[513][0] < 1.1 * sizes[512][0] and sizes[513][1] <= sizes[512][1]


def test_each_distinct_mask_is_kept_once():
    """However long: a window has the masks of its two edges, whichever query tile they belong to."""
    for length in (4096, 65536):
        masks = Window(100, 30).tile_plan(length, length, 4).pair_masks
        assert len({mask.tobytes() for mask in masks}) == len(masks) <= 8


def test_a_list_is_no_longer_than_what_it_holds():
    grid = Grid(4096, 4096, 64, 64)
    tiles, heads = list_tiles(patterns.Window(64, 64) & patterns.Causal(), grid)
    assert heads == 1 and len(tiles.line) == 2 * 64 - 1 and not tiles.whole.any()


@pytest.mark.parametrize(
    ("spans", "touched", "covered"),
    [
        ([(0, 9)], [0, 1, 2], [0, 1]),  # tiles of 4 among 22 keys, the last of which has 2
        ([(6, 30), (1, 2)], [0, 1, 2, 3, 4, 5], [2, 3, 4, 5]),
        ([(4, 5), (6, 7), (20, 21)], [1, 5], [1, 5]),  # two spans that hold a tile together
        ([(5, 4), (-3, -1), (22, 40)], [], []),
        ([(8, 11), (8, 11), (9, 15)], [2, 3], [2, 3]),
    ],
    ids=str,
)
def test_tiles_of_spans(spans, touched, covered):
    ends = Spans.of(*((np.asarray([first]), last) for first, last in spans))
    assert expand(ends.touched(4, 22))[1].tolist() == touched
    assert expand(ends.covered(4, 22))[1].tolist() == covered


@pytest.mark.parametrize("op", [Window(64, 64), Window(64, 0, causal=True), Window(5, 90, position=ALiBi())], ids=str)
def test_a_decoded_token_costs_what_it_may_see(op):
    """At an offset known only at run time, and at one known before: the tiles that a window can touch, not all."""
    shape = Shape(1, 1, 4096, 4, 16)
    query, key = (jax.ShapeDtypeStruct((1, length, 4, 16), "float32") for length in (1, 4096))
    run = lambda q, k, v, offset: op(q, k, v, query_offset=offset)
    traced = cost.count(run, query, key, key, jax.ShapeDtypeStruct((), "int32")).flops
    known = cost.count(lambda q, k, v: run(q, k, v, 2000), query, key, key).flops
    visible = 4 * 4 * 16 * (1 + op.left + (0 if op.causal else op.right))
    assert traced == op.cost(shape).flops <= 2 * visible + 4 * 4 * 16 * 64
    assert known <= traced


def test_a_query_tile_is_no_longer_than_the_queries():
    for op in (Window(64, 64), BigBird(causal=True), BigBird()):
        plan = op.tile_plan(1, 4096, 2, query_offset=2000)
        assert plan.q_block == 1 and plan.num_tiles <= 9


@pytest.mark.parametrize("q_len", [1, 16])
@pytest.mark.parametrize("etc", [0, 40])
def test_a_decoded_token_of_bigbird_costs_its_own_row(etc, q_len):
    """At an offset known only at run time: window, global and random blocks of one or two rows, at any length."""
    op, costs = BigBird(16, num_global_tokens=etc, causal=True), []
    for length in (1024, 4096):
        query, key = (jax.ShapeDtypeStruct((1, size, 4, 16), "float32") for size in (q_len, length))
        run = lambda q, k, v, offset: op(q, k, v, query_offset=offset)
        costs.append(cost.count(run, query, key, key, jax.ShapeDtypeStruct((), "int32")).flops)
        assert costs[-1] == op.cost(Shape(1, q_len, length, 4, 16)).flops
    rows = 1 if q_len == 1 else 2
    tiles = 1 + rows + 1 + -(-etc // 16) + 3 * rows
    assert costs[0] == costs[1] == 4 * 4 * 16 * q_len * 16 * tiles


def test_a_query_that_may_see_all_keys_visits_all_tiles():
    """Queries of a global block do, and only at run time is it known which ones these are."""
    assert BigBird(16).cost(Shape(1, 1, 4096, 4, 16)).flops == Full().cost(Shape(1, 1, 4096, 4, 16)).flops
    local = BigBird(16, num_global_blocks=0)
    assert local.tile_plan(1, 4096, 4, query_offset=None).num_tiles == 3 + 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "op",
    [
        Window(9, 3),
        Window(9, 0, causal=True),
        Window(100, 100),
        BigBird(8, causal=True),
        BigBird(8, num_global_blocks=0, position=ALiBi()),
        dataclasses.replace(ETC, causal=True),
        BigBird(8),
    ],
    ids=str,
)
def test_calls_at_an_offset_known_at_run_time(op):
    """Anywhere in the sequence, the ends included: as at the same offset known before; so are gradients."""
    length, q_len = 150, 5
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (1, q_len, 4, 8), (1, length, 2, 8), (1, length, 2, 8)
    query, key, value = (jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))

    def run(op, key, offset):
        return jax.value_and_grad(lambda key: (op(query, key, value, query_offset=offset) ** 2).sum())(key)

    traced = jax.jit(functools.partial(run, op))
    dense = jax.jit(functools.partial(run, dataclasses.replace(op, implementation="reference")))
    for offset in (0, 1, 31, 77, length - q_len):
        want, got = dense(key, np.int32(offset)), traced(key, np.int32(offset))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)
    batch = jnp.concatenate([query, 2 * query, -query]), *(jnp.repeat(x, 3, 0) for x in (key, value))
    attend = lambda op: jax.jit(functools.partial(op, *batch))(query_offset=jnp.asarray([31, 0, 145]))
    np.testing.assert_allclose(attend(op), attend(dataclasses.replace(op, implementation="reference")), atol=2e-5)


@pytest.mark.parametrize(
    ("op", "positions", "said"),
    [
        (BigBird(32, num_random_blocks=64), 512, "512 positions every query sees every key"),
        (BigBird(2147483647, causal=True), 512, "every key up to its own"),
        (Window(511, 600), 512, "full attention"),
        # Of 16 blocks the second sees itself, its neighbours and the last.
        (BigBird(32, num_random_blocks=11), 512, None),
        (BigBird(32, num_random_blocks=12), 512, "full attention"),
        (Window(511, 510), 512, None),
        (Full(), 512, None),
    ],
    ids=str,
)
def test_remarks_say_what_is_computed(op, positions, said):
    remarks = op.remarks(positions)
    assert len(remarks) == (said is not None)
    assert all("\n" not in remark and said in remark and str(op) in remark for remark in remarks)
    assert op.pattern(positions, positions, 1)[0].sum() < positions**2 or said or isinstance(op, Full)
