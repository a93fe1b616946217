"""The kernels of the running state in Pallas's interpreter, lowered for GPUs, on meshes, and when they are chosen."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import refuses
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_kernels_meshes import make_mesh
from test_kernels_pallas import aimed_at_a_gpu

from xformer import cost
from xformer.attention import Linear, Performer, Retention, Rotary, Shape
from xformer.attention.device import Device
from xformer.attention.kernels import aimed_at, choice, chunks, interpreted, tables
from xformer.attention.kernels.choice import rule
from xformer.attention.kernels.state_kernels import Extras, Order, weighted_sums
from xformer.attention.kernels.tables import STATE, Table, Timing

QUICK = {"xla_backend_optimization_level": 0}
GPU = Device("gpu", "NVIDIA H100 80GB HBM3", capability=(9, 0))
# op, key heads of 4, (head_dim, depth), what else the call has
CASES = {
    "linear": (Linear(causal=True), 2, (24, 24), "mask"),
    "retention": (Retention(causal=True, position=Rotary()), 4, (16, 40), ""),
    "both ways": (Retention(), 2, (16, 16), "mask segments"),
    "performer": (Performer(num_features=20, kernel="relu", causal=True), 4, (16, 16), "segments"),
}


@pytest.fixture
def small(monkeypatch):
    """Several chunks and blocks of features in small calls."""
    monkeypatch.setattr(chunks, "CHUNK", 16)
    monkeypatch.setattr(chunks, "BLOCK", 16)
    jax.clear_caches()
    yield
    jax.clear_caches()


def arrays(kv_heads, sizes, length=45, batch=2):
    rngs = jax.random.split(jax.random.key(0), 4)
    heads = (4, sizes[0]), (kv_heads, sizes[0]), (kv_heads, sizes[1]), (4, sizes[1])
    return [jax.random.normal(rng, (batch, length, *one)) for rng, one in zip(rngs, heads, strict=True)]


def options(extra, length=45):
    found = {}
    if "mask" in extra:
        found["mask"] = (np.arange(length) < np.array([length - 4, 20])[:, None])[:, None, None]
    if "segments" in extra:
        found["segment_ids"] = np.sort(np.random.default_rng(0).integers(0, 4, (2, length)), 1)
    return found


def run(op, call, **given):
    def both(query, key, value, cotangent):
        out, pull = jax.vjp(lambda *x: op(*x, **given), query, key, value)
        return out, *pull(cotangent)

    return jax.jit(both, compiler_options=QUICK)(*call)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_and_its_gradients(name, small):
    op, kv_heads, sizes, extra = CASES[name]
    call, given = arrays(kv_heads, sizes), options(extra)
    with interpreted():
        got = run(dataclasses.replace(op, implementation="pallas"), call, **given)
    want = run(dataclasses.replace(op, implementation="reference"), call, **given)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max(), rtol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("later", "own", "decays", "cut"), list(itertools.product([False, True], repeat=4)))
def test_every_order(later, own, decays, cut, small):
    """Against all pairs in NumPy's float64."""
    query, key, value, _ = (np.asarray(x, np.float64) for x in arrays(2, (24, 16)))
    logs = np.log([0.9, 0.5]) if decays else None
    segments = options("segments")["segment_ids"] if cut else None
    extras = Extras(*(None if x is None else jnp.asarray(x, dtype) for x, dtype in (
        (logs, jnp.float32), (segments, jnp.int32), (segments, jnp.int32))))  # fmt: skip
    sums = jax.jit(weighted_sums, static_argnums=0, compiler_options=QUICK)
    got = sums(Order(later, own, "highest"), extras, *(jnp.asarray(x, jnp.float32) for x in (query, key, value)))
    key, value = (np.repeat(x, 2, axis=2) for x in (key, value))
    distance = np.arange(45)[:, None] - np.arange(45)
    distance = -distance if later else distance
    weights = np.einsum("bthf,bshf->bhts", query, key) * (distance >= (0 if own else 1))
    if logs is not None:
        weights = weights * np.exp(np.repeat(logs, 2)[:, None, None] * np.maximum(distance, 0))
    if segments is not None:
        weights = weights * (segments[:, None, :, None] == segments[:, None, None])
    np.testing.assert_allclose(got, np.einsum("bhts,bshe->bthe", weights, value), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_cost_equals_the_counter(name):
    op, kv_heads, (head_dim, depth), _ = CASES[name]
    op = dataclasses.replace(op, implementation="pallas")
    shape = Shape(2, 150, 150, 4, head_dim, kv_heads, depth)
    call = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(kv_heads, (head_dim, depth), 150)[:3]]
    params = op.init(jax.random.key(0), shape)
    with interpreted():
        counted = cost.count(lambda *x: op(*x, params=params), *call)
    assert not counted.uncounted and counted.flops == op.cost(shape).flops


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # since JAX 0.11
@pytest.mark.parametrize(("name", "of_gradient"), [("linear", 14), ("both ways", 12)])
def test_lowers_for_gpus(name, of_gradient):
    """A pass that leaves states and one that reads them: for sums and norms, or for both directions.

    As often for each gradient: three of the sums, two of the norms, whose values are ones. What linear attention is
    divided by needs the forward passes too.
    """
    op, kv_heads, sizes, extra = CASES[name]
    op, given = dataclasses.replace(op, implementation="pallas"), options(extra, 400)
    call = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays(kv_heads, sizes, 400)[:3]]
    loss = lambda *x: op(*x, **given).astype(jnp.float32).sum()
    target = "__gpu$xla.gpu.triton"
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target)]
    for function, calls in ((loss, 4), (jax.grad(loss, (0, 1, 2)), of_gradient)):
        with interpreted(), aimed_at_a_gpu():
            exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=allowed)(*call)
        assert exported.mlir_module().count(f"@{target}(") == calls


