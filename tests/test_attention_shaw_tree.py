"""Relative positions in trees: distances of a breadth-first search, under every variant that has token pairs."""

import dataclasses
from collections import deque

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import CASES, close
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from xformer.attention import (
    NO_PATH,
    Attention,
    Full,
    Layers,
    Linformer,
    Longformer,
    Options,
    Reformer,
    Shape,
    ShawTree,
    Sparse,
    Synthesizer,
    Window,
    tree_distances,
    tree_paths,
)
from xformer.bench import attention_costs, jax_contenders
from xformer.bench.contender import Case
from xformer.bench.inputs import trees
from xformer.cost import count
from xformer.nn import AttentionFn, MultiHeadAttention

LENGTH, HEADS, DEPTH = 37, 4, 8
BOTH = ShawTree(max_distance=3, per_head=True, sequence_distance=4)
TREE = ShawTree(max_distance=2, values=False, through_root=True)
PAIRED = [case for case in CASES if "shaw" in case.positions]


def forest(rng, length, roots=0.15):
    """The parent of each token, -1 at roots: any token may be the parent of an earlier or a later one."""
    order, parents = rng.permutation(length), np.full(length, -1)
    for place in range(1, length):
        if rng.random() > roots:
            parents[order[place]] = order[rng.integers(max(place - 4, 0), place)]
    return parents


def ancestors(parents, token):
    """From the token to its root."""
    found = [token]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def paths_of(parents, levels=None):
    """Nodes from the root to each token, int32 [length, levels]; node numbers are places from 1."""
    chains = [[token + 1 for token in reversed(ancestors(parents, token))] for token in range(len(parents))]
    found = np.zeros((len(parents), levels or max(map(len, chains))), np.int32)
    for row, chain in zip(found, chains, strict=True):
        row[: len(chain)] = chain
    return found


def searched(parents):
    """Edges between each two tokens by a breadth-first search that knows no direction; -1 in different trees."""
    length = len(parents)
    beside = [[] for _ in range(length)]
    for child, parent in enumerate(parents):
        if parent >= 0:
            beside[child].append(parent)
            beside[parent].append(child)
    found = np.full((length, length), -1)
    for start in range(length):
        found[start, start], queue = 0, deque([start])
        while queue:
            here = queue.popleft()
            for node in beside[here]:
                if found[start, node] < 0:
                    found[start, node] = found[start, here] + 1
                    queue.append(node)
    return found


def signed(parents, through_root=False):
    """The signed distances, from the search, the chains of ancestors and the order of the tokens."""
    edges, length = searched(parents), len(parents)
    chains = [ancestors(parents, token) for token in range(length)]
    found = np.full((length, length), NO_PATH)
    for query in range(length):
        for key in range(length):
            if edges[query, key] < 0:
                continue
            around = len(chains[query]) + len(chains[key]) - 2 if through_root else edges[query, key]
            if key in chains[query]:
                found[query, key] = -edges[query, key]
            elif query in chains[key]:
                found[query, key] = edges[query, key]
            else:
                found[query, key] = around if key > query else -around
    return found


LONGEST = 14  # of the searched forests; shorter ones are padded, so that there is one compiled program
distances_of = jax.jit(tree_distances, static_argnames="through_root")
lead = jax.jit(tree_paths, static_argnums=1)
forests = st.integers(1, LONGEST), st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 1.0])


def test_distances_of_a_sentence():
    """A root in the middle: `he saw the old man`, whose head is `saw`."""
    paths = tree_paths(jnp.asarray([1, -1, 4, 4, 1]), 3)
    np.testing.assert_array_equal(paths, [[2, 1, 0], [2, 0, 0], [2, 5, 3], [2, 5, 4], [2, 5, 0]])
    np.testing.assert_array_equal(tree_distances(paths, paths)[2], [-3, -2, 0, 2, -1])
    np.testing.assert_array_equal(tree_distances(paths, paths, through_root=True)[2], [-3, -2, 0, 4, -1])


