"""The benchmark: what it measures, refuses and writes; never how long anything takes."""

import io
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import decoding, step, step_sizes, targets, train_steps
from xformer import cost
from xformer.attention import ATTENTIONS, ALiBi, BigBird, Full, Linformer, Shape, Window
from xformer.bench import benchmark, inputs, jax_contenders, machine, memory, peers, timing
from xformer.bench.contender import Case, Contender, Ready
from xformer.bench.timing import Call, Rounds
from xformer.commands import bench, cli
from xformer.report import speed

SIZES = ["--heads=2", "--head_dim=8", "--block_size=8", "--rank=8", "--rounds=1"]
FAKE = """
from xformer.bench.contender import Contender
from xformer.bench.inputs import arrays
from xformer.bench.jax_contenders import compiled, textbook
import functools
def contenders(case):
    run = functools.partial(textbook, causal=case.op.causal)
    return [Contender("fake", lambda case: compiled(run, arrays(case, True), case, heads_first=True))]
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(machine, "gemm_rate", lambda dtype="float32": 1e11)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)


def run(tmp_path: Path, *flags: str) -> dict:
    out = tmp_path / "made" / "bench.json"
    assert cli.exit_code(bench.command, [*SIZES, f"--out={out}", *flags]) == cli.FINISHED
    return json.loads(out.read_text())


def rows(result: dict, **keys: object) -> list[dict]:
    return [row for row in result["rows"] if all(row[name] == value for name, value in keys.items())]


def test_every_contender_of_every_variant_is_measured_both_ways(tmp_path, capsys):
    (extra := tmp_path / "extra.py").write_text(FAKE)
    result = run(tmp_path, "--attention=full,window+causal", "--lengths=32", "--peers=none", f"--extra={extra}")
    keys = [(row["length"], row["mode"], row["variant"], row["contender"]) for row in result["rows"]]
    assert keys == [
        (32, mode, variant, who)
        for mode in ("forward", "forward_backward")
        for variant in ("full", "window+causal")
        for who in ("xformer", "fake")
    ]
    # A dense causal peer computes what a window does only where the window holds all.
    (off,) = rows(result, contender="fake", variant="window+causal", length=32, mode="forward")
    assert off["skipped"].startswith("computes something else: its output is off by")
    for row in rows(result, contender="xformer"):
        op = Full() if row["variant"] == "full" else Window(left=8, right=8, causal=True)
        shape = Shape(1, row["length"], row["length"], 2, 8)
        if row["mode"] == "forward":
            assert row["flops"] == op.cost(shape).flops
        q = jnp.zeros((1, row["length"], 2, 8))
        both = lambda q, k, v, g, op=op: jax.vjp(op, q, k, v)[1](g)
        if row["mode"] == "forward_backward":
            assert row["flops"] == cost.count(both, q, q, q, q).flops
        low, high = row["quartiles"]
        assert low <= row["seconds"] <= high and row["rounds"] == 1 and row["extra_bytes"] >= 0
        assert row["flops_per_second"] == pytest.approx(row["flops"] / row["seconds"])
        assert row["share_of_gemm"] == pytest.approx(row["flops_per_second"] / 1e11)
    (dense,) = rows(result, contender="fake", variant="full", length=32, mode="forward")
    assert dense["flops"] == 4 * 32 * 32 * 2 * 8
    assert (tmp_path / "made" / "bench.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == " ".join(speed.COLUMNS).split()
    assert len(table.splitlines()) == 1 + len(result["rows"])


def test_the_file_says_what_the_numbers_depend_on(tmp_path):
    result = run(tmp_path, "--attention=alibi", "--lengths=16", "--peers=none", "--dtype=bfloat16", "--batch=2")
    expected = {"batch": 2, "heads": 2, "head_dim": 8, "dtype": "bfloat16", "block_size": 8, "rank": 8}
    assert {name: result[name] for name in expected} == expected
    assert result["gemm_flops_per_second"] == 1e11
    machine = result["machine"]
    assert machine["platform"] == "cpu" and machine["cpu"] and machine["cores"] >= 1
    assert machine["versions"]["jax"] == jax.__version__
    assert "--xla_force_host_platform_device_count=8" in machine["environment"]["XLA_FLAGS"]
    assert machine["commit"] is None or len(machine["commit"].rstrip("+")) == 40


def test_a_length_that_a_variant_cannot_do_is_recorded(tmp_path):
    result = run(tmp_path, "--attention=linformer", "--lengths=4,16", "--peers=none")
    assert all("rank" in row["skipped"] for row in rows(result, length=4))
    assert all("seconds" in row for row in rows(result, length=16))


def test_what_needs_too_much_memory_or_time_is_recorded_and_not_run(tmp_path, capsys):
    result = run(tmp_path, "--attention=full", "--lengths=64", "--memory_gb=1e-6")
    assert {row["contender"] for row in result["rows"]} >= {"xformer", "jax.nn", "jax einsum"}
    assert all("above the 1e-06 GB of --memory_gb" in row["skipped"] for row in result["rows"])
    assert not (tmp_path / "made" / "bench.png").exists()
    assert "skipped: 64, forward, full, jax.nn: would take" in capsys.readouterr().out
    result = run(tmp_path, "--attention=full", "--lengths=32,16", "--call_seconds=1e-12", "--peers=none")
    assert [row["length"] for row in result["rows"]] == [16, 16, 32, 32]
    assert all("seconds" in row for row in rows(result, length=16))
    assert all("s of --call_seconds" in row["skipped"] for row in rows(result, length=32))


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--attention=ful", "--attention: got 'ful': takes full, window"),
        ("--attention=linformer+causal", "Linformer cannot be causal"),
        ("--attention=", "--attention: got '', takes names or numbers separated by commas"),
        ("--lengths=16,x", "--lengths: got 'x', takes a positive integer"),
        ("--lengths=0", "--lengths: got '0', takes a positive integer"),
        ("--call_seconds=nan", "--call_seconds: got 'nan', takes a positive number"),
        ("--dtype=int8", "invalid choice: 'int8'"),
        ("--out=a.txt", "--out: got 'a.txt', takes a file that ends in .json"),
        ("--extra=nowhere.py", "--extra: got 'nowhere.py', takes a Python file"),
        ("--lenght=3", "--lenght: no such flag"),
        ("--config.seed=3", "bench takes no config"),
    ],
)
def test_a_wrong_flag_is_one_line(flag, says, capsys):
    assert cli.exit_code(bench.command, [*SIZES, flag]) == cli.WRONG_ARGUMENTS
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line


def test_an_extra_file_must_define_contenders(tmp_path):
    (path := tmp_path / "extra.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"takes a file that defines contenders\(case\)"):
        peers.load_extra(path)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_peers_of_jax_compute_the_same(causal, backward):
    case = Case(Full(causal=causal), Shape(2, 24, 24, 2, 8), backward=backward)
    ready, skipped = benchmark.prepare([jax_contenders.ours(), *jax_contenders.jax_peers(case)], case)
    assert list(ready) == ["xformer", "jax.nn", "jax einsum"] and not skipped
    assert len({one.flops for one in list(ready.values())[1:]}) == 1
    assert not list(jax_contenders.jax_peers(Case(Full(position=ALiBi()), case.shape)))


def test_a_table_of_blocks_is_the_pattern():
    op = BigBird(block_size=8, num_random_blocks=2)
    found = inputs.block_table(op, 128, 4)
    assert found is not None
    table, block = found
    np.testing.assert_array_equal(table.repeat(block, 1).repeat(block, 2), op.pattern(128, 128, 4))
    for other, length in ((BigBird(block_size=8, causal=True), 128), (op, 100), (Full(), 128), (Linformer(), 128)):
        assert inputs.block_table(other, length, 4) is None


def test_calls_take_turns():
    order: list[str] = []
    calls = {name: Call(lambda name=name: order.append(name)) for name in "abc"}
    times = timing.in_turn(calls, Rounds(least=2, most=2, turn_seconds=0.0))
    assert "".join(order) == "abc" * 3  # one to see how long they take, then two rounds
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2, "c": 2}


def test_quartiles():
    assert timing.quartiles([3.0, 1.0, 2.0, 5.0, 4.0]) == (2.0, 3.0, 4.0)
    assert timing.quartiles([7.0]) == (7.0, 7.0, 7.0)


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="needs Linux")
def test_extra_memory_is_what_a_call_takes_besides_what_is_held():
    held = np.ones(2**23)
    taken = memory.extra_memory(Call(lambda: float((held + 1).sum())))
    assert 0.9 * held.nbytes < taken < 1.3 * held.nbytes


def test_targets_hold_ratios_and_sizes_against_limits():
    figures = {"ours": {"seconds": 1.0, "extra_bytes": 10.0}, "peer": {"seconds": 2.0}}
    check = lambda *fields: targets.Target(*fields).check(figures)
    assert check("seconds", "ours", "peer", 0.5) | {"value": 0.5, "reached": True} == check(
        "seconds", "ours", "peer", 0.5
    )
    assert check("seconds", "ours", "peer", 0.4)["reached"] is False
    assert check("extra_bytes", "ours", None, 9.0)["reached"] is False
    assert check("extra_bytes", "ours", "peer", 1.0)["reached"] is None
    assert check("seconds", "ours", "nobody", 1.0)["value"] is None


def test_a_row_of_targets_is_measured_alone_and_the_others_stay(tmp_path, monkeypatch, capsys):
    case = lambda op: Case(op, Shape(1, 16, 16, 2, 8))
    row = targets.Calls(
        [("xformer", case(Full())), ("xformer window", case(Window(2, 2)))],
        [targets.Target("seconds", "xformer", "jax.nn", 1e9), targets.Target("seconds", "xformer", "nobody", 1.0)],
        rounds=Rounds(least=1, most=1),
    )
    monkeypatch.setattr(targets, "ROWS", {"small": row, "other": row})
    (out := tmp_path / "targets.json").write_text('{"other": "kept"}')
    monkeypatch.setattr("sys.argv", ["targets", "--only=small", f"--out={out}"])
    assert targets.main() == 0
    found = json.loads(out.read_text())
    assert found["other"] == "kept" and {"xformer", "xformer window", "jax.nn"} <= set(found["small"]["figures"])
    assert [target["reached"] for target in found["small"]["targets"]] == [True, None]
    table = capsys.readouterr().out
    assert "reached" in table and "not measured" in table
    monkeypatch.setattr("sys.argv", ["targets", "--only=smal"])
    with pytest.raises(SystemExit):
        targets.main()
    assert "--only: got smal, takes small, other" in capsys.readouterr().err


def test_every_target_is_about_what_its_row_measures():
    alone = {"torch SDPA", "torch FlexAttention", "jax.nn", "Hugging Face BigBird", targets.LRA}
    for name, row in targets.ROWS.items():
        own = {who for who, _ in row.cases} if isinstance(row, targets.Calls) else set(row.sizes)
        for target in row.targets:
            assert target.ours in own, name
            assert target.peer is None or target.peer in own | alone, name


def test_training_steps_are_taken_by_processes_in_turn(tmp_path, monkeypatch):
    (fake := tmp_path / "fake.py").write_text(
        "import json, sys\n"
        "for turn, _ in enumerate(sys.stdin):\n"
        "    open(sys.argv[3], 'a').write(sys.argv[1])\n"
        "    print(json.dumps({'seconds': turn, 'loss': 1.0, 'peak_bytes': int(sys.argv[2])}), flush=True)\n"
    )
    monkeypatch.setattr(train_steps, "COMMAND", (sys.executable, str(fake)))
    log = tmp_path / "log"
    found = train_steps.side_by_side({"x": ("a", 5, log), "y": ("b", 7, log)}, steps=2)
    assert log.read_text() == "ababab"
    assert found["x"] == {"seconds": [1, 2], "losses": [1.0, 1.0, 1.0], "peak_bytes": 5}
    fake.write_text("import sys; sys.exit(3)")
    with pytest.raises(RuntimeError, match="x: its process ended with exit code 3"):
        train_steps.side_by_side({"x": ("a", 5, log)}, steps=1)


@pytest.mark.parametrize("name", ["full", *train_steps.OURS])
def test_a_process_answers_every_line_with_a_training_step(name, monkeypatch, capsys):
    for constant, size in (("LAYERS", 1), ("WIDTH", 16), ("HEADS", 2), ("MLP_DIM", 16), ("LEARNING_RATE", 1e-2)):
        monkeypatch.setattr(step_sizes, constant, size)
    monkeypatch.setattr("benchmarks.translation.SIZES", step_sizes.layers())
    monkeypatch.setattr("sys.stdin", io.StringIO("step\nstep\nstep\n"))
    train_steps.serve(f"xformer {name}", 2, 16)
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    first, _, last = (answer["loss"] for answer in answers)
    assert last < first  # the same batch, learnt
    assert all(answer["peak_bytes"] > 1e8 for answer in answers)


def test_a_contender_that_fails_is_named_with_its_reason():
    def refuse(case):
        raise NotImplementedError("not\n  on Sundays")

    def different(case):
        return Ready(Call(lambda: 0), 1.0, results=lambda given: [np.zeros((1, 16, 2, 8))])

    case = Case(Full(), Shape(1, 16, 16, 2, 8))
    found = [jax_contenders.ours(), Contender("lazy", refuse), Contender("other", different)]
    ready, skipped = benchmark.prepare(found, case)
    assert list(ready) == ["xformer"] and skipped["lazy"] == "not on Sundays"
    assert "computes something else" in skipped["other"]


def test_a_picture_names_peers_by_variant_only_where_they_have_several():
    row = lambda variant, who: {"variant": variant, "contender": who}
    rows = [row("full", "xformer"), row("causal", "xformer"), row("full", "a"), row("causal", "a"), row("full", "b")]
    assert list(speed.line_names(rows).values()) == ["full", "causal", "a, full", "a, causal", "b"]


@pytest.mark.full
def test_pieces_of_a_step_are_measured_in_processes(monkeypatch, tmp_path, capsys):
    """In a process of their own, and in one of another checkout, here the same."""
    out = tmp_path / "step.json"
    words = ["--size=tiny", "--only=norm,step_floor", "--seconds=0", f"--against={step.HERE}", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", ["step", *words])
    assert step.main() == 0
    here, against = json.loads(out.read_text())["contenders"].values()
    for found in (here, against):
        assert list(found["pieces"]) == ["gemm", "norm", "step_floor"] and found["startup"].keys() >= {
            "import",
            "trace",
        }
        row = found["pieces"]["step_floor"]
        assert row["ratio"] == pytest.approx(row["seconds"] * found["gemm_flops_per_second"] / row["flops"])
        assert found["pieces"]["norm"]["ratio"] is None and row["planned_bytes"] > 0
    assert "step_floor" in capsys.readouterr().out


def test_pieces_are_set_against_their_products_and_the_first_contender():
    known = {"flops": {"gemm": 100, "norm": 0, "step_full": 50}, "planned_bytes": {"step_full": 2**20}}
    known |= {"startup": {"import": 1.0}, "machine": {}}
    times = {"gemm": [2.0, 1.0], "norm": [0.1], "step_full": [1.0, 2.0, 3.0]}
    found = {"here": step.figures(known, times), "there": step.figures(known, times | {"norm": [0.2]})}
    row = found["here"]["pieces"]["step_full"]  # 0.5 s of products at 100 FLOP/s
    assert (row["seconds"], row["least"], row["product_seconds"], row["ratio"]) == (2.0, 1.0, 0.5, 4.0)
    assert found["here"]["pieces"]["norm"]["ratio"] is None
    lines = list(step.table(found))
    assert lines[0] == "here: GEMM 100 FLOP/s; start-up: import 1.0 s"
    assert lines[8].split()[:3] == ["norm", "200", "ms"] and lines[8].split()[-1] == "2.00"
    assert lines[-1].split()[-3:] == ["1.00", "1.0", "MiB"]


def test_pieces_are_chosen_by_how_their_names_begin():
    assert step.chosen("block_f,loss") == ["gemm", "loss", "block_floor", "block_full"]
    assert step.chosen("") == list(step.PIECES)
    with pytest.raises(ValueError, match="no piece begins with 'blok'; there are gemm, feed_forward"):
        step.chosen("blok")


def test_turns_of_decoding_end_at_one_context(monkeypatch):
    for name, size in {"WIDTH": 8, "HEADS": 2, "VOCAB": 11, "LAYERS": 1}.items():
        monkeypatch.setattr(decoding, name, size)
    monkeypatch.setattr(decoding, "CASES", {"some": decoding.Case(Window(left=4, right=0), 2, 24)})
    ends, at_length = [], decoding.at_length
    monkeypatch.setattr(
        decoding, "at_length", lambda cache, seen: (ends.append(int(cache.length)), at_length(cache, seen))[1]
    )
    figures = decoding.measure(decoding.contenders(["some"]), rounds=3)["some"]
    assert ends == [16, 24, 24, 24], "after the prompt, and after each turn of eight steps but the last"
    assert figures["cache_bytes"] == 2 * 2 * 4 * 8 * 4 + 4  # keys and values of four tokens, and the length
    assert 0 < figures["least"] <= figures["seconds"] and figures["tokens_per_second"] == 2 / figures["seconds"]


def test_decoding_is_set_against_the_fastest_peer():
    row = lambda seconds: dict.fromkeys(decoding.COMPARED, seconds)
    name, peer, limit = decoding.TARGETS[0]
    found = decoding.check({name: row(3.0), f"{peer}, 1 thread": row(4.0), f"{peer}, 2 threads": row(2.0)})
    assert found == [{"ours": name, "peer": peer, "limit": limit, "reached": False, **row(1.5)}]


def test_other_implementations_agree_or_differ_for_a_reason():
    """What `make oracles` wrote: every variant that some package has, and a paper's line for each reason."""
    found = json.loads((Path(targets.__file__).parent / "results" / "oracles.json").read_text())
    compared = {one["variant"] for one in found["comparisons"].values()}
    assert set(ATTENTIONS) - compared == {"sparse", "synthesizer", "topk_blocks"}
    for name, comparison in found["comparisons"].items():
        assert comparison["version"] and any(run["agree"] for run in comparison["runs"]), name
        for run in comparison["runs"]:
            assert run["agree"] == (not run["differences"]), (name, run["what"])
            for one in run["differences"]:
                assert one["what"] and one["source"] and (one["right"] == "ours" or one["kept"]), (name, one)