def test_memory_is_linear_in_the_length():
    """No array has the length twice, or the length, the features and the depth."""
    op = Linear(causal=True, implementation="pallas")
    spec = jax.ShapeDtypeStruct((1, 4096, 1, 32), jnp.float32)
    with interpreted():
        text = str(jax.make_jaxpr(jax.grad(lambda *x: op(*x).sum(), (0, 1, 2)))(spec, spec, spec))
    assert "4096,1,32" in text and "4096,4096" not in text and "4096,32,32" not in text and "4096,1,32,32" not in text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [{"data": 4, "tensor": 2}, {"fsdp": 2, "sequence": 4}, {"tensor": 4}])
def test_on_a_mesh(sizes, small):
    """The numbers of one device. Key heads are repeated until the devices divide them; the length is not cut."""
    op = Retention(causal=True)
    call = [jnp.concatenate([x] * 2) for x in arrays(2, (16, 16))]
    given = {"mask": np.arange(45) < np.array([45, 40, 20, 9])[:, None]}
    given["mask"] = given["mask"][:, None, None]
    want = run(dataclasses.replace(op, implementation="reference"), call, **given)
    with interpreted(), jax.set_mesh(make_mesh(**sizes)):
        got = run(dataclasses.replace(op, implementation="pallas"), call, **given)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max(), rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # since JAX 0.11
def test_exported_with_shardings_each_device_has_its_own():
    """Nobody names the kernel; on eight devices each has an example and a head, and nothing is gathered."""
    mesh, target = make_mesh(data=2, tensor=4), "__gpu$xla.gpu.triton"
    cut = [NamedSharding(mesh, P("data", None, axis)) for axis in ("tensor", None, None)]
    call = [jax.ShapeDtypeStruct((2, 128, heads, 16), jnp.bfloat16, sharding=own)
            for heads, own in zip((4, 2, 2), cut, strict=True)]  # fmt: skip
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target)]
    jax.clear_caches()
    with (
        aimed_at(dataclasses.replace(GPU, count=8)), tables.using(Table({}, frozenset({STATE}))),
        jax.set_mesh(mesh), aimed_at_a_gpu(mesh),
    ):  # fmt: skip
        step = jax.jit(Linear(causal=True), in_shardings=cut)
        text = jax.export.export(step, platforms=["cuda"], disabled_checks=allowed)(*call).mlir_module()
    calls = [line for line in text.splitlines() if f"@{target}(" in line]
    assert len(calls) == 4 and all("tensor<1x128x1x16x" in line.split(" : ")[-1] for line in calls)
    assert "all_gather" not in text and "all_to_all" not in text


