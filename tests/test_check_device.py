"""`xformer check-device`: a wrong kernel is caught, said, and never chosen; what is right is timed and kept."""

import dataclasses
import functools
import json
import types

import jax
import pytest

from xformer.attention import Full, Linear, Window
from xformer.attention.kernels import (
    Device,
    aimed_at,
    choice,
    interpreted,
    launch,
    pallas,
    splash,
    state_kernels,
    tables,
    triton,
)
from xformer.attention.kernels.tables import Table, Timing
from xformer.bench import device_check, device_times, timing
from xformer.bench.contender import Contender, Ready
from xformer.bench.device_check import Case
from xformer.commands import check_device, cli

CARD = Device("gpu", "NVIDIA H100 80GB HBM3", "cuda 12090", (9, 0))
QUICK = {
    "pallas": [Case("full, padded", Full(), 35, "float32", 16, 2, 2, real=(30, 0)),
               Case("causal, segments", Full(causal=True), 35, "float32", 16, 2, 2, segments=True)],
    "splash": [Case("full", Full(), 100, "float32", 64, 1, 1)],
    tables.STATE: [Case("linear, causal", Linear(causal=True), 20, "float32", 16, 1, 1)],
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "own"))
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    tables.find.cache_clear()
    jax.clear_caches()
    yield tmp_path / "own"
    tables.find.cache_clear()
    jax.clear_caches()  # what was traced with a wrong kernel


@pytest.fixture
def quick(monkeypatch):
    """Few checks instead of all."""
    check_all = functools.partial(device_check.check_all, cases=lambda kernel, tiny: QUICK[kernel])
    monkeypatch.setattr(device_check, "check_all", check_all)


def shifted(forward):
    """A forward pass whose output is half a percent too large; the backward pass is right."""

    def wrong(*arguments):
        out, lse = forward(*arguments)
        return out * 1.005, lse

    return wrong


def without_key(backward):
    """A backward pass that forgets a part of the gradient of the keys."""

    def wrong(*arguments):
        d_query, d_key, d_value = backward(*arguments)
        return d_query, d_key.at[:, 7].set(0), d_value

    return wrong


def larger(sums):
    """Sums of which some are too large."""
    return lambda *arguments: sums(*arguments).at[:, 3].multiply(1.01)


def leaking(key_padding):
    """Padding that is attended."""
    return lambda mask, kv_len: None


def ran(argv):
    return cli.exit_code(check_device.command, argv)


def said(capsys):
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.mark.parametrize(
    ("module", "name", "spoil", "word"),
    [
        (launch, "forward", shifted, "output"),
        (launch, "backward", without_key, "gradient of key"),
        (pallas, "key_padding", leaking, "full, padded"),
        (state_kernels, "weighted_sums", larger, "linear, causal"),
    ],
    ids=["output", "gradient", "padding", "state"],
)
def test_a_wrong_kernel_is_caught_and_never_chosen(module, name, spoil, word, quick, monkeypatch, capsys, own_folder):
    """In interpret mode. With what was found a card would not get the wrong kernel, fast as it is."""
    kernel = tables.STATE if module is state_kernels else "pallas"
    monkeypatch.setattr(check_device, "INTERPRETED", (kernel,))
    monkeypatch.setattr(module, name, spoil(getattr(module, name)))
    assert ran(["--interpret"]) == 1
    out, err = said(capsys)
    assert f"{kernel}: FAILED" in out and word in out
    assert err.splitlines()[-1].startswith(f"error: {kernel} failed the check and will not be chosen")
    (path,) = own_folder.glob("*.json")
    found = tables.parse(json.loads(path.read_text()), str(path))
    assert not found.passed and {*found.failed} == {kernel} and not found.timings
    if kernel == tables.STATE:
        facts = {"dtype": "float32", "length": 512, "head_dim": 64}
        assert choice.automatic_state(CARD, found, choice.Rule("pallas"), [], **facts).name == "xla"
        return
    of_card = dataclasses.replace(
        found, device=CARD.key, timings=(Timing("full", "float32", 512, 64, {"pallas": 1.0, "xla": 2.0}),)
    )
    facts = {"pattern": Full()._pattern(512, 1), "dtype": "float32", "length": 512, "head_dim": 64}
    right = dataclasses.replace(of_card, passed=frozenset({"pallas"}), failed={})
    for table, runs in ((of_card, "xla"), (right, "pallas")):
        assert choice.automatic(CARD, table, choice.Rule(), {"cudnn": ["float32"]}, **facts).name == runs
    assert choice.automatic(CARD, of_card, choice.Rule("pallas"), {}, **facts).name == "xla"