@settings(max_examples=40, deadline=None)
@given(*forests, st.booleans())
def test_distances_are_those_of_a_breadth_first_search(length, seed, roots, through_root):
    parents = forest(np.random.default_rng(seed), length, roots)
    paths = np.zeros((LONGEST, LONGEST), np.int32)
    paths[:length] = paths_of(parents, LONGEST)
    found = np.asarray(distances_of(paths, paths, through_root=through_root))
    assert (found[length:] == NO_PATH).all() and (found[:, length:] == NO_PATH).all()
    found = found[:length, :length]
    np.testing.assert_array_equal(found, signed(parents, through_root))
    if not through_root:
        np.testing.assert_array_equal(np.where(found == NO_PATH, -1, np.abs(found)), searched(parents))


@settings(max_examples=30, deadline=None)
@given(*forests, st.sampled_from([1, 3, 14]))
def test_paths_lead_from_the_root_to_each_token(length, seed, roots, levels):
    """What is too deep has the path of its ancestor at the last level; what is no token has none."""
    rng = np.random.default_rng(seed)
    parents, mask = np.full(LONGEST, -1), (np.arange(LONGEST) < length) & (rng.random(LONGEST) < 0.8)
    parents[:length] = forest(rng, length, roots)
    want = paths_of(parents, LONGEST)[:, :levels]
    np.testing.assert_array_equal(lead(parents, levels), want)
    np.testing.assert_array_equal(lead(parents, levels, mask), want * mask[:, None])


def vectors(position, params, kind, distances):
    """The vectors of all pairs of one example, `[heads or 1, q_len, kv_len, depth]`, entry by entry."""
    table, apart = jnp.asarray(params[kind]), jnp.asarray(params[f"apart_{kind}"])
    table, apart = (x if position.per_head else x[None] for x in (table, apart))
    reach = position.max_distance
    rows = np.clip(distances, -reach, reach) + reach
    found = jnp.where((distances == NO_PATH)[None, :, :, None], apart[:, :1, None], table[:, rows])
    if position.sequence_distance:
        far, (q_len, kv_len) = position.sequence_distance, distances.shape
        apart_by = np.clip(np.arange(kv_len)[None] - np.arange(q_len)[:, None], -far, far) + far
        more = params[f"sequence_{kind}"]
        found = found + (more if position.per_head else more[None])[:, apart_by]
    return found


def naive(op, params, call, distances, pairs, mask):
    """The definition, example by example and pair by pair, where nothing is tiled."""
    outs = []
    for example, of_pairs in enumerate(distances):
        query, key, value = (jnp.asarray(call[name][example]) for name in ("query", "key", "value"))
        groups = query.shape[1] // key.shape[1]
        key, value = (jnp.repeat(x, groups, axis=1) for x in (key, value))
        own = params["position"]
        keys = vectors(op.position, own, "key", of_pairs)
        scores = jnp.einsum("qhd,khd->hqk", query, key) + jnp.einsum(
            "qhd,hqkd->hqk", query, jnp.broadcast_to(keys, (query.shape[1], *keys.shape[1:]))
        )
        allowed = pairs[example] & mask[example][None, None]
        scores = jnp.where(allowed, scores * query.shape[-1] ** -0.5, -jnp.inf)
        top = jnp.where(allowed.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0)
        weights = jnp.where(allowed, jnp.exp(scores - top), 0)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1)
        out = jnp.einsum("hqk,khd->qhd", weights, value)
        if op.position.values:
            values = vectors(op.position, own, "value", of_pairs)
            values = jnp.broadcast_to(values, (query.shape[1], *values.shape[1:]))
            out = out + jnp.einsum("hqk,hqkd->qhd", weights, values)
        outs.append(out)
    return jnp.stack(outs)


def arrays(op, length=LENGTH, batch=2, heads=HEADS, kv_heads=HEADS):
    """A call's queries, keys and values, the forest of each example, and the op's parameters."""
    rng = np.random.default_rng(1)
    draw = lambda count: rng.normal(size=(batch, length, count, DEPTH)).astype(np.float32)
    call = {"query": draw(heads), "key": draw(kv_heads), "value": draw(kv_heads)}
    if op.SHARES_QK:
        call["key"] = call["query"]
    parents = [forest(rng, length) for _ in range(batch)]
    levels = max(paths_of(tree).shape[1] for tree in parents)
    paths = np.stack([paths_of(tree, levels) for tree in parents])
    params = op.init(jax.random.key(0), Shape(batch, length, length, heads, DEPTH, kv_heads))
    return call, parents, paths, params


