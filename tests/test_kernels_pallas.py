"""The GPU kernels, interpreted on the CPU, against the reference; their lists of tiles; and what they lower to."""

import contextlib
import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import HEADS, inputs, padding, random_cotangent, refuses

from xformer import cost
from xformer.attention import (
    ALiBi,
    BigBird,
    Full,
    Longformer,
    Rotary,
    Shape,
    Shaw,
    Sparse,
    T5Bias,
    Window,
    pattern,
)
from xformer.attention.kernels import interpreted
from xformer.attention.kernels.tile_lists import make_tile_lists, num_tiles

SPARSE = BigBird(block_size=16, num_random_blocks=1, num_window_blocks=1, num_global_blocks=1, seed=4)
FINE = BigBird(block_size=4, num_random_blocks=1, num_window_blocks=3, num_global_blocks=1, num_global_tokens=3)

BY_HEAD = Longformer(6, (1, 2, 2, 5), 2)


@pytest.fixture
def interpreting():
    """Kernels may be called on a machine without their platform."""
    with interpreted():
        yield


def both(op, call, options):
    """(Output, gradients) of the kernels and of the reference."""
    arrays = [call[name] for name in ("query", "key", "value")]
    cotangent = jnp.asarray(random_cotangent(call), arrays[0].dtype)
    results = []
    for implementation in ("pallas", "reference"):
        chosen = dataclasses.replace(op, implementation=implementation)
        run = jax.jit(lambda *a, chosen=chosen: chosen(*a, **options))
        with interpreted():
            out, pull = jax.vjp(run, *arrays)
        assert out.dtype == arrays[0].dtype
        results.append((out, *pull(cotangent)))
    return results


def same(results, tolerance):
    for name, got, want in zip(("output", "query", "key", "value"), *results, strict=True):
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=name)


