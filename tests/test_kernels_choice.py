"""Which implementation a call gets where none is named: on devices nobody here has, and by planted tables."""

import contextlib
import dataclasses
import importlib
import inspect
import json
import logging
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import refuses
from test_kernels_pallas import aimed_at_a_gpu

import xformer
from xformer import cost
from xformer.attention import (
    ALiBi,
    BigBird,
    Full,
    Longformer,
    Reformer,
    Retention,
    Shape,
    Shaw,
    TopKBlocks,
    Window,
    dot_product_attention,
)  # fmt: skip
from xformer.attention import device as devices
from xformer.attention.kernels import KERNELS as KERNEL_MODULES
from xformer.attention.kernels import Device, aimed_at, choice, tables
from xformer.attention.kernels.tables import Table, Timing
from xformer.commands import comparison_runs, run
from xformer.commands.comparison_plan import Planned
from xformer.config import load_experiment

H100 = Device("gpu", "NVIDIA H100 80GB HBM3", "cuda 12090", (9, 0))
V100 = Device("gpu", "Tesla V100", "cuda 12090", (7, 0))
MI300 = Device("gpu", "AMD Instinct MI300X", "rocm 7")
TPU = Device("tpu", "TPU v5 lite", "libtpu")
CPU = Device("cpu", "cpu")
KERNELS = ("cudnn", "pallas", "splash")


@pytest.fixture(autouse=True)
def no_tables_and_no_variable(tmp_path, monkeypatch):
    """No table is found but those that a test plants, and each test reads and says anew."""
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "own"))
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(tables, "shipped_folder", lambda: tmp_path / "shipped")
    tables.find.cache_clear()
    choice.announce.cache_clear()
    yield
    tables.find.cache_clear()
    choice.announce.cache_clear()