@pytest.mark.sampled(6)
@pytest.mark.parametrize("position", [BOTH, TREE], ids=["both", "tree"])
@pytest.mark.parametrize("case", PAIRED, ids=lambda case: case.name)
def test_equals_the_definition_forward_and_backward(case, position):
    """Padding at the end of one example: any tokens of no tree."""
    op: Attention = dataclasses.replace(case.op, position=position)
    call, parents, paths, params = arrays(op)
    mask = np.arange(LENGTH) < np.array([[LENGTH], [LENGTH - 6]])
    distances = np.stack([signed(tree, position.through_root) for tree in parents])
    given = {"mask": jnp.asarray(mask)[:, None, None], "paths": jnp.asarray(paths)}
    if isinstance(op, Synthesizer):
        pytest.skip("scores are not those of queries and keys")
    if op.pattern(LENGTH, LENGTH, HEADS) is None:
        pairs = op.pattern_of(call["query"], call["key"], mask=given["mask"])
    else:
        pairs = np.broadcast_to(op.pattern(LENGTH, LENGTH, HEADS), (2, HEADS, LENGTH, LENGTH))
    real = jnp.asarray(mask, jnp.float32)[..., None, None]
    if op.SHARES_QK or type(op).__name__ in ("Routing", "TopKBlocks"):
        dense = dataclasses.replace(op, implementation="reference")
        want = lambda call, params: dense(**call, **given, params=params)
    else:
        want = lambda call, params: naive(op, params, call, distances, pairs, mask)
    got = lambda call, params: op(**call, **given, params=params)
    for run in (want, got):
        assert np.isfinite(run(call, params)).all()
    close(got(call, params) * real, want(call, params) * real)
    loss = lambda run: lambda call, params: (jnp.sin(run(call, params)) * real).sum()
    grads = [jax.grad(loss(run), argnums=(0, 1))(jax.tree.map(jnp.asarray, call), params) for run in (got, want)]
    for found, wanted in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(found, wanted, atol=3e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "op", [Full(), Window(left=4, right=4), Longformer(window=4, dilation=2), Sparse(stride=8)], ids=str
)
def test_a_table_of_distances_says_the_same_as_paths(op):
    op = dataclasses.replace(op, position=BOTH)
    call, parents, paths, params = arrays(op, kv_heads=2)
    table = jnp.asarray(np.stack([signed(tree) for tree in parents]))
    by_path = op(**call, paths=jnp.asarray(paths), params=params)
    close(op(**call, distances=table, params=params), by_path)
    one = jax.tree.map(lambda x: x[:1], call)
    close(op(**one, paths=jnp.asarray(paths[0]), params=params), by_path[:1])  # of all examples


def test_global_tokens_of_each_example():
    op = Longformer(window=4, max_global_tokens=3, position=BOTH)
    call, parents, paths, params = arrays(op)
    tokens = jnp.asarray(np.random.default_rng(2).random((2, LENGTH)) < 0.05).at[:, 4].set(True)
    given = {"global_tokens": tokens, "params": params}
    want = dataclasses.replace(op, implementation="reference")(**call, paths=jnp.asarray(paths), **given)
    close(op(**call, paths=jnp.asarray(paths), **given), want)
    table = jnp.asarray(np.stack([signed(tree) for tree in parents]))
    close(op(**call, distances=table, **given), want)