CASES = {
    "full-padded": (Full(), 45, {"mask": padding([40, 0], 45)}),
    "causal-alibi": (Full(causal=True, position=ALiBi()), 45, {"scale": 0.7}),
    "window-segments": (Window(left=20, right=2), 70, {"segment_ids": np.repeat([[0, 1], [3, 2]], 35, axis=1)}),
    "bigbird": (SPARSE, 90, {"mask": padding([90, 50], 90)}),
    "bigbird-causal": (dataclasses.replace(SPARSE, causal=True, position=Rotary()), 65, {}),
    "bigbird-fine": (FINE, 67, {}),
    "longformer": (BY_HEAD, 50, {"mask": padding([50, 3], 50)}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    """Forward and gradients, with grouped heads, odd lengths, padding, and an example that is nothing but padding."""
    op, length, options = CASES[name]
    results = both(op, inputs(q_len=length, head_dim=8), options)
    same(results, 2e-5)
    if "mask" in options and not options["mask"][1].any():
        assert all((np.asarray(x)[1] == 0).all() for x in results[0])


def test_bfloat16():
    call = {name: jnp.asarray(x, jnp.bfloat16) for name, x in inputs(q_len=40, head_dim=16, batch=1).items()}
    same(both(SPARSE, call, {}), 4e-2)


def test_cross_attention_with_an_offset():
    """Fewer queries than keys, the last of them; every head has its own key head."""
    call = inputs(q_len=5, kv_len=33, batch=1, heads=2, kv_heads=2, head_dim=8)
    same(both(Window(left=3, right=0, causal=True), call, {"query_offset": 28}), 2e-5)


def listed(lists, by_query):
    """Pairs that a walk along the lists attends to, bool `[heads, q_tiles * q_block, kv_tiles * kv_block]`."""
    side = lists.by_query if by_query else lists.by_key
    n_q, n_k = lists.by_query.order.shape[1], lists.by_key.order.shape[1]
    out = np.zeros((side.heads, n_q, n_k, lists.q_block, lists.kv_block), int)
    for head in range(side.heads):
        assert sorted(side.order[head]) == list(range(side.order.shape[1]))
        for line in side.order[head]:
            for at in range(side.starts[head, line], side.starts[head, line + 1]):
                tile = (line, side.tiles[head, at]) if by_query else (side.tiles[head, at], line)
                full = at < side.partial_starts[head, line]
                out[(head, *tile)] += 1 if full else lists.bank[side.tests[head, at]]
    return np.moveaxis(out, 3, 2).reshape(side.heads, n_q * lists.q_block, n_k * lists.kv_block)


PATTERNS = {
    "bigbird": SPARSE.token_pattern(100, 3),
    "bigbird-causal": dataclasses.replace(SPARSE, causal=True).token_pattern(100, 3) & pattern.Causal(),
    "bigbird-fine": FINE.token_pattern(100, 3),
    "longformer-by-head": BY_HEAD.token_pattern(100, 4),
    "sparse-split": Sparse(9, "fixed", 2, "split").token_pattern(100, 4) & pattern.Causal(),
    "window": pattern.Window(5, 17),
    "full": pattern.Full(),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("sizes", [(16, 16), (32, 8)], ids=str)
def test_lists_hold_every_pair_once(name, sizes):
    """Walked by query and by key they give the pattern, each pair once, and no list is longer than its room."""
    lists = make_tile_lists(PATTERNS[name], 100, 100, *sizes)
    want = pattern.dense(PATTERNS[name], 100, 100)
    for by_query in (True, False):
        np.testing.assert_array_equal(listed(lists, by_query)[:, :100, :100], want)
    assert lists.by_query.starts[:, -1].max() <= lists.num_tiles == num_tiles(PATTERNS[name], 100, 100, *sizes)


def test_shapes_do_not_depend_on_the_seed():
    """And where blocks are whole tiles, the room is just what is used."""
    for op in (SPARSE, FINE, dataclasses.replace(SPARSE, causal=True)):
        shapes = set()
        for seed in range(6):
            made = dataclasses.replace(op, seed=seed).token_pattern(200, 2)
            made = made & pattern.Causal() if op.causal else made
            lists = make_tile_lists(made, 200, 200, 16, 16)
            shapes.add(tuple(map(np.shape, jax.tree.leaves(lists))))
            if op is not FINE:
                assert (lists.by_query.starts[:, -1] == lists.num_tiles).all()
        assert len(shapes) == 1


def test_global_rows_lengthen_no_other():
    lists = make_tile_lists(SPARSE.token_pattern(1600, 1), 1600, 1600, 16, 16).by_query
    lengths = np.diff(lists.starts[0])
    assert lengths.max() == 100 and np.sort(lengths)[-2] <= 3
    assert lists.order[0, 0] == lengths.argmax()


@pytest.mark.parametrize("op", [Full(), Full(causal=True), SPARSE, Window(left=9, right=3)], ids=lambda op: op._name)
def test_cost_equals_the_counter(op, interpreting):
    op, shape = dataclasses.replace(op, implementation="pallas"), Shape(2, 45, 45, 4, 24, 2)
    call = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs(head_dim=24).items()}
    counted, stated = cost.count(lambda call: op(**call), call), op.cost(shape)
    assert not counted.uncounted and (counted.flops, counted.bytes) == (stated.flops, stated.bytes)


def test_no_array_has_the_length_twice(interpreting):
    op = BigBird(implementation="pallas")
    spec = jax.ShapeDtypeStruct((1, 2048, 1, 16), jnp.float32)
    run = jax.grad(lambda *a: op(*a).sum(), argnums=(0, 1, 2))
    text = str(jax.make_jaxpr(run)(spec, spec, spec))
    assert "2048,1,16" in text and "2048,2048" not in text


def aimed_at_a_gpu(mesh=None):
    """From JAX 0.11 on, lowering for a GPU without one asks which it shall be; the mesh in scope says so."""
    device = getattr(jax.sharding, "AbstractDevice", None)
    if device is None or "platform" not in inspect.signature(device).parameters:
        return contextlib.nullcontext()
    gpu = device(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    axes = {"x": 1} if mesh is None else mesh.shape
    kinds = None if mesh is None else mesh.axis_types
    abstract = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), kinds, abstract_device=gpu)
    return jax.sharding.use_abstract_mesh(abstract)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # since JAX 0.11
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_lowers_for_gpus(gradient, dtype, interpreting):
    op = BigBird(block_size=64, causal=True, position=ALiBi(), implementation="pallas")
    query, key = (jax.ShapeDtypeStruct((2, 400, heads, 80), dtype) for heads in (4, 2))
    mask = jax.ShapeDtypeStruct((2, 1, 1, 400), jnp.bool_)
    run = lambda q, k, v, mask: op(q, k, v, mask=mask).astype(jnp.float32).sum()
    run = jax.grad(run, argnums=(0, 1, 2)) if gradient else run
    target = "__gpu$xla.gpu.triton"
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target)]
    with aimed_at_a_gpu():
        exported = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=allowed)(query, key, key, mask)
    assert exported.mlir_module().count(f"@{target}(") == (3 if gradient else 1)


def test_refusals_name_every_reason(interpreting):
    call = inputs()
    some = np.ones((1, HEADS, 1, 45), bool)
    named = {"implementation": "pallas"}
    for op, options, words in (
        (Full(position=Shaw(), **named), {"params": None}, ["pallas", "Shaw"]),
        (Full(position=T5Bias(), **named), {"params": None}, ["T5Bias"]),
        (Full(**named), {"bias": np.zeros((1, 1, 45, 45), np.float32), "mask": some}, ["bias", "padding masks"]),
        (Window(**named), {"query_offset": jnp.asarray(0)}, ["query offset"]),
        (Full(**named), {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5, "deterministic": False}, ["dropout"]),
    ):
        if "params" in options:
            options = {"params": op.init(jax.random.key(0), Shape(2, 45, 45, 4, 4, 2))}
        with refuses(NotImplementedError, *words):
            op(**call, **options)
    with refuses(NotImplementedError, "float64"), jax.enable_x64(True):
        Full(**named)(**{name: jnp.asarray(x, jnp.float64) for name, x in call.items()})


def test_away_from_its_platform_a_kernel_refuses_but_has_a_cost():
    for name, platform in (("pallas", "GPU"), ("splash", "TPU"), ("cudnn", "GPU")):
        with refuses(NotImplementedError, name, platform, "CPU"):
            Full(implementation=name)(**inputs())
    assert Full(implementation="pallas").cost(Shape(1, 64, 64, 1, 64)).flops == 4 * 64**3