def chosen(op, device, *, dtype=jnp.bfloat16, length=256, head_dim=64, mesh=None, **options):
    """What a call is given to, as the jaxpr shows it: the kernel's own marks are looked for."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for name, module in KERNEL_MODULES.items():
            fake = lambda inputs, *rest, name=name: (
                seen.append(name) or jnp.zeros((*inputs.query.shape[:2], 4, head_dim), inputs.query.dtype)
            )
            patch.setattr(module, "attend", fake)
        spec = jax.ShapeDtypeStruct((2, length, 4, head_dim), dtype)
        params = op.init(jax.random.key(0), Shape(2, length, length, 4, head_dim))
        with aimed_at(device), contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
            jax.eval_shape(lambda q, k, v: op(q, k, v, params=params, **options), spec, spec, spec)
    return seen[0] if seen else "xla"


MASK = np.ones((2, 1, 1, 256), bool)
SEGMENTS = np.zeros((2, 256), int)
CHECKED = frozenset(KERNELS)
# op, options, what runs: (on an H100, on an H100 with the check passed, on a TPU)
CALLS = {
    "full": (Full(), {}, "cudnn", "cudnn", "splash"),
    "full, float32": (Full(), {"dtype": jnp.float32}, "xla", "pallas", "splash"),
    "full, float16": (Full(), {"dtype": jnp.float16}, "cudnn", "cudnn", "xla"),
    "full, padded": (Full(), {"mask": MASK}, "cudnn", "cudnn", "splash"),
    "full, narrow heads": (Full(), {"head_dim": 40}, "cudnn", "cudnn", "xla"),
    "full, segments": (Full(), {"segment_ids": SEGMENTS}, "xla", "pallas", "splash"),
    "full, soft cap": (Full(), {"softcap": 30.0}, "xla", "xla", "splash"),
    "full, ALiBi": (Full(position=ALiBi()), {}, "xla", "pallas", "xla"),
    "full, Shaw": (Full(position=Shaw(max_distance=4)), {}, "xla", "xla", "xla"),
    "full, bias": (Full(), {"bias": np.zeros((1, 1, 256, 256), np.float32)}, "xla", "xla", "xla"),
    "full, bound to an offset": (Full(causal=True), {"query_offset": 0}, "cudnn", "cudnn", "splash"),
    "causal": (Full(causal=True), {}, "cudnn", "cudnn", "splash"),
    "causal, padded": (Full(causal=True), {"mask": MASK}, "xla", "pallas", "splash"),
    "causal window": (Window(left=50, right=0, causal=True), {}, "cudnn", "cudnn", "splash"),
    "window": (Window(left=50, right=50), {}, "xla", "pallas", "splash"),
    "bigbird": (BigBird(block_size=32), {}, "xla", "pallas", "splash"),
    "longformer": (Longformer(window=16), {}, "xla", "pallas", "splash"),
    "xla by name": (Full(implementation="xla"), {}, "xla", "xla", "xla"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_runs_by_default(name):
    """cuDNN and splash where they can; our own kernels once they are checked; nothing but the engine elsewhere."""
    op, options, unchecked, checked, tpu = CALLS[name]
    assert chosen(op, H100, **options) == unchecked
    assert chosen(op, TPU, **options) == tpu
    with tables.using(Table(H100.key, CHECKED)):
        assert chosen(op, H100, **options) == checked
    for device in (V100, MI300, CPU):
        assert chosen(op, device, **options) == "xla"


def test_a_kernel_that_failed_the_check_is_never_chosen(monkeypatch):
    fast = Timing("full", "bfloat16", 256, 64, {"cudnn": 1.0, "pallas": 2.0, "splash": 1.0, "xla": 9.0})
    for failed, runs in ((("cudnn",), "pallas"), (("cudnn", "pallas"), "xla"), ((), "cudnn")):
        table = Table(H100.key, CHECKED - {*failed}, dict.fromkeys(failed, "wrong"), (fast,))
        with tables.using(table):
            assert chosen(Full(), H100) == runs
    with tables.using(Table(TPU.key, failed={"splash": "wrong"}, timings=(fast,))):
        assert chosen(Full(), TPU) == "xla"
        monkeypatch.setenv(choice.VARIABLE, "splash")
        assert chosen(Full(), TPU) == "xla"


def test_a_named_kernel_that_failed_is_taken_with_a_warning(caplog):
    for op, failed in (
        (Full(implementation="splash"), "splash"), (Retention(causal=True, implementation="pallas"), tables.STATE),
    ):  # fmt: skip
        device = TPU if failed == "splash" else H100
        caplog.clear()
        for wrong in ({}, {failed: "1 of 4 checks"}):
            with aimed_at(device), tables.using(Table(device.key, failed=wrong)):
                jax.eval_shape(lambda *x, op=op: op(*x), *[jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)] * 3)
            assert ("failed the check on this device: 1 of 4 checks" in caplog.text) == bool(wrong)


def test_the_line_says_that_a_kernel_failed(caplog):
    """Else what is left would be called the fastest without a word."""
    timing = Timing("full", "bfloat16", 256, 64, {"cudnn": 1.0, "xla": 9.0})
    with caplog.at_level(logging.INFO), tables.using(Table(H100.key, failed={"cudnn": "wrong"}, timings=(timing,))):
        assert chosen(Full(), H100) == "xla"
    assert "cudnn failed the check" in caplog.text


def test_the_fastest_in_the_most_alike_case_is_chosen():
    """Lengths count by their ratio; a kernel that was not timed is not taken before one that was."""
    times = [
        Timing("causal", "bfloat16", 1024, 64, {"xla": 1.0, "cudnn": 2.0}),
        Timing("causal", "bfloat16", 8192, 64, {"xla": 3.0, "cudnn": 2.0}),
        Timing("causal", "bfloat16", 1024, 128, {"xla": 3.0, "pallas": 2.0}),
        Timing("causal", "float32", 1024, 64, {"xla": 1.0, "pallas": 2.0}),
    ]
    with tables.using(Table(H100.key, CHECKED, timings=tuple(times))):
        for length, head_dim, runs in ((1500, 64, "xla"), (6000, 64, "cudnn"), (1024, 128, "pallas"), (64, 32, "xla")):
            assert chosen(Full(causal=True), H100, length=length, head_dim=head_dim) == runs
        assert chosen(Full(causal=True), H100, dtype=jnp.float16, length=8192) == "cudnn"
        assert chosen(Full(causal=True), H100, dtype=jnp.float32) == "xla"
        assert chosen(Full(), H100) == "cudnn"  # no such case was timed


def test_a_variable_forces_and_forbids(monkeypatch):
    for text, device, runs in (
        ("xla", H100, "xla"), ("-cudnn", H100, "xla"), ("-splash", TPU, "xla"), ("-pallas", H100, "cudnn"),
        ("pallas", H100, "pallas"), ("splash", H100, "xla"), ("cudnn", CPU, "xla"), (" ,", H100, "cudnn"),
    ):  # fmt: skip
        monkeypatch.setenv(choice.VARIABLE, text)
        assert chosen(Full(), device) == runs, text
    assert chosen(Full(implementation="xla"), H100) == "xla"  # what is named is taken
    for text, words in (
        ("cudn", ["cudnn", "did you mean"]), ("-xla", ["-pallas"]), ("xla,pallas", ["one name"]),
        ("pallas,-pallas", ["forces and forbids pallas"]),
    ):  # fmt: skip
        monkeypatch.setenv(choice.VARIABLE, text)
        with refuses(ValueError, choice.VARIABLE, *words):
            Full()(*[jnp.ones((1, 4, 1, 8))] * 3)


def mesh(*axes, kind=jax.sharding.AxisType.Auto):
    return jax.sharding.AbstractMesh((2,) * len(axes), axes, axis_types=(kind,) * len(axes))


def test_meshes_that_kernels_follow():
    """Many devices: taken where the mesh says what is cut, or where the kernel finds out itself."""
    eight = dataclasses.replace(TPU, count=8)
    for axes, op, runs in (
        (("data", "fsdp", "tensor"), BigBird(block_size=32), "splash"),
        (("data", "sequence"), Window(left=20, right=3), "splash"),
        (("data", "sequence"), Full(), "xla"),
        (("sequence",), Window(left=200, right=3), "xla"),  # reaches over more than the other half
        (("model",), Full(), "xla"),
    ):
        assert chosen(op, eight, mesh=mesh(*axes)) == runs, axes
    assert chosen(Full(), eight) == "xla"
    assert chosen(Full(), dataclasses.replace(H100, count=8)) == "cudnn"
    manual = mesh("data", kind=jax.sharding.AxisType.Manual)
    assert chosen(Full(), eight, mesh=manual) == "splash"


def test_a_shard_map_that_checks_what_varies_gets_the_engine():
    """Kernels do not say what varies; without the check they run on the shards. Numbers are what they were."""
    seen = jnp.arange(4 * 16 * 2 * 64, dtype=jnp.float32).reshape(4, 16, 2, 64) / 1e4
    sharding = jax.sharding.PartitionSpec("data")
    runs = {}
    for check in (True, False):
        chose = []

        def attend(x, chose=chose):
            with pytest.MonkeyPatch.context() as patch:
                fake = lambda inputs, *rest: chose.append("splash") or jnp.zeros_like(inputs.query[:, :, :, 0])
                patch.setattr(KERNEL_MODULES["splash"], "attend", fake)
                return Full()(x, x, x)

        with aimed_at(TPU):
            mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
            jax.eval_shape(
                jax.shard_map(attend, mesh=mesh, in_specs=sharding, out_specs=sharding, check_vma=check), seen
            )
        runs[check] = chose
    assert runs == {True: [], False: ["splash"]}


def test_half_precision_is_recommended_where_a_device_is_made_for_it(monkeypatch, capsys, tmp_path):
    assert [device.made_for_half for device in (H100, V100, MI300, TPU, CPU)] == [True, False, False, True, False]
    settings = types.SimpleNamespace(config=types.SimpleNamespace(train=types.SimpleNamespace(dtype="float32")))
    settings.trainer = lambda *_, **__: types.SimpleNamespace(fit=lambda: {"name": "a", "test": {}})
    monkeypatch.setattr(run, "load_experiment", lambda *_: settings)
    monkeypatch.setattr(run, "as_json", lambda config: {})
    for device, dtype, said in ((H100, "float32", 1), (H100, "bfloat16", 0), (V100, "float32", 0)):
        settings.config.train.dtype = dtype
        with aimed_at(device):
            run.command(["--config=demo", f"--workdir={tmp_path}"])
        assert capsys.readouterr().err.count("train.dtype=bfloat16") == said


def test_half_precision_is_recommended_from_python_and_once_in_a_comparison(monkeypatch, capsys, tmp_path):
    trainer = lambda *_, **__: types.SimpleNamespace(fit=lambda: {"name": "a"})
    monkeypatch.setattr("xformer.experiment.Experiment.trainer", trainer)
    monkeypatch.setattr(comparison_runs, "attempt", lambda *_: comparison_runs.FINISHED)
    planned = lambda name, config: Planned("", name, 0, config, tmp_path / name)
    with aimed_at(H100):
        xformer.fit("demo", tmp_path)
        config = load_experiment("demo", []).config
        comparison_runs.train([planned("full", config), planned("window", config)], None, {})
    lines = [line for line in capsys.readouterr().err.splitlines() if "train.dtype=bfloat16" in line]
    assert len(lines) == 2 and all(H100.kind in line for line in lines)


def test_without_a_cudnn_that_works_the_engine_runs(monkeypatch):
    """JAX refuses at the call, for want of a library here, or for a version: a default must not end in an error."""
    (reason,) = KERNEL_MODULES["cudnn"].unusable()
    assert "cuDNN" in reason
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen(Full(), H100) == "xla"
    monkeypatch.setattr(KERNEL_MODULES["cudnn"], "unusable", list)
    assert chosen(Full(), H100) == "cudnn"


def test_what_the_environment_asks_for_in_vain_is_said_on_a_cpu_too(monkeypatch, caplog):
    monkeypatch.setenv(choice.VARIABLE, "pallas")
    chosen(Full(), CPU)
    assert "pallas, which XFORMER_IMPLEMENTATION asks for, cannot do the call: there is none for cpu" in caplog.text
    assert "check-device" not in caplog.text


def test_what_a_device_cannot_run_is_not_forced_on_it(monkeypatch, caplog):
    """JAX has no cuDNN attention before compute capability 8.0."""
    monkeypatch.setenv(choice.VARIABLE, "cudnn")
    assert chosen(Full(), V100) == "xla"
    assert "cuDNN's flash attention needs compute capability 8.0" in caplog.text


# Tables in files.


def write(folder, table, name=None):
    folder.mkdir(exist_ok=True)
    path = folder / (name or tables.file_name(table.device))
    path.write_text(json.dumps(table.as_json()))
    return path


GOOD = Table(H100.key, CHECKED, timings=(Timing("blocks", "bfloat16", 512, 64, {"pallas": 1.0, "xla": 2.0},
                                                {"pallas": (32, 16)}),))  # fmt: skip
SPARSE = BigBird(block_size=32)


def test_the_own_table_ranks_above_the_shipped_one(tmp_path, caplog):
    slow = dataclasses.replace(GOOD, timings=(Timing("blocks", "bfloat16", 512, 64, {"pallas": 2.0, "xla": 1.0}),))
    other_driver = {**H100.key, "driver": "cuda 12000"}
    write(tmp_path / "shipped", dataclasses.replace(GOOD, device=other_driver))
    assert chosen(SPARSE, H100) == "pallas"  # shipped, of another driver
    with aimed_at(H100):
        assert tables.tiles("pallas", SPARSE.token_pattern(512, 4), 512, 64) == (32, 16)
    write(tmp_path / "own", slow)
    assert chosen(SPARSE, H100) == "pallas"  # read once a process
    tables.find.cache_clear()
    assert chosen(SPARSE, H100) == "xla"
    assert not caplog.records


PLANTED = {
    "jax": lambda text: text.replace(jax.__version__, "0.9.9"),
    "device": lambda text: text.replace(H100.kind, "NVIDIA H100 PCIe"),
    "kernels": lambda text: text.replace(H100.key["kernels"], "00000000"),
    "no JSON": lambda text: text[:-30],
    "empty": lambda text: "",
    "no object": lambda text: "[1, 2]",
    "deep": lambda text: "[" * 100_000,
    "bytes": lambda text: "\x00\udcff",
    "unknown kernel": lambda text: text.replace('"pallas"', '"palas"'),
    "odd tile": lambda text: text.replace("[32, 16]", "[48, 16]"),
    "huge tile": lambda text: text.replace("[32, 16]", "[4096, 16]"),
    "no number": lambda text: text.replace('"pallas": 1.0', '"pallas": NaN'),
    "format": lambda text: text.replace('"format": 1', '"format": 2'),
    "missing": lambda text: text.replace('"passed"', '"past"'),
    "both": lambda text: text.replace('"failed": {}', '"failed": {"pallas": "wrong"}'),
    "long": lambda text: text + " " * tables.MOST_BYTES,
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("where", ["own", "shipped"])
def test_a_planted_table_is_ignored_with_one_line(name, where, tmp_path, caplog):
    path = write(tmp_path / where, GOOD)
    path.write_bytes(PLANTED[name](path.read_text()).encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING, "xformer.attention.kernels.tables"):
        assert [chosen(SPARSE, H100) for _ in range(3)] == ["xla"] * 3
        assert chosen(Full(), H100) == "cudnn"
    (line,) = [one.getMessage() for one in caplog.records if one.name.endswith("tables")]
    assert str(path) in line and "check-device" in line and "\n" not in line and len(line) < 700


def test_a_folder_that_cannot_be_there_is_none(monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, "~nobody-has-this-name/tables")
    assert chosen(SPARSE, H100) == "xla"


def test_tables_may_have_the_tiles_that_are_timed():
    assert {name: max(map(max, module.TILES)) for name, module in KERNEL_MODULES.items() if module.TILES} == (
        tables.LARGEST_TILE
    )


def test_a_table_of_another_version_is_named(tmp_path, caplog):
    """It lies under a name of its own, which the present device and versions would not look for."""
    write(tmp_path / "own", dataclasses.replace(GOOD, device={**GOOD.device, "jax": "0.9.9"}))
    with caplog.at_level(logging.WARNING):
        assert chosen(SPARSE, H100) == "xla"
    assert "jax '0.9.9', here" in caplog.text


def test_several_processes_read_what_all_have(tmp_path, monkeypatch):
    """The cache folders of machines may differ, and processes that compile different programs would hang."""
    many = dataclasses.replace(H100, processes=2)
    write(tmp_path / "own", GOOD)
    assert chosen(SPARSE, many, mesh=mesh("data")) == "pallas"
    monkeypatch.delenv(tables.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "xformer").mkdir(parents=True)
    write(tmp_path / "cache" / "xformer" / "devices", GOOD)
    tables.find.cache_clear()
    assert chosen(SPARSE, many, mesh=mesh("data")) == "xla"
    assert chosen(SPARSE, H100) == "pallas"


def test_one_line_says_what_runs_and_how_to_check(caplog):
    with caplog.at_level(logging.INFO, "xformer.attention.kernels.choice"):
        for _ in range(3):
            chosen(Full(), H100)
        (line,) = caplog.records
        assert line.levelno == logging.WARNING
        for word in (H100.kind, "cudnn", "xformer check-device"):
            assert word in line.getMessage()
        caplog.clear()
        chosen(Full(), CPU)
        assert not caplog.records
        choice.announce.cache_clear()
        with tables.using(GOOD):
            chosen(Full(), H100)
        assert [one.levelno for one in caplog.records] == [logging.INFO]
        assert "check-device" not in caplog.text
        caplog.clear()
        chosen(Full(), MI300)  # there is nothing that could be checked
        assert MI300.kind in caplog.text and "check-device" not in caplog.text


def test_the_line_is_of_what_runs_and_not_of_what_is_looked_at(caplog):
    """A config is traced when it is built, and a step when it is counted, without the mesh that the step then has."""
    eight = dataclasses.replace(TPU, count=8)
    spec = [jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)] * 3
    with aimed_at(eight):
        load_experiment("demo:window", [])
        cost.count(Full(), *spec)
        Full().cost(Shape(2, 256, 256, 4, 64))
    assert not [one for one in caplog.records if "attention on" in one.getMessage()]
    assert chosen(Full(), eight) == "xla"
    assert caplog.text.count("no mesh in scope") == 1


@pytest.mark.parametrize("forced", [None, "pallas"])
def test_what_no_kernel_can_do_is_said_too(forced, caplog, monkeypatch):
    if forced is not None:
        monkeypatch.setenv(choice.VARIABLE, forced)
    begins = f"{forced}, which {choice.VARIABLE} asks for, cannot do the call: " if forced else ""
    spec = [jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)] * 3
    scanned = SPARSE
    plan = jax.tree.map(lambda x: x[0], scanned.plans(Shape(2, 256, 256, 4, 64), 2))
    for call, why in (
        (lambda *x: scanned(*x, plan=plan), "scanned layers share one program"),
        (Reformer(), "the pairs of Reformer depend on data"),
        (TopKBlocks(block_size=32), "the tiles of TopKBlocks depend on data"),
        (lambda *x: dot_product_attention(*x, return_residual=True), "kernels give no log-sum-exp"),
    ):
        caplog.clear()
        choice.announce.cache_clear()
        with aimed_at(H100):
            jax.eval_shape(lambda *x, call=call: call(*x), *spec)
        assert f"attention on {H100.kind} runs xla: {begins or 'no kernel can do the call ('}{why}" in caplog.text


def test_commands_show_the_line_on_a_checked_device_too():
    """There it is no warning, and a log of warnings would not have it."""
    code = """
