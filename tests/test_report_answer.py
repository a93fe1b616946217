"""Which variant for a length and a budget: a planted winner, a tie, a run at chance, and what was never measured."""

import json

import numpy as np
import pytest
import report_fake
import scipy.stats

from xformer.report import answer, page, results, summary

FLOPS, TIME = answer.BUDGETS
# Training FLOPs and test accuracy by seed: linformer ties with full, bigbird is worse, the window learnt nothing.
PLANTED = {
    "full": (1.5e12, (0.84, 0.85, 0.86)),
    "linformer": (4e11, (0.838, 0.853, 0.858)),
    "bigbird": (1.8e11, (0.790, 0.801, 0.809)),
    "window": (0.9e11, (0.50, 0.51, 0.50)),
}


def make(folder, length=512):
    work = report_fake.make(folder, variants=tuple(PLANTED))
    for variant, (flops, values) in PLANTED.items():
        for seed, value in enumerate(values):
            test = {"accuracy": value, "loss": 1 - value, "examples": 2000}
            report_fake.edit(work, variant, seed, train_flops=flops, test=test, train_seconds=flops / 1e10)
            path = work / "runs" / f"{variant}-{seed}" / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"task": {"max_len": length}}))
    return work


def test_each_cell_is_the_best_that_was_measured_within_the_budget(tmp_path):
    comparison = results.load(make(tmp_path))
    rows = summary.rows(comparison)
    at = lambda amount, budget=FLOPS: answer.cell(comparison, rows, budget, amount)
    assert at(1e10) is None and at(1e11) is None, "nothing was measured, or at chance only"
    assert at(2e11).best == ("bigbird",) and at(2e11).ties == ()
    assert at(5e11).best == ("linformer",) and at(5e11).ties == (), "bigbird is clearly worse"
    assert scipy.stats.ttest_rel(PLANTED["linformer"][1], PLANTED["bigbird"][1]).pvalue < 0.05
    # All: full and linformer differ by less than their pairs vary; with bigbird in, p-values are corrected.
    whole = at(2e12)
    assert whole.best == ("full",) and "linformer" in whole.ties
    p = scipy.stats.ttest_rel(PLANTED["full"][1], PLANTED["bigbird"][1]).pvalue
    assert ("bigbird" in whole.ties) == (2 * p >= 0.05)
    assert whole.runs == ("full-0", "full-1", "full-2")
    assert at(100.0, TIME).best == ("linformer",) and at(150.0, TIME).best == ("full",)
    assert np.mean(PLANTED["full"][1]) > np.mean(PLANTED["linformer"][1])


def test_with_few_seeds_nothing_is_told_apart(tmp_path):
    work = make(tmp_path)
    for variant in PLANTED:
        (work / "runs" / f"{variant}-2" / "result.json").unlink()
    comparison = results.load(work)
    assert answer.cell(comparison, summary.rows(comparison), FLOPS, 5e11).ties == ("bigbird",)


def test_the_page_has_a_row_a_length_and_names_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "_plots", lambda *given: [])
    for task, length in (("short", 512), ("long", 4096)):
        make(tmp_path / task, length)
    page.write_tasks(tmp_path, "both", dict.fromkeys(("short", "long"), page.Measured()))
    text = (tmp_path / "report.md").read_text()
    flops = text[text.index("### Best by training FLOPs") : text.index("### Best by training time")]
    header, _, short, long = [line for line in flops.splitlines() if line.startswith("|")]
    assert header == "| length | up to 100 G | up to 200 G | up to 500 G | up to 2 T |"
    assert short.startswith("| short, 512 tokens |  | bigbird 80.0 ± ") and long.startswith("| long, 4,096 tokens |  |")
    assert "\\[linformer-0, linformer-1, linformer-2\\]" in short
    assert "Which variant for a length and a budget" in (tmp_path / "report.html").read_text()


def test_amounts_are_few_and_pay_for_everything():
    costs = [1.1e9 * 3**i for i in range(12)]
    amounts = answer._amounts([*costs, float("nan")])
    assert len(amounts) <= answer.MOST_BUDGETS and amounts == sorted(amounts) and amounts[-1] >= max(costs)
    assert answer._amounts([2e9]) == [2e9] and answer._amounts([]) == []
    assert [answer._round_up(value) for value in (1.0, 1.01, 49.0, 51.0)] == pytest.approx([1.0, 2.0, 50.0, 100.0])


def test_one_variant_has_no_answer(tmp_path):
    assert answer.tables({"": results.load(report_fake.make(tmp_path, variants=("full",)))}) == []
