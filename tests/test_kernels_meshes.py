"""Kernels on the shards of a mesh: the numbers of one device, and no array gathered that the layout does not need."""

import contextlib
import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_kernels_pallas import aimed_at_a_gpu

from xformer.attention import ALiBi, BigBird, Full, Window
from xformer.attention.kernels import Device, aimed_at, interpreted, tables
from xformer.attention.kernels.tables import Table
from xformer.train import TrainConfig
from xformer.train.parallel import make_layout

BIGBIRD = BigBird(block_size=16, num_random_blocks=1, num_window_blocks=1, num_global_blocks=1, seed=3)


def make_mesh(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def arrays(batch, length, heads, kv_heads, depth):
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = heads, kv_heads, kv_heads, heads
    return [jax.random.normal(key, (batch, length, n, depth)) for key, n in zip(keys, sizes, strict=True)]


def run(op, **options):
    """Output and gradients, compiled quickly."""

    def both(query, key, value, cotangent):
        out, pull = jax.vjp(lambda *x: op(*x, **options), query, key, value)
        return out, *pull(cotangent)

    return jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})


# op, mesh, (batch, length, heads, key heads, head_dim), what else the call has
CASES = {
    "batch": (Full(), {"data": 4, "fsdp": 2}, (8, 20, 1, 1, 8), "mask"),
    "heads": (dataclasses.replace(BIGBIRD, causal=True), {"data": 2, "tensor": 4}, (2, 90, 4, 4, 8), ""),
    "repeated keys": (Full(causal=True, position=ALiBi()), {"tensor": 4}, (1, 40, 8, 2, 8), ""),
    "a batch of one": (BIGBIRD, {"data": 2, "tensor": 2}, (1, 50, 4, 2, 8), "mask"),
    "window": (Window(left=20, right=5), {"data": 2, "tensor": 2, "sequence": 2}, (2, 91, 2, 2, 8), "mask segments"),
    "far window": (Window(left=30, right=0, causal=True), {"sequence": 8}, (1, 165, 2, 2, 8), "segments"),
    "full along the length": (Full(), {"data": 2, "sequence": 4}, (2, 40, 2, 2, 8), "mask"),
    "splash": (BigBird(block_size=64, num_random_blocks=1, num_window_blocks=1), {"data": 2, "tensor": 2},
               (2, 200, 4, 2, 64), "mask"),
    "splash window": (Window(left=20, right=5), {"data": 2, "sequence": 2}, (2, 90, 1, 1, 64), "mask segments"),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_one_device(name):
    """Forward and gradients."""
    op, sizes, shape, extra = CASES[name]
    batch, length = shape[:2]
    options = {}
    if "mask" in extra:
        real = np.resize([length, length // 2], batch)
        options["mask"] = (np.arange(length) < real[:, None])[:, None, None]
    if "segments" in extra:
        options["segment_ids"] = np.arange(length)[None] // (length // 3)
    call = arrays(*shape)
    want = run(dataclasses.replace(op, implementation="reference"), **options)(*call)
    kernel = "splash" if "splash" in name else "pallas"
    with interpreted(), jax.set_mesh(make_mesh(**sizes)):
        got = run(dataclasses.replace(op, implementation=kernel), **options)(*call)
    for what, x, y in zip(("output", "query", "key", "value"), got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5, err_msg=what)


def test_in_pmap_each_device_has_its_own():
    call = arrays(4, 30, 2, 2, 8)
    op = Window(left=9, right=3, implementation="pallas")
    want = dataclasses.replace(op, implementation="reference")(*call[:3])
    with interpreted():
        got = jax.pmap(lambda *x: op(*x), "data")(*(x[:, None] for x in call[:3]))
    np.testing.assert_allclose(got[:, 0], want, rtol=2e-5, atol=2e-5)


def test_arrays_on_explicit_axes():
    """The output lies as the query does."""
    call = arrays(4, 30, 2, 2, 8)
    op = Window(left=9, right=3, implementation="pallas")
    want = dataclasses.replace(op, implementation="reference")(*call[:3])
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "tensor"))) for x in call[:3]]
    with interpreted():
        out = jax.jit(lambda *x: op(*x))(*placed)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, "tensor")), 4)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter")