from xformer.attention.device import Device
from xformer.attention.kernels import choice
from xformer.commands import cli
cli.main(lambda argv: choice.announce(Device("gpu", "a card"), choice.Choice("cudnn", "the fastest"), True))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1:] == ["INFO: attention on a card runs cudnn: the fastest"]


def test_shipped_tables_are_tables():
    """Each of them is whole, and bears the name under which it is looked for."""
    folder = Path(__file__).parent.parent / "benchmarks" / "results" / "devices"
    assert folder.is_dir()
    for path in folder.glob("*.json"):
        assert tables.file_name(tables.parse(json.loads(path.read_text()), str(path)).device) == path.name


# What is lowered for devices that nobody here has.


def test_the_default_lowers_to_cudnn(monkeypatch):
    """Forward and gradient; JAX asks for cuDNN's version, which this machine does not have."""
    inside = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(inside, "check_cudnn_version", lambda: 91000)
    spec = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    run = jax.jit(jax.grad(lambda q, k, v: Full(causal=True)(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
    with aimed_at(H100):
        text = run.trace(spec, spec, spec).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text


def test_the_default_lowers_to_splash():
    spec = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    run = lambda q, k, v: BigBird(block_size=64)(q, k, v, softcap=20.0).astype(jnp.float32).sum()
    with aimed_at(TPU):
        exported = jax.export.export(jax.jit(jax.grad(run, argnums=(0, 1, 2))), platforms=["tpu"])(spec, spec, spec)
    assert exported.mlir_module().count("@tpu_custom_call(") == 3


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # since JAX 0.11
def test_the_default_lowers_to_checked_kernels_with_their_tiles():
    spec = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    target = "__gpu$xla.gpu.triton"
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target)]
    with aimed_at(H100), tables.using(GOOD), aimed_at_a_gpu():
        run = jax.jit(lambda q, k, v: BigBird(block_size=64)(q, k, v))
        text = jax.export.export(run, platforms=["cuda"], disabled_checks=allowed)(spec, spec, spec).mlir_module()
        jaxpr = str(jax.make_jaxpr(lambda q: BigBird(block_size=64)(q, q, q))(spec))
    assert text.count(f"@{target}(") == 1
    assert "16,4,2" in jaxpr or "grid=(16, 4, 2)" in jaxpr  # query tiles of 32


def test_the_default_device_is_the_one_that_is_described(monkeypatch):
    """On a machine with a card a part may run on the CPU."""
    cpu = jax.local_devices()[1]
    facts = {"platform": "gpu", "device_kind": "a card", "compute_capability": "9.0"}
    first = type("Card", (), facts | {"client": types.SimpleNamespace(platform_version="PJRT C API\ncuda 12090")})()
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [cpu if backend == "cpu" else first])
    seen = devices.present()
    assert (seen.kind, seen.capability, seen.platform) == ("a card", (9, 0), "gpu")
    assert "\n" not in seen.driver and "cuda 12090" in seen.driver
    for default in (cpu, "cpu"):
        with jax.default_device(default):
            assert devices.present().platform == "cpu"