def test_refusals_name_every_reason():
    query, key, value, _ = arrays(4, (16, 16))
    named = {"implementation": "pallas"}
    with refuses(NotImplementedError, "pallas", "GPU", "CPU"):
        Linear(causal=True, **named)(query, key, value)
    with interpreted():
        with refuses(NotImplementedError, "two matrix products"):
            Linear(**named)(query, key, value)
        with refuses(NotImplementedError, 'Performer with kernel="softmax"'):
            Performer(causal=True, **named)(query, key, value)
        with refuses(NotImplementedError, "side by side"):
            Linear(causal=True, **named)(query[:, :3], key, value, query_offset=42)
        with refuses(NotImplementedError, "cudnn", "linear attention"):
            Linear(causal=True, implementation="cudnn")(query, key, value)
        with refuses(NotImplementedError, "float64"), jax.enable_x64(True):
            Linear(causal=True, **named)(*(np.asarray(x, np.float64) for x in (query, key, value)))


def chosen(table, text="", refusals=(), device=GPU):
    found = choice.automatic_state(
        device, table, rule(text), list(refusals), dtype="bfloat16", length=2048, head_dim=64
    )
    return found.name, found.reason


def test_when_it_is_chosen():
    passed = Table({}, frozenset({STATE}))
    assert chosen(passed) == ("pallas", "checked on this device")
    for table, text, refusals, device, word in (
        (None, "", (), GPU, "not checked"),
        (Table({}, failed={STATE: "1 of 4 checks"}), "pallas", (), GPU, "1 of 4 checks"),
        (passed, "-pallas", (), GPU, "forbids"),
        (passed, "xla", (), GPU, "says so"),
        (passed, "cudnn", (), GPU, "linear attention"),
        (passed, "", ("it takes side by side",), GPU, "side by side"),
        (passed, "", (), Device("tpu", "TPU v5e"), "no kernel for this device"),
    ):
        name, reason = chosen(table, text, refusals, device)
        assert name == "xla" and word in reason, reason
    assert chosen(None, "pallas")[0] == "pallas"
    times = {"xla": 1.0, STATE: 2.0}
    timed = dataclasses.replace(passed, timings=(Timing("state", "bfloat16", 4096, 64, times),))
    assert chosen(timed)[0] == "xla" and "4,096 tokens" in chosen(timed)[1]
    faster = dataclasses.replace(passed, timings=(Timing("state", "bfloat16", 4096, 64, times | {STATE: 0.5}),))
    assert chosen(faster)[0] == "pallas"


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # since JAX 0.11
def test_a_checked_kernel_runs_by_default(caplog):
    """And nothing else does: neither an unchecked one, nor in a decoding step."""
    spec = jax.ShapeDtypeStruct((2, 128, 4, 16), jnp.float32)
    op, target = Linear(causal=True), "__gpu$xla.gpu.triton"
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target)]
    for table, calls in ((Table({}, frozenset({STATE})), 4), (Table({}), 0)):
        jax.clear_caches()
        with aimed_at(GPU), tables.using(table), aimed_at_a_gpu():
            exported = jax.export.export(jax.jit(op), platforms=["cuda"], disabled_checks=allowed)(spec, spec, spec)
        assert exported.mlir_module().count(f"@{target}(") == calls


def test_a_shape_is_padded_to_what_triton_takes():
    blocks = chunks.Blocks(150, 80, 24)
    assert (blocks.chunk, blocks.length, blocks.num_chunks) == (64, 192, 3)
    assert (blocks.size_block, blocks.size, blocks.depth_block, blocks.depth) == (64, 128, 32, 32)
    assert chunks.Blocks(5, 1, 1).length == 16
