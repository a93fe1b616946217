"""Variants that are a union of parts in orders of their own: the parts, what they cost, and where they do not serve."""

import dataclasses
import functools

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from conformance import BOTH, as_jax, close, forward, inputs, padding, parameters, refuses, sampled
from test_attention_plans import pairs_of

from xformer import cost
from xformer.attention import Full, Local, Longformer, Options, Shape, Shaw, Sparse, T5Bias
from xformer.attention import pattern as patterns
from xformer.attention.engine.tile_policy import plan_tiles

OPS = (
    *(
        Longformer(window, dilation, count)
        for window, dilation, count in ((6, 1, 2), (4, 3, 0), (40, 7, 5), (2, 99, 1))
    ),
    Longformer(4, (1, 2, 2, 5), 3),
    *(Sparse(stride, heads=heads) for stride in (1, 7, 99) for heads in ("merged", "split")),
    *(Sparse(stride, "fixed", size) for stride, size in ((8, 1), (5, 5), (99, 3))),
    Sparse(6, "fixed", 4, "split"),
)


GLOBAL = np.zeros((2, 45), bool)
GLOBAL[0, [0, 7, 30]] = GLOBAL[1, [1, 44]] = True


def row_with(op, tokens):
    reference = functools.partial(references.longformer, global_tokens=tokens)
    return conformance.Row("global", conformance.Case("global", op, reference), op)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_parts_are_disjoint_and_make_up_the_pattern(op, causal):
    """Each pair of the pattern is in one part, and in the part's tiles; so are the tiles in the order of positions."""
    op, heads = dataclasses.replace(op, causal=causal), 4
    for length in (1, 16, 37, 130):
        want = np.broadcast_to(op.pattern(length, length, heads), (heads, length, length))
        listed = pairs_of(op.tile_plan(length, length, heads), length, length)
        np.testing.assert_array_equal(listed, want[: len(listed)])
        total = np.zeros((heads, length, length), int)
        for own, parts in op.parts(length, heads):
            for part in parts:
                places = [order.positions(length) for order in (part.queries, part.keys)]
                plan = plan_tiles(part.pattern, *map(len, places), heads, block=part.block)
                (found,) = pairs_of(plan, *map(len, places))
                at_q, at_k = np.nonzero(found)
                real = places[0][at_q] < length
                for head in range(heads) if own is None else own:
                    np.add.at(total[head], (places[0][at_q[real]], places[1][at_k[real]]), found[at_q, at_k][real])
        np.testing.assert_array_equal(total, want)


def test_a_dilated_window_costs_what_a_dense_one_does():
    """Tiles of the classes are as many as those of the window, but for padding; so for every kind of head."""
    shape = Shape(1, 16384, 16384, 8, 64)
    flops = {dilation: Longformer(512, dilation).cost(shape).flops for dilation in (1, 2, 4, 8)}
    assert all(0.9 * flops[1] < cost <= 1.001 * flops[1] for cost in flops.values()), flops
    assert flops[1] < 1.05 * Longformer(512, num_global_tokens=0).cost(shape).flops
    mixed = Longformer(512, (1, 1, 2, 2, 4, 4, 8, 8)).cost(shape).flops
    assert mixed == sum(flops.values()) // 4


@pytest.mark.parametrize("kind", ["strided", "fixed"])
def test_strides_cost_what_they_list(kind):
    """Length x square root of the length, with the stride and its summaries of either kind."""
    length, stride = 4096, 64
    op = Sparse(stride, kind, summary=1 if kind == "fixed" else None)
    pairs = length * (2 * stride + length / stride) if kind == "strided" else length * (stride + length / stride)
    assert op.cost(Shape(1, length, length, 1, 8)).flops <= 1.35 * 4 * 8 * pairs


def test_a_window_counts_both_sides():
    (pattern,) = Longformer(window=512, num_global_tokens=0).pattern(1000, 1000, 1)
    assert np.flatnonzero(pattern[500]).tolist() == list(range(500 - 256, 500 + 256 + 1))


@pytest.mark.parametrize(
    "op", [Longformer(4, (1, 2, 2, 5), 2), Sparse(7), Sparse(6, "fixed", 2, "split"), Local(7)], ids=str
)
def test_queries_that_start_elsewhere_have_the_same_numbers(op):
    """An offset, known or not, and other lengths than those of the keys: visited in the order of positions."""
    op = dataclasses.replace(op, causal=True)
    call = inputs(q_len=45)
    whole = np.asarray(forward(op, {}, call), np.float64)
    some = call | {"query": call["query"][:, 20:27]}
    for offset in (20, np.int32(20) * np.ones((), np.int32)):
        close(forward(op, {}, some | {"query_offset": offset}), whole[:, 20:27])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_their_own_dilation(causal):
    """Three heads of one dilation, of which two share a key head: with every argument, and all gradients."""
    op = Longformer(4, (2, 2, 2, 5), 1, position=T5Bias(num_buckets=8, max_distance=20), causal=causal)
    row = row_with(op, None)
    call = conformance.everything(row)
    params, cotangent = parameters(op, call), conformance.random_cotangent(call)
    out, *gradients = conformance.forward_and_gradients(op, params, as_jax(call), cotangent)
    close(out, conformance.expected(row, params, call))
    conformance.check_gradients(row, params, call, cotangent, gradients)