@pytest.mark.parametrize("op", [Full(), Window(left=3, right=3)], ids=str)
def test_packed_sentences_are_those_of_rows_of_their_own(op):
    """In one row the nodes go on being numbered."""
    op = dataclasses.replace(op, position=ShawTree(max_distance=3))
    call, _, _, params = arrays(op, batch=1)
    cut = 20
    paths = [paths_of(forest(np.random.default_rng(seed), size), 20) for seed, size in enumerate((cut, LENGTH - cut))]
    packed = np.concatenate([paths[0], np.where(paths[1] > 0, paths[1] + cut, 0)])[None]
    segments = jnp.asarray(np.arange(LENGTH) >= cut, jnp.int32)[None]
    out = op(**call, paths=jnp.asarray(packed), segment_ids=segments, params=params)
    for part, own in ((slice(None, cut), paths[0]), (slice(cut, None), paths[1])):
        alone = {name: x[:, part] for name, x in call.items()}
        close(out[:, part], op(**alone, paths=jnp.asarray(own)[None], params=params))


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("position", [BOTH, TREE], ids=["both", "tree"])
def test_words_without_a_tree_give_numbers(position, length):
    """A single word; and words of which none has a parent, or none has a path at all."""
    op = Full(position=position)
    call, _, _, params = arrays(op, length=length)
    for paths in (np.arange(1, length + 1)[None, :, None], np.zeros((1, length, 2), int)):
        run = lambda params, paths=paths: op(**call, paths=jnp.asarray(paths), params=params)
        assert np.isfinite(run(params)).all()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.grad(lambda p, r=run: r(p).sum())(params)))


@pytest.mark.parametrize("op", [Full(), Window(left=9, right=9), Sparse(stride=8)], ids=str)
def test_cost_is_what_is_computed(op):
    op, shape = dataclasses.replace(op, position=BOTH, implementation="xla"), Shape(2, 50, 50, 2, 8)
    x = [jax.ShapeDtypeStruct((2, 50, 2, 8), jnp.float32)] * 3
    paths = jax.ShapeDtypeStruct((2, 50, 6), jnp.int32)
    params = jax.eval_shape(lambda: op.init(jax.random.key(0), shape))
    run = lambda params, paths, *x: op(*x, params=params, paths=paths)
    assert op.cost(shape).flops == count(run, params, paths, *x).flops


def test_queries_of_their_own_and_a_causal_cut():
    """The last queries alone, with the paths of both sides, are those of the whole call."""
    op = Full(position=BOTH, causal=True)
    call, _, paths, params = arrays(op)
    paths = jnp.asarray(paths)
    whole = op(**call, paths=paths, params=params)
    last = call | {"query": call["query"][:, -5:]}
    close(op(**last, paths=(paths[:, -5:], paths), query_offset=LENGTH - 5, params=params), whole[:, -5:])


def test_layers_hand_paths_to_ops_that_read_them():
    op = Full(position=TREE)
    call, _, paths, _ = arrays(op)
    x = jnp.asarray(call["query"].reshape(2, LENGTH, -1))
    layer = MultiHeadAttention(HEADS, HEADS * DEPTH, attention_fn=op, rngs=nnx.Rngs(0))
    assert np.isfinite(layer(x, paths=jnp.asarray(paths))).all()
    plain = MultiHeadAttention(HEADS, HEADS * DEPTH, attention_fn=Full(), rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(plain(x, paths=jnp.asarray(paths)), plain(x))
    assert Layers((Full(), op)).reads_trees and not Layers((Full(),)).reads_trees
    fn = AttentionFn(op, num_heads=HEADS, head_dim=DEPTH, rngs=nnx.Rngs(0))
    weights = op.attention_weights(*call.values(), Options(paths=jnp.asarray(paths), params=fn.own_params()))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    with conformance.refuses(ValueError, "a cache cannot be had", "ShawTree"):
        causal = dataclasses.replace(op, causal=True)
        MultiHeadAttention(HEADS, HEADS * DEPTH, attention_fn=causal, rngs=nnx.Rngs(0)).init_cache(1, 4)


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"max_distance": 0}, "max_distance"), ({"sequence_distance": -1}, "sequence_distance"), ({"values": 1}, "values"),
     ({"through_root": "yes"}, "through_root"), ({"per_head": 2}, "per_head")],
)  # fmt: skip
def test_refuses(fields, word):
    with conformance.refuses(ValueError, f"ShawTree.{word}", str(next(iter(fields.values())))):
        ShawTree(**fields)


