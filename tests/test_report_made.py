"""How a comparison was made: commands, machine, spread of step times, a loaded machine, and the results as CSV."""

import base64
import csv
import io
import json
import re

import pytest
import report_fake

from xformer.commands import sessions
from xformer.commands.comparison_plan import Planned
from xformer.report import export, made, page, results, summary, timing


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(page, "_plots", lambda *given: [])


def timed(work, variant, seed, median, low, high):
    report_fake.edit(work, variant, seed, step_time_ms=median, step_time_p10_ms=low, step_time_p90_ms=high)


def test_a_loaded_machine_is_said(tmp_path):
    work = report_fake.make(tmp_path, variants=("full", "bigbird"), seeds=(0, 1))
    for variant in ("full", "bigbird"):
        for seed in (0, 1):
            timed(work, variant, seed, 10.0, 9.5, 11.0)
    assert timing.warnings(results.load(work)) == []
    timed(work, "full", 1, 10.0, 9.0, 15.1)  # one step in ten took half as long again
    (line,) = timing.warnings(results.load(work))
    assert "the machine was loaded" in line and "full-1 (1.5)" in line and "bigbird" not in line
    timed(work, "full", 1, 10.0, 9.0, 15.0)
    assert timing.warnings(results.load(work)) == [], "the rule is above 1.5 times"
    timed(work, "bigbird", 1, 13.1, 13.0, 13.2)  # evenly slow, beside a run of the same work
    (line,) = timing.warnings(results.load(work))
    assert "bigbird (1.3)" in line and "full" not in line
    written = page.write(work)
    assert line in written.warnings
    text = (work / "report.md").read_text()
    assert "13.1 ms (13.0 ms to 13.2 ms)" in text and "more than 1.5 times the median" in text


def test_results_of_before_have_no_spread_and_no_warning(tmp_path):
    work = report_fake.make(tmp_path, variants=("full",), seeds=(0,))
    page.write(work)
    assert timing.warnings(results.load(work)) == [] and made.sessions(work) == []
    assert "## Commands" not in (work / "report.md").read_text()


def test_commands_commit_and_machine_stand_in_the_page(tmp_path, monkeypatch):
    work = report_fake.make(tmp_path / "work", variants=("full",), seeds=(0, 1))
    described = {"cpu": "a processor", "cores": 2, "device": "cpu", "commit": "0123456789abcdef+",
                 "memory_bytes": 2**33, "environment": {"XLA_FLAGS": "--x"}}  # fmt: skip
    monkeypatch.setattr(sessions.machine, "describe", lambda: described)
    folders = [work / "runs" / f"full-{seed}" for seed in (0, 1)]
    planned = [Planned("", "full", seed, None, folder) for seed, folder in enumerate(folders)]
    kept = (folders[1] / "result.json").read_text()
    (folders[1] / "result.json").unlink()
    argv = ["--config=mine.py", "--workdir=runs/a b"]
    with pytest.raises(KeyboardInterrupt), sessions.recorded(work, argv, lambda: planned):
        (folders[1] / "result.json").write_text(kept)
        raise KeyboardInterrupt
    with sessions.recorded(work, argv, lambda: planned):
        pass  # nothing was trained: nothing is kept
    page.write(work)
    ((when, text),) = made.sessions(work)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", when)
    assert text == (
        "xformer compare --config=mine.py '--workdir=runs/a b'; trained 1 run (full, seed 1); commit 0123456789ab, "
        "with uncommitted changes; a processor, 2 cores, cpu; 8.00 GiB of memory; XLA_FLAGS=--x"
    )
    assert "0123456789ab, with uncommitted changes" in (work / "report.html").read_text()


def test_the_page_holds_every_run_as_csv(tmp_path):
    work = report_fake.make(tmp_path, variants=("full", "bigbird"), seeds=(0, 1))
    page.write(work)
    rows = list(csv.DictReader((work / "results.csv").read_text().splitlines()))
    assert [(row["role"], row["variant"], row["seed"]) for row in rows] == [
        ("run", variant, seed) for variant in ("full", "bigbird") for seed in ("0", "1")
    ]
    for row in rows:
        result = json.loads((work / "runs" / f"{row['variant']}-{row['seed']}" / "result.json").read_text())
        assert float(row["test.accuracy"]) == result["test"]["accuracy"]
        assert float(row["train_flops"]) == result["train_flops"]
    found = re.search(r'href="data:text/csv;charset=utf-8;base64,([^"]+)" download', (work / "report.html").read_text())
    assert list(csv.DictReader(io.StringIO(base64.b64decode(found[1]).decode()))) == rows


def test_rows_with_other_keys_share_a_table():
    text = export.as_csv(
        [{"variant": "a,b", "test": {"x": 1}}, {"variant": "c", "values": {"lr": 0.1}, "info": {"y": 2}}]
    )
    assert text == 'variant,test.x,values.lr\n"a,b",1,\nc,,0.1\n'


def test_steps_and_time_are_shown_where_budgets_made_them_differ(tmp_path):
    work = report_fake.make(tmp_path, variants=("full", "bigbird"), seeds=(0, 1))
    for variant, steps in (("full", 100), ("bigbird", 250)):
        for seed in (0, 1):
            report_fake.edit(work, variant, seed, last_step=steps, train_seconds=60.0)
    config = json.loads((work / "config.json").read_text())
    report_fake.write_json(work / "config.json", config | {"budget": {"train_flops": 3.1e11}})
    page.write(work)
    header = next(line for line in (work / "report.md").read_text().splitlines() if line.startswith("| variant"))
    assert header.endswith("| steps | training time |")
    assert "Compared at equal training FLOPs: 310 GFLOP a run" in (work / "report.md").read_text()
    assert [row.num_steps for row in summary.rows(results.load(work))] == [100, 250]
