"""Attention with the sequence cut over devices: the numbers of one device, and no more traffic than a plan needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xformer.attention import BigBird, Full, Linformer, Longformer, Shape, Shaw, T5Bias, Window
from xformer.attention.engine import sequence_parallel

HEADS, DEPTH = 2, 4


def make_mesh(data, cuts):
    devices = np.array(jax.devices()[: data * cuts]).reshape(data, cuts)
    return Mesh(devices, ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)


def make_inputs(length, kv_heads=HEADS):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, length, heads, DEPTH) for heads in (HEADS, kv_heads, kv_heads)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("op", "length", "mesh", "extra"),
    [
        (Full(causal=True, position=T5Bias()), 700, (2, 2), "mask"),  # three query tiles
        (Full(), 700, (1, 2), "bias"),
        (Window(left=5, right=9, position=Shaw(max_distance=3)), 100, (1, 4), "mask"),
        (Window(left=70, right=0), 250, (1, 4), "segments"),  # reaches over the neighbour
        (BigBird(block_size=4, num_random_blocks=1), 37, (1, 4), "bias"),
        (Linformer(rank=4, max_len=24), 21, (1, 2), "mask"),
    ],
    ids=["full-causal", "full", "window", "far-window", "bigbird", "linformer"],
)
def test_the_numbers_of_one_device(op, length, mesh, extra):
    """Also with dropout, at lengths that the devices do not divide; gradients too."""
    query, key, value = make_inputs(length, kv_heads=1)
    params = op.init(jax.random.key(1), Shape(2, length, length, HEADS, DEPTH, 1))
    extras = {
        "mask": {"mask": (jnp.arange(length) < jnp.array([[length], [length // 2]]))[:, None, None]},
        "bias": {"bias": jax.random.normal(jax.random.key(2), (1, HEADS, length, length))},
        "segments": {"segment_ids": jnp.arange(length)[None] // (length // 3)},
    }[extra]
    dropout = {
        "dropout_rng": jax.random.key(3),
        "dropout_rate": 0.3,
        "deterministic": False,
        "broadcast_dropout": False,
    }

    def loss(query, key, value, params):
        return jnp.sum(op(query, key, value, params=params, **extras, **dropout) ** 2)

    grad = jax.value_and_grad(loss, (0, 1, 2, 3))
    expected = jax.jit(grad)(query, key, value, params)
    with jax.set_mesh(make_mesh(*mesh)):
        assert sequence_parallel.num_shards() == mesh[1]
        found = jax.jit(grad)(query, key, value, params)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def test_a_union_of_parts_is_cut_in_the_order_of_positions():
    """The numbers are those of its parts; dropout would draw another mask."""
    op, call = Longformer(window=4, dilation=3), make_inputs(61)
    grad = lambda: jax.jit(jax.value_and_grad(lambda *x: jnp.sum(op(*x) ** 2), (0, 1, 2)))(*call)
    expected = grad()
    with jax.set_mesh(make_mesh(1, 2)):
        got = grad()
    for ours, theirs in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def test_gradients_in_bfloat16():
    """Those of what all devices hold, keys, a bias and a table, are sums over devices."""
    op = Window(left=30, right=3, position=T5Bias())
    params = op.init(jax.random.key(1), Shape(2, 64, 64, HEADS, DEPTH))
    args = *make_inputs(64), params, jax.random.normal(jax.random.key(2), (1, HEADS, 1, 64))
    args = jax.tree.map(lambda x: x.astype(jnp.bfloat16), args)

    def loss(query, key, value, params, bias):
        return jnp.sum(op(query, key, value, bias=bias, params=params).astype(jnp.float32) ** 2)

    grad = jax.grad(loss, (0, 1, 2, 3, 4))
    expected = jax.jit(grad)(*args)
    with jax.set_mesh(make_mesh(1, 2)):
        found = jax.jit(grad)(*args)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == jnp.bfloat16
        ours, theirs = np.float32(ours), np.float32(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.02 * np.abs(theirs).max())


def traffic(fn, *args):
    """Bytes that each device receives, by primitive, from the jaxpr."""
    found = {}

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in ("ppermute", "all_gather"):
                others = eqn.params["axis_size"] - 1 if name == "all_gather" else 1
                (array,) = (var.aval for var in eqn.invars)
                found[name] = found.get(name, 0) + others * array.size * array.dtype.itemsize
            for param in eqn.params.values():
                inner = getattr(param, "jaxpr", param)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


def test_traffic_is_what_the_layout_needs():
    """Four devices of 64 tokens: a window fetches a tile of 32 from each side, full attention all the others."""
    args = [jax.ShapeDtypeStruct((64, 256, HEADS, DEPTH), jnp.float32)] * 3
    token = 2 * 64 * HEADS * DEPTH * 4  # keys and values of the batch in float32
    ops = {op: lambda *args, op=op: op(*args) for op in (Window(left=8, right=8), Window(left=8, causal=True), Full())}
    with jax.set_mesh(make_mesh(1, 4)):
        both, back, full = (traffic(run, *args) for run in ops.values())
        assert both == {"ppermute": 2 * 32 * token}
        assert back == {"ppermute": 32 * token}
        assert full == {"all_gather": 192 * token}
        # Random blocks may lie anywhere, and nothing that is traced may depend on the draw.
        seeds = [BigBird(block_size=16, num_random_blocks=1, num_global_blocks=0, seed=seed) for seed in range(3)]
        assert all(traffic(lambda *args, op=op: op(*args), *args) == full for op in seeds)
        # Without them, blocks around the own are all it takes.
        local = BigBird(block_size=16, num_random_blocks=0, num_global_blocks=0)
        assert traffic(lambda *args: local(*args), *args) == {"ppermute": 2 * 16 * token}


def test_the_compiler_adds_no_traffic_to_a_window():
    mesh = make_mesh(1, 4)
    cut = NamedSharding(mesh, P("data", "sequence"))
    args = [jax.ShapeDtypeStruct((64, 256, HEADS, DEPTH), jnp.float32, sharding=cut)] * 3
    with jax.set_mesh(mesh):
        program = jax.jit(lambda *args: Window(left=8, right=8)(*args)).lower(*args).compile().as_text()
    assert "collective-permute" in program
    assert not any(name in program for name in ("all-gather", "all-to-all", "all-reduce"))


def test_layers_share_one_trace():
    """Layouts of layers have the same shapes whatever was drawn, cut over devices or not."""
    for cuts in (1, 4):
        with jax.set_mesh(make_mesh(1, cuts)):
            shapes = set()
            for seed in range(4):
                op = BigBird(block_size=4, num_random_blocks=2, seed=seed)
                plans = op.plans(Shape(1, 64, 64, HEADS, DEPTH), 3)
                shapes.add(str(jax.tree.map(np.shape, plans)))
            assert len(shapes) == 1
            args = make_inputs(64)
            for layer in range(3):
                plan = jax.tree.map(lambda x, layer=layer: x[layer], plans)
                run = jax.jit(lambda plan, *args: op(*args, plan=plan))  # noqa: B023
                np.testing.assert_allclose(run(plan, *args), op.at_layer(layer)(*args), atol=1e-6)


def test_an_axis_that_the_caller_handles_is_left_alone():
    mesh = make_mesh(1, 2)
    args = make_inputs(16)
    inside = lambda *args: jnp.float32(sequence_parallel.num_shards()) + 0 * Full()(*args)
    with jax.set_mesh(mesh):
        run = jax.shard_map(inside, in_specs=P(None, "sequence"), out_specs=P(None, "sequence"), check_vma=False)
        np.testing.assert_array_equal(jax.jit(run)(*args), 1)