@pytest.mark.parametrize("kind", ["batch and heads", "window"])
def test_the_compiled_program_moves_what_the_layout_needs(kind):
    """Forward and backward of the interpreted kernels on eight devices: each has an eighth, no copy of the whole."""
    if kind == "window":
        op, mesh, spec = Window(left=8, right=8), make_mesh(data=2, sequence=4), P("data", "sequence")
    else:
        op, mesh, spec = BIGBIRD, make_mesh(data=2, fsdp=1, tensor=4, sequence=1), P("data", None, "tensor")
    shape = (2, 96, 8, 8)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))] * 4
    with interpreted(), jax.set_mesh(mesh):
        program = run(dataclasses.replace(op, implementation="pallas")).lower(*args).compile()
    text = program.as_text()
    found = {name for name in COLLECTIVES if f" {name}(" in text or f" {name}-start(" in text}
    assert found == ({"collective-permute"} if kind == "window" else set())
    for sharding in program.output_shardings:
        assert sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    assert "[2,96,8,8]" not in text.replace("f32", "")


EIGHT = {"cuda": Device("gpu", "NVIDIA H100 80GB HBM3", "cuda", (9, 0), 8), "tpu": Device("tpu", "TPU v5", "", None, 8)}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # since JAX 0.11
@pytest.mark.parametrize("platform", EIGHT)
@pytest.mark.parametrize("kind", ["batch and heads", "window"])
def test_exported_with_shardings_the_kernel_is_in_the_shards(platform, kind):
    """Nobody names an implementation; the kernel's operands are shares, and nothing but a halo moves."""
    device = EIGHT[platform]
    if kind == "window":
        op, mesh, spec = Window(left=64, right=64), make_mesh(data=2, sequence=4), P("data", "sequence")
    else:
        op, mesh, spec = BigBird(block_size=64), make_mesh(data=2, tensor=4), P("data", None, "tensor")
        share = "1x1024x2x64" if platform == "cuda" else "<2x1024x64"
    target = "__gpu$xla.gpu.triton" if platform == "cuda" else "tpu_custom_call"
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target)]
    arg = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    loss = lambda q, k, v: op(q, k, v).astype(jnp.float32).sum()
    checked = Table(device.key, frozenset({"pallas", "splash"}))
    with aimed_at(device), tables.using(checked), jax.set_mesh(mesh), _gpu(platform, mesh):
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), in_shardings=NamedSharding(mesh, spec))
        exported = jax.export.export(step, platforms=[platform], disabled_checks=allowed)(arg, arg, arg)
    text = exported.mlir_module()
    calls = [line for line in text.splitlines() if f"@{target}(" in line]
    assert len(calls) == 3
    if kind == "window":  # 256 own queries, 64 keys on each side
        assert all("1024" not in line.split(" : ")[-1] for line in calls)
        assert "collective_permute" in text
    else:
        assert all(share in line for line in calls)
        assert "collective_permute" not in text
    assert "all_gather" not in text and "all_to_all" not in text
    assert {str(x.spec) for x in exported.in_shardings_jax(mesh)} == {str(spec)}


def _gpu(platform, mesh):
    return aimed_at_a_gpu(mesh) if platform == "cuda" else contextlib.nullcontext()


def test_cudnn_is_in_the_shards(monkeypatch):
    """JAX asks for cuDNN's version, which this machine does not have."""
    inside = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(inside, "check_cudnn_version", lambda: 91000)
    mesh = make_mesh(data=2, tensor=4)
    cut = NamedSharding(mesh, P("data", None, "tensor"))
    arg = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.bfloat16, sharding=cut)
    loss = lambda q, k, v: Full(causal=True)(q, k, v).astype(jnp.float32).sum()
    with aimed_at(EIGHT["cuda"]), jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), in_shardings=cut)
        text = step.trace(arg, arg, arg).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@__cudnn$fmhaSoftmax" in line]
    assert len(calls) == 2 and all("1x128x2x64" in line or "1x2x128x64" in line for line in calls)


def test_in_a_training_step_of_ours():
    """`train.parallel` has the mesh in scope without its devices; arrays lie on it."""
    layout = make_layout(TrainConfig(num_steps=1, batch_size=4, mesh={"data": 2, "tensor": 2}))
    op, call = Window(left=9, right=3, implementation="pallas"), arrays(4, 30, 2, 2, 8)[0]
    want = dataclasses.replace(op, implementation="reference")(call, call, call)
    step = layout.wrap(lambda state, batch: op(batch["x"], batch["x"], batch["x"]) * state)
    with interpreted():
        got = step(jnp.ones(()), layout.put({"x": np.asarray(call)}))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