def test_wrong_distances_are_caught(monkeypatch):
    """Behind a causal cut a constant in all of them is lost in the softmax: a case that looks both ways must see it."""

    def later(scores):
        def wrong(tile, *arguments):
            tile.static = dataclasses.replace(static := tile.static, offset=tile.static.offset + 1)
            try:
                return scores(tile, *arguments)
            finally:
                tile.static = static

        return wrong

    monkeypatch.setattr(triton._Tile, "scores", later(triton._Tile.scores))
    (case,) = [one for one in device_check.cases("pallas", True) if one.segments]
    outcome = device_check.check("pallas", case, "cpu")
    assert outcome.wrong is not None and "is off by" in outcome.wrong


def test_right_kernels_pass(quick, capsys, own_folder):
    assert ran(["--interpret"]) == 0
    out, err = said(capsys)
    assert "pallas: passed every check" in out and "splash: passed every check" in out
    checked = [line for line in err.splitlines() if ": error " in line]  # progress: a line for each check
    assert len(checked) == sum(map(len, QUICK.values())) == 4
    (path,) = own_folder.glob("*.json")
    assert json.loads(path.read_text())["device"]["jax"] == jax.__version__
    assert not list(own_folder.glob("*.tmp"))


def test_a_kernel_that_raises_failed_and_one_that_was_not_checked_through_has_not_passed(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("out of\nregisters")

    monkeypatch.setattr(launch, "forward", broken)
    lines = []
    table = device_check.check_all(["pallas"], lines.append, cases=lambda *_: QUICK["pallas"])
    assert table.failed["pallas"].startswith("2 of 2 checks, first full, padded: out of registers")
    table = device_check.check_all(["pallas"], lines.append, seconds=0, cases=lambda *_: QUICK["pallas"])
    assert not table.passed and not table.failed
    assert "2 of 2 checks left out" in lines[-1]


def test_without_an_accelerator_there_is_nothing_to_time(capsys, own_folder):
    assert ran([]) == 0
    out, _ = said(capsys)
    assert "xla" in out and "--interpret" in out and not own_folder.exists()


def test_an_older_card_is_not_checked_with_what_it_cannot_run(quick, monkeypatch, capsys, own_folder):
    """Before compute capability 8.0 JAX has no cuDNN attention: that is no kernel that failed."""
    monkeypatch.setitem(QUICK, "pallas", QUICK["pallas"][:1])
    with aimed_at(Device("gpu", "Tesla V100-SXM2-16GB", "cuda 12090", (7, 0))):
        assert ran(["--check_only"]) == 0
    out, err = said(capsys)
    assert "cudnn is not checked: cuDNN's flash attention needs compute capability 8.0, this has 7.0" in err
    assert "pallas: passed every check" in out and "cudnn" not in out


def test_a_table_elsewhere_is_not_said_to_be_read(quick, monkeypatch, capsys, own_folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with aimed_at(CARD):
        monkeypatch.setattr(choice, "unusable", lambda device: {"pallas": ""})
        assert ran(["--check_only", f"--out={elsewhere}"]) == 0
    (path,) = elsewhere.iterdir()
    last = said(capsys)[0].splitlines()[-1]
    assert last == f"Written to {path}; implementation=None reads it where {tables.VARIABLE} names that folder."
    assert not own_folder.exists()


def test_the_budget_is_for_the_checks_where_nothing_is_timed(quick, capsys, own_folder):
    assert ran(["--interpret", "--seconds=1e-9"]) == 0
    out, err = said(capsys)
    assert out.count("not every check was run") == 3 and "2 of 2 checks left out, 1e-09 s are over" in err
    (path,) = own_folder.glob("*.json")
    assert not tables.parse(json.loads(path.read_text()), "here").passed


def test_earlier_times_of_a_kernel_that_fails_now_are_not_said_to_be_chosen(quick, monkeypatch, capsys, own_folder):
    """Times stay where no new ones were taken; the summary says what calls get with them."""
    monkeypatch.setitem(QUICK, "pallas", QUICK["pallas"][:1])
    monkeypatch.setitem(QUICK, tables.STATE, [])
    own_folder.mkdir()
    timings = tuple(
        Timing("full", "bfloat16", length, 64, {"pallas": 1.0, "xla": other})
        for length, other in ((512, 2.0), (64, 0.5))
    )
    path = own_folder / tables.file_name(CARD.key)
    path.write_text(json.dumps(Table(CARD.key, frozenset({"pallas"}), timings=timings).as_json()))
    monkeypatch.setattr(launch, "forward", shifted(launch.forward))
    monkeypatch.setattr(choice, "unusable", lambda device: {"pallas": ""})
    monkeypatch.setattr(device_times, "measure", lambda *rest: ())
    with aimed_at(CARD):
        assert ran([]) == 1
    out, _ = said(capsys)
    assert "full bfloat16 512 x 64: xla, the fastest of xla 2e+03 ms\n" in out and "pallas: FAILED" in out
    assert len(tables.parse(json.loads(path.read_text()), "here").timings) == 2 and "most like a call" in out


def test_flags_are_checked(capsys):
    for argv, words in (
        (["--seconds=0"], "--seconds: got '0', takes a positive number"),
        (["--tiny"], "no such flag"),
        (["--config.a=1"], "takes no config"),
    ):
        assert ran(argv) == 2
        assert words in said(capsys)[1]


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["pallas", "splash", tables.STATE])
def test_every_check_is_passed_in_the_interpreter(kernel):
    lines = []
    table = device_check.check_all([kernel], lines.append, tiny=True)
    assert table.passed == {kernel}, lines
    assert len(lines) == len(device_check.cases(kernel, True))


def test_the_checks_cover_what_a_call_can_be():
    for kernel in ("pallas", "splash", "cudnn", tables.STATE):
        for tiny in (True, False):
            found = device_check.cases(kernel, tiny)
            assert len({case.name for case in found}) == len(found)
            assert any(case.length % 2 for case in found) and any(case.real for case in found)
            assert any(case.op.causal for case in found) and len({case.dtype for case in found}) > 1
            assert any(case.kv_heads < case.heads for case in found)
            assert any(case.segments for case in found) or kernel == "cudnn"  # which takes none
            assert any(case.queries for case in found) or kernel in ("cudnn", tables.STATE)  # likewise
    assert any(case.options for case in device_check.cases("splash", True))  # a soft cap
    assert max(case.head_dim for case in device_check.cases("pallas", False)) == pallas.MAX_HEAD_DIM
    names = {type(case.op.position).__name__ for case in device_check.cases("pallas", True)}
    assert {"ALiBi", "Rotary"} <= names


def test_times_are_kept_with_the_tiles_that_were_fastest(monkeypatch):
    """On a device nobody has, with a clock of its own: candidates are compiled with their tiles and compared."""
    monkeypatch.setattr(pallas, "TILES", ((16, 32), (32, 16)))
    monkeypatch.setattr(device_times, "OPS", {"full": lambda length: Full()})
    monkeypatch.setattr(device_times, "TOKENS", 64)
    monkeypatch.setattr(device_times, "HEADS", 1)
    made = []
    forward = launch.forward
    monkeypatch.setattr(launch, "forward", lambda static, lists, *rest: (
        made.append((lists.q_block, lists.kv_block)), forward(static, lists, *rest))[1])  # fmt: skip

    def clock(calls, rounds):
        fastest = {"xla": 5.0, "pallas": 4.0, "pallas 16 x 32": 2.0, "pallas 32 x 16": 3.0}
        assert {*calls} == {*fastest}
        return {name: [fastest[name]] * 3 for name in calls}

    monkeypatch.setattr(timing, "in_turn", clock)
    lines, kept = [], []
    place = device_times.Place("full", "float32", 64, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xformer.attention.kernels._absent", lambda name: [])
        (found,) = device_times.measure(["pallas"], 600, lines.append, kept.append, [place])
    assert found == Timing("full", "float32", 64, 16, {"pallas": 2.0, "xla": 5.0}, {"pallas": (16, 32)})
    assert {(16, 32), (32, 16)} <= {*made}
    assert kept == [(found,)] and "pallas 16 x 32 2e+03 ms" in lines[-1]
    table = Table(CARD.key, frozenset({"pallas"}), timings=(found,))
    assert tables.parse(json.loads(json.dumps(table.as_json())), "here") == dataclasses.replace(table, source="here")
    with tables.using(table):
        assert pallas.tile_sizes(Full()._pattern(64, 1), 64, 64, 16) == (16, 32)
    text = "\n".join(check_device.report(CARD, table, ["cudnn", "pallas"], "here"))
    assert "full float32 64 x 16: pallas, the fastest of pallas 16 x 32" in text
    assert "cudnn: not every check was run" in text


def test_a_budget_that_is_over_leaves_out_cases():
    lines = []
    assert device_times.measure(["pallas"], 1e-9, lines.append) == ()
    assert f"{len(list(device_times.places()))} of {len(list(device_times.places()))} cases" in lines[-1]


@pytest.mark.parametrize(("seconds", "timed"), [(7, set()), (11, set()), (13, {"xla", "cudnn", "pallas"})])
def test_a_case_in_which_a_kernel_had_no_turn_is_left_out(seconds, timed, monkeypatch):
    """Calls would get XLA's as the fastest of one. Each candidate takes four seconds here; tiles come last."""
    now = [0.0]

    def contender(place, name, tiles):
        def prepare(case):
            now[0] += 4
            return Ready(timing.Call(lambda: None), 1.0)

        return Contender(device_times.label(name, tiles), prepare)

    monkeypatch.setattr(device_times, "contender", contender)
    monkeypatch.setattr(device_times, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(timing, "in_turn", lambda calls, rounds: {name: [1.0] for name in calls})
    lines, places = [], [device_times.Place("full", "bfloat16", 1024, 64)] * 2
    found = device_times.measure(["cudnn", "pallas"], seconds, lines.append, todo=places)
    assert [{*one.seconds} for one in found] == ([timed] if timed else [])
    assert ("no time is left for" in "".join(lines)) == (not timed) and "1 of 2 cases" in lines[-1]


def test_measured_tiles_suit_blocks_and_lengths():
    """Tiles never straddle blocks without need, nor outgrow the length; splash's are whole lanes."""
    timings = tuple(Timing(kind, "bfloat16", 4096, 64, {}, {"pallas": (128, 128), "splash": (1024, 512)})
                    for kind in tables.PATTERNS)  # fmt: skip
    with aimed_at(CARD), tables.using(Table(CARD.key, timings=timings)):
        blocks = Window(3, 3)._pattern(4096, 1)
        assert pallas.tile_sizes(blocks, 4096, 4096, 64) == (128, 128)
        assert pallas.tile_sizes(blocks, 20, 4096, 64) == (32, 128)
        assert splash.blocks(blocks, 4096, 4096, 64) == (1024, 512)
        assert splash.blocks(blocks, 200, 4096, 64) == (256, 512)
    assert splash.blocks(blocks, 200, 4096, 64) == (128, 512)


def test_tiles_measured_for_less_are_not_taken_for_more():
    """Wider heads, or float32, need more memory on the chip: the check passed with tiles of the kernel's own choice."""
    timings = tuple(
        Timing("full", dtype, 4096, head_dim, {}, {"pallas": tiles, "splash": tiles})
        for dtype, head_dim, tiles in (("bfloat16", 64, (128, 128)), ("float32", 64, (64, 32)))
    )
    full = Full()._pattern(4096, 1)
    with aimed_at(CARD), tables.using(Table(CARD.key, timings=timings)):
        of = lambda head_dim, dtype: pallas.tile_sizes(full, 4096, 4096, head_dim, dtype)
        for dtype, tiles in (("bfloat16", (128, 128)), ("float16", (128, 128)), ("float32", (64, 32))):
            assert of(64, dtype) == of(40, dtype) == tiles
            with tables.using(Table({})):
                own = of(80, dtype)
            assert of(80, dtype) == own == (64, 64)
        assert splash.blocks(full, 4096, 4096, 128, "float32") == (512, 512)
        spec = [jax.ShapeDtypeStruct((1, 256, 1, 64), jax.numpy.float32)] * 3
        with interpreted():
            text = str(jax.make_jaxpr(Full(implementation="pallas"))(*spec))
        assert "4,1,1" in text or "grid=(4, 1, 1)" in text  # query tiles of 64


def test_the_whole_command_as_on_a_card(quick, monkeypatch, capsys, own_folder):
    """cuDNN is not here, so it fails; pallas passes, is timed beside xla, and is what calls get from then on."""
    monkeypatch.setitem(QUICK, "pallas", QUICK["pallas"][:1])
    monkeypatch.setitem(QUICK, "cudnn", [Case("full", Full(), 32, "bfloat16", 16, 1, 1)])
    monkeypatch.setattr(pallas, "TILES", ())
    monkeypatch.setattr(device_times, "places", lambda: [device_times.Place("full", "float32", 32, 16)])
    monkeypatch.setattr(device_times, "TOKENS", 32)
    monkeypatch.setattr(device_times, "HEADS", 1)
    monkeypatch.setattr(timing, "in_turn", lambda calls, rounds: {name: [float(len(name))] for name in calls})
    with aimed_at(CARD):
        assert ran(["--seconds=600"]) == 1
        out, err = said(capsys)
        assert "cudnn: FAILED 1 of 1 checks, first full" in out and "pallas: passed every check" in out
        assert f"kind: {CARD.kind}" in out and "full float32 32 x 16: xla, the fastest of xla 3e+03 ms, pallas" in out
        assert "timing, up to 600 s" in err and err.splitlines()[-1].startswith("error: cudnn failed the check")
        (path,) = own_folder.iterdir()
        assert path.name == tables.file_name(CARD.key)
        found = tables.current()
        assert found.passed == {"pallas", tables.STATE} and {*found.failed} == {"cudnn"} and len(found.timings) == 1
        facts = {"pattern": Full()._pattern(64, 1), "length": 64, "head_dim": 64}
        assert choice.automatic(CARD, found, choice.Rule(), {}, dtype="bfloat16", **facts).name == "pallas"
        assert choice.automatic(CARD, found, choice.Rule(), {}, dtype="float32", **facts).name == "xla"