def test_short_inputs_of_a_split_head_without_summary():
    """No summary yet: every second head sees nothing and has zeros."""
    op, call = Sparse(16, "fixed", 2, "split"), inputs(q_len=9) | {"mask": padding([9, 4], 9)}
    out = np.asarray(forward(op, parameters(op, call), call))
    assert not out[:, :, 1::2].any() and out[:, :, ::2].any()


@sampled("implementation", BOTH, keep=["xla"])
@sampled("causal", [False, True], keep=[False])
@sampled("most", [3, 2, 64], keep=[3])
def test_global_tokens_of_each_example(most, causal, implementation):
    """Gathered, or every pair visited where an example has too many; with every other argument, and all gradients."""
    fields = {"position": Shaw(5, values=True), "causal": causal, "implementation": implementation}
    op = Longformer(4, 3, max_global_tokens=most, **fields)
    row = row_with(op, GLOBAL)
    call = conformance.everything(row) | {"global_tokens": GLOBAL}
    params, cotangent = parameters(op, call), conformance.random_cotangent(call)
    out, *gradients = conformance.forward_and_gradients(op, params, as_jax(call), cotangent)
    close(out, conformance.expected(row, params, call))
    conformance.check_gradients(row, params, call, cotangent, gradients)


def test_any_number_of_global_tokens():
    """One compiled program for calls with few and with many: it is decided when it runs."""
    op, call = Longformer(4, 2, max_global_tokens=4), inputs()
    run = jax.jit(lambda call: op(**call))
    for share in (0.0, 0.05, 0.5, 1.0):
        tokens = np.random.default_rng(3).random((2, 45)) < share
        close(run(call | {"global_tokens": tokens}), conformance.expected(row_with(op, tokens), {}, call))


def test_global_tokens_while_decoding():
    op, call = Longformer(4, 2, causal=True, max_global_tokens=4), inputs()
    whole = np.asarray(forward(op, {}, call | {"global_tokens": GLOBAL}), np.float64)
    some = call | {"query": call["query"][:, 28:33], "query_offset": 28, "global_tokens": GLOBAL}
    close(forward(op, {}, some), whole[:, 28:33])


def test_what_is_said_of_global_tokens():
    op, call = Longformer(4, 2, max_global_tokens=2), as_jax(inputs())
    pattern = np.asarray(op.pattern_of(call["query"], call["key"], global_tokens=GLOBAL))
    assert pattern[0, 0, 7].all() and pattern[0, 0, :, 30].all() and not pattern[1, 0, 7].all()
    weights = op.attention_weights(**call, options=Options(global_tokens=GLOBAL))
    np.testing.assert_array_equal(np.asarray(weights[:, :1]) > 0, pattern)
    counted = cost.count(lambda call: op(**call, global_tokens=jnp.asarray(GLOBAL)), call)
    assert counted.flops == op.cost(conformance.shape_of(call), global_tokens=True).flops


def test_global_tokens_are_refused_where_there_are_none():
    call = as_jax(inputs())
    for other in (Full(), Local(8), Sparse(8)):
        with refuses(NotImplementedError, "global_tokens", "Longformer"):
            other(**call, global_tokens=GLOBAL)
    for wrong in (GLOBAL[:, :44], GLOBAL.astype(np.float32), [True] * 45):
        with refuses(ValueError, "global_tokens"):
            Longformer()(**call, global_tokens=wrong)
    with refuses(NotImplementedError, "positions", "global_tokens"):
        Longformer()(**call, global_tokens=GLOBAL, positions=jnp.arange(45))


def test_lookback():
    assert Longformer(8, 3, 0, causal=True).lookback() == 12
    assert Longformer(8, (1, 5), 0, causal=True).lookback() == 20
    assert Longformer(8, 3, 1, causal=True).lookback() is None and Longformer(8, 3, 0).lookback() is None
    assert Local(8, causal=True).lookback() is None and Sparse(8, causal=True).lookback() is None


def test_impossible_hyperparameters_are_refused():
    for make, word in (
        (lambda: Local(0), "block_size"),
        (lambda: Longformer(window=5), "even"),
        (lambda: Longformer(window=0), "window"),
        (lambda: Longformer(dilation=0), "dilation"),
        (lambda: Longformer(dilation=()), "dilation"),
        (lambda: Longformer(dilation=(1, 2.5)), "dilation[1]"),
        (lambda: Longformer(num_global_tokens=-1), "num_global_tokens"),
        (lambda: Sparse(stride=0), "stride"),
        (lambda: Sparse(kind="random"), "strided, fixed"),
        (lambda: Sparse(heads="both"), "merged, split"),
        (lambda: Sparse(8, "fixed", 9), "at most 8"),
        (lambda: Sparse(8, "strided", 2), "summary"),
        (lambda: Longformer(dilation=(1, 2)).pattern(8, 8, 4), "4 heads"),
    ):
        with refuses(ValueError, word):
            make()
    assert Longformer(dilation=[1, 2]) == Longformer(dilation=(1, 2))


def test_patterns_of_one_head_and_of_each():
    assert isinstance(Longformer(dilation=(2, 2)).token_pattern(64, 2), patterns.Or)
    assert len(Longformer(dilation=(1, 2)).pattern(64, 64, 2)) == 2
    assert len(Longformer(dilation=(2, 2)).pattern(64, 64, 2)) == 1