def test_importing_reads_no_device():
    """The devices are looked at when the first call is traced: before, `jax.distributed` may have to start."""
    code = "import xformer.attention; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_signature_of_a_choice_is_plain():
    """A function of descriptions: no array, no global."""
    names = {*inspect.signature(choice.automatic).parameters}
    assert names == {"device", "table", "rule", "refusals", "pattern", "dtype", "length", "head_dim"}
    made = choice.automatic(
        TPU,
        None,
        choice.Rule(),
        {"splash": ["no"]},
        pattern=Full()._pattern(8, 1),
        dtype="float32",
        length=8,
        head_dim=8,
    )
    assert made == choice.Choice("xla", "") and "splash: no" in made.reason


@pytest.mark.parametrize("op", [Full(), Full(causal=True), Window(left=100, right=0, causal=True)], ids=str)
def test_what_runs_by_default_is_counted(op, monkeypatch):
    """cuDNN's calls are no matrix products that a jaxpr shows; a step that has them has a cost all the same."""
    inside = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(inside, "check_cudnn_version", lambda: 91000)
    shape = Shape(2, 512, 512, 4, 64, 2)
    query, key = (jax.ShapeDtypeStruct((2, 512, heads, 64), jnp.bfloat16) for heads in (4, 2))
    run = lambda q, k, v: op(q, k, v).astype(jnp.float32).sum()
    with aimed_at(H100):
        forward = cost.count(run, query, key, key)
        both = cost.count(jax.grad(run, argnums=(0, 1, 2)), query, key, key)
        stated = dataclasses.replace(op, implementation="cudnn").cost(shape)
    assert not forward.uncounted and not both.uncounted
    assert forward.flops == stated.flops and 2 * both.flops == 7 * stated.flops
    if not op.causal:
        assert forward.flops == 4 * 2 * 4 * 512 * 512 * 64