def test_refuses_calls():
    op, paths = Full(position=TREE), jnp.ones((2, LENGTH, 3), jnp.int32)
    call, _, _, params = arrays(op)
    with conformance.refuses(ValueError, "needs the trees of the tokens", "neither"):
        op(**call, params=params)
    with conformance.refuses(NotImplementedError, "Linformer cannot honour paths", "ShawTree"):
        Linformer(rank=4, max_len=LENGTH)(**call, paths=paths)
    with conformance.refuses(NotImplementedError, "Full cannot honour distances"):
        Full()(**call, distances=jnp.zeros((2, LENGTH, LENGTH), jnp.int32))
    for wrong, words in (
        (paths[:, :-1], "paths of the query must be"),
        (paths.astype(jnp.float32), "paths of the query must be an int array"),
        (3, "paths must be an int array"),
        ((paths, paths[:, :, :2]), "paths of the key must be"),
    ):
        with conformance.refuses(ValueError, words):
            op(**call, paths=wrong, params=params)
    with conformance.refuses(ValueError, "give one of them"):
        op(**call, paths=paths, distances=jnp.zeros((2, LENGTH, LENGTH), jnp.int32), params=params)
    table = jnp.zeros((2, LENGTH, LENGTH), jnp.int32)
    shared = Reformer(position=TREE, num_buckets=4)
    with conformance.refuses(NotImplementedError, "Reformer cannot honour distances", "give paths"):
        shared(**(call | {"key": call["query"]}), distances=table, params=params)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("table", [False, True], ids=["paths", "distances"])
@pytest.mark.parametrize("op", [Window(left=4, right=4), Full()], ids=["window", "full"])
def test_a_length_that_is_cut_over_devices(op, table):
    """The examples over two devices and the length over two more; also gradients."""
    op = dataclasses.replace(op, position=BOTH)
    call, parents, paths, params = arrays(op)
    distances = jnp.asarray(np.stack([signed(tree) for tree in parents]))
    given = {"distances": distances} if table else {"paths": jnp.asarray(paths)}
    run = jax.value_and_grad(lambda params, call: (op(**call, **given, params=params) ** 2).sum(), (0, 1))
    want = jax.jit(run)(params, jax.tree.map(jnp.asarray, call))
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        got = jax.jit(run)(params, jax.tree.map(jnp.asarray, call))
    for found, wanted in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-5)


def test_examples_one_after_the_other(monkeypatch):
    """On a CPU a batch that is too large for its caches is computed in shares; each has paths of its own."""
    op = Full(position=TREE)
    call, _, paths, params = arrays(op, length=LENGTH + 1)
    want = op(**call, paths=jnp.asarray(paths), params=params)
    monkeypatch.setattr("xformer.attention.engine.attend.STEP_SCORES", 1)
    close(jax.jit(lambda call: op(**call, paths=jnp.asarray(paths), params=params))(call), want)
    offsets = jnp.asarray([3, 1])
    part = call | {"query": np.stack([call["query"][0, 3:9], call["query"][1, 1:7]])}
    both = jnp.stack([paths[0, 3:9], paths[1, 1:7]]), jnp.asarray(paths)
    out = op(**part, paths=both, query_offset=offsets, params=params)
    close(out, jnp.stack([want[0, 3:9], want[1, 1:7]]))


def test_what_it_costs_can_be_measured():
    """The report's rows, and the contender of a benchmark: on the paths of a binary tree."""
    op = Full(position=ShawTree(max_distance=2))
    plan = attention_costs.Plan({"tree": op}, "tree", 2, 4, None, "float32", (9,), 0, 1.0)
    (row,) = attention_costs.measure(plan, print)
    assert not row.note and row.flops == op.cost(plan.shape(9)).flops
    np.testing.assert_array_equal(trees(op, 5)["paths"][0], [[1, 0, 0], [1, 2, 0], [1, 3, 0], [1, 2, 4], [1, 2, 5]])
    assert jax_contenders.ours().prepare(Case(op, plan.shape(9), "float32")).flops == row.flops
