"""The report: numbers derived by hand, every kind of damaged or missing result, pages that stand alone."""

import itertools
import json
import math
import re
import struct

import matplotlib.axes
import pytest
import report_fake

from xformer import report
from xformer.report import claims, costs, formatting, labels, quality, results, stats, style, summary, tables
from xformer.report.costs import CostRow
from xformer.report.tables import Table


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setattr(style, "DPI", 50)


def rows_of(workdir):
    return {row.variant: row for row in summary.rows(results.load(workdir))}


def set_tests(workdir, variant, *accuracies, examples=2000):
    for seed, accuracy in enumerate(accuracies):
        test = {"accuracy": accuracy, "loss": 1.0, "examples": examples}
        report_fake.edit(workdir, variant, seed, test=test)


# Statistics.


def test_student_interval_by_hand():
    found = stats.estimate([0.1, 0.2, 0.3])
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)  # t(0.975, 2) from a table
    assert stats.estimate([0.1, 0.3]).half_width == pytest.approx(12.7062 * 0.1, rel=1e-5)
    assert stats.estimate([0.5]) == stats.Estimate(0.5, None, 1, 0.5, 0.5)
    assert stats.estimate([math.nan, 0.5]).count == 1
    assert math.isnan(stats.estimate([]).mean)


def test_wilson_interval_by_hand():
    low, high = stats.wilson(0.5, 100)
    assert (low, high) == (pytest.approx(0.403832, abs=1e-6), pytest.approx(0.596168, abs=1e-6))
    assert stats.wilson(0.0, 10)[0] == pytest.approx(0) and stats.wilson(1.0, 10)[1] == pytest.approx(1)


def test_chance_level_depends_on_the_number_of_examples():
    assert stats.at_chance(0.53, 100, 0.5)
    assert not stats.at_chance(0.53, 10_000, 0.5)
    assert not stats.at_chance(0.5, 100, math.nan) and not stats.at_chance(math.nan, 100, 0.5)
    assert stats.at_chance(0.5, math.nan, 0.5) and not stats.at_chance(0.9, math.nan, 0.5)


# Words.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.00 k"),
        (1234567, "1.23 M"),
        (3.1e12, "3.10 T"),
        (math.nan, formatting.MISSING),
    ],
)
def test_si(value, text):
    assert formatting.si(value) == text


def test_units_and_ratios():
    assert [formatting.milliseconds(value) for value in (0.5, 77.53, 1500)] == ["0.50 ms", "77.5 ms", "1.50 s"]
    assert [formatting.mebibytes(value) for value in (2**20, 2**31)] == ["1.0 MiB", "2.00 GiB"]
    assert formatting.ratio(1, 2) == "0.50×" and formatting.ratio(math.nan, 2) == "" and formatting.ratio(1, 0) == ""
    assert formatting.change(110, 100) == " (+10.0 %)" and formatting.change(100, 100) == ""
    assert [formatting.length(n) for n in (512, 1000, 16384)] == ["512", "1000", "16k"]
    assert formatting.listed(["a"]) == "a" and formatting.listed(["a", "b", "c"]) == "a, b and c"
    assert formatting.quality(stats.Estimate(0.6134, 0.008, 3), "accuracy") == "61.3 ± 0.8 %"
    assert formatting.quality(stats.Estimate(0.6134, None, 1), "accuracy") == "61.3 %"
    assert formatting.quality(stats.estimate([0.985, 0.242, 0.999]), "accuracy") == "74.2 % (24.2 to 99.9)"


# Cost against length.


def test_crossover_is_where_a_variant_becomes_and_stays_cheaper():
    def line(variant, *values):
        return [CostRow(variant, 512 * 2**i, value) for i, value in enumerate(values)]

    rows = (
        line("full", 1, 4, 16, 64)
        + line("late", 3, 5, 9, 20)
        + line("back", 0.5, 5, 9, 100)
        + line("same", 1, 4, 16, 64)
    )
    found = {name: costs.crossover(rows, name, "full", "flops") for name in ("late", "back", "same", "absent")}
    assert found == {"late": 2048, "back": None, "same": None, "absent": None}
    assert costs.crossover_text(rows, "late", "full", "flops") == "from 2,048"
    assert costs.crossover_text(rows, "back", "full", "flops") == "not up to 4,096"
    assert costs.crossover_text(rows, "late", "full", "time_ms") == formatting.MISSING
    cheap = line("full", 2, 4) + line("cheap", 1, 2)
    assert costs.crossover_text(cheap, "cheap", "full", "flops") == "at all from 512 to 1,024"
    shown = tables.crossovers(cheap, ["full", "cheap", "lstm"], "full")
    assert [row[0] for row in shown.rows] == ["cheap"], "what has no attention has no row"


def test_perplexity_has_a_logarithmic_axis_and_intervals_from_1():
    assert style.is_logarithmic("perplexity", [1.5, 900.0]) and not style.is_logarithmic("loss", [1.5, 900.0])
    wide = stats.estimate([2.0, 9.0, 30.0])
    assert wide.mean - wide.half_width < 0 and quality.ends("perplexity", wide)[0] == 1.0
    assert quality.ends("loss", wide)[0] == wide.mean - wide.half_width


def test_labels_move_as_little_as_needed():
    assert labels.spread([0.1, 0.5, 0.9], gap=0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert labels.spread([0.5, 0.5], gap=0.1) == pytest.approx([0.45, 0.55])
    places = labels.spread([0.0, 0.5, 0.5, 0.52, 1.0], gap=0.1)
    assert all(high - low >= 0.1 - 1e-9 for low, high in itertools.pairwise(places))
    assert places[0] == pytest.approx(0) and places[-1] == pytest.approx(1)


@pytest.mark.parametrize(("low", "high", "base"), [(3, 5e7, 10), (1.8, 3.2, 10), (1e12, 4e12, 10), (2**16, 2**21, 4)])
def test_axis_ticks_are_round_inside_and_few(low, high, base):
    ticks = style.round_ticks(low, high, base)
    assert 2 <= len(ticks) <= 6 and low <= ticks[0] and ticks[-1] <= high


# Tables and warnings.


def test_rows_hold_what_the_results_say(tmp_path):
    report_fake.make(tmp_path)
    set_tests(tmp_path, "full", 0.1, 0.2, 0.3)
    row = rows_of(tmp_path)["full"]
    assert row.quality.mean == pytest.approx(0.2) and row.quality.count == 3
    assert (row.finished, row.planned) == (3, 3)
    assert row.train_flops == report_fake.FLOPS["full"] * 1000
    assert rows_of(tmp_path)["bigbird"].flops_per_step == report_fake.FLOPS["bigbird"]


def test_the_reference_is_plain_full_attention_and_comes_first(tmp_path):
    comparison = results.load(report_fake.make(tmp_path, variants=("bigbird", "full+shaw", "full"), seeds=(0,)))
    assert comparison.reference == "full" and comparison.variants == ["full", "bigbird", "full+shaw"]


def test_a_run_at_chance_is_flagged_in_the_table_and_the_warnings(tmp_path):
    report_fake.make(tmp_path)
    set_tests(tmp_path, "linformer", 0.8, 0.51, 0.8)
    comparison = results.load(tmp_path)
    assert rows_of(tmp_path)["linformer"].chance_seeds == (1,)
    assert any("linformer: seed 1 ended at chance" in warning for warning in summary.warnings(comparison))
    assert "1 at chance" in tables.variants(comparison, summary.rows(comparison)).text()


def test_parameter_difference_above_ten_percent_warns(tmp_path):
    report_fake.make(tmp_path, seeds=(0,))
    report_fake.edit(tmp_path, "full+shaw", 0, num_params=round(412_000 * 1.12))
    report_fake.edit(tmp_path, "bigbird", 0, num_params=round(412_000 * 1.09))
    found = [warning for warning in summary.warnings(results.load(tmp_path)) if "parameters" in warning]
    assert len(found) == 1 and found[0].startswith("full+shaw has 12% more")


def test_another_model_is_named_and_its_own_keys_and_size_are_no_noise(tmp_path):
    report_fake.make(tmp_path, seeds=(0,))
    own = {
        "full": {"name": "encoder_decoder", "mlp_dim": 8, "pooling": "mean"},
        "bigbird": {"name": "encoder_decoder", "mlp_dim": 8, "pooling": "mean"},
        "full+shaw": {"name": "seq2seq_lstm", "hidden_dim": 8, "width": 32},
        "linformer": {"name": "encoder_decoder", "mlp_dim": 8, "pooling": "mean"},
    }
    for variant, keys in own.items():
        path = tmp_path / "runs" / f"{variant}-0" / "config.json"
        given = json.loads(path.read_text())
        report_fake.write_json(path, given | {"model": given["model"] | keys})
    report_fake.edit(tmp_path, "full+shaw", 0, num_params=round(412_000 * 0.8))
    comparison = results.load(tmp_path)
    assert not [warning for warning in summary.warnings(comparison) if "parameters" in warning]
    found = [key for key in summary.differences(comparison) if not key.startswith("attention.")]
    assert found == ["model.width", "model.name"]
    note = claims.differences_note(comparison)
    assert "More than attention: model.width and model.name differ too" in note
    assert "Keys of model that not all variants have are not listed." in note
    assert len(summary.differences(comparison)["model.name"]) == 4


def test_one_seed_says_so_and_gives_no_interval(tmp_path):
    written = report.write(report_fake.make(tmp_path, seeds=(7,)))
    assert any("one seed" in warning for warning in written.warnings)
    assert "±" not in written.table and "±" not in (tmp_path / "report.md").read_text()


def test_missing_failed_unfinished_and_broken_runs(tmp_path):
    report_fake.make(tmp_path)
    runs = tmp_path / "runs"
    (runs / "full-0" / "result.json").unlink()  # interrupted
    (runs / "linformer-0" / "result.json").write_text('{"name": "cut')  # damaged
    report_fake.write_json(runs / "linformer-0" / "failure.json", {"error": "loss is nan at step 7"})
    for file in (runs / "bigbird-2").iterdir():  # never started
        file.unlink()
    set_tests(tmp_path, "full+shaw", math.nan)
    with (runs / "full-1" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1001, "spl')  # killed while writing
    written = report.write(tmp_path, cost_rows=report_fake.cost_rows(), variant_patterns=report_fake.patterns())
    said = "\n".join(written.warnings)
    assert "full, seed 0: unfinished" in said
    assert "linformer, seed 0: failed: loss is nan at step 7" in said
    assert "bigbird, seed 2: not started" in said
    assert "full+shaw: the test accuracy of seed 0 is no finite number" in said
    assert "2 of 3" in written.table
    assert rows_of(tmp_path)["full+shaw"].quality.count == 2
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    assert len(found) == 12 and [row["status"] for row in found].count("finished") == 9


def test_unequal_seed_counts_and_devices_warn(tmp_path):
    report_fake.make(tmp_path)
    (tmp_path / "runs" / "full-0" / "result.json").unlink()
    report_fake.edit(tmp_path, "full", 1, device="gpu", flops_uncounted=["while (a.py:3 f)"])
    said = "\n".join(summary.warnings(results.load(tmp_path)))
    assert "different numbers of seeds" in said and "different device" in said and "while (a.py:3 f)" in said


def test_nothing_finished_still_makes_a_report(tmp_path):
    report_fake.make(tmp_path)
    for path in tmp_path.glob("runs/*/result.json"):
        path.unlink()
    written = report.write(tmp_path, cost_rows=report_fake.cost_rows())
    assert "0 of 12 runs are finished" in written.html.read_text()
    assert not (tmp_path / "pareto.png").exists()


def test_no_comparison_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no comparison"):
        report.write(tmp_path)


def test_loss_is_the_metric_where_there_is_no_accuracy(tmp_path):
    report_fake.make(tmp_path, seeds=(0, 1), test={"loss": 0.5, "examples": 10}, eval={"loss": 0.5})
    report_fake.edit(tmp_path, "bigbird", 0, test={"loss": 0.2, "examples": 10})
    report_fake.edit(tmp_path, "bigbird", 1, test={"loss": 0.2, "examples": 10})
    written = report.write(tmp_path)
    assert "test loss" in written.table and "0.2000 ± 0.0000" in written.table
    assert "No variant is called better: that takes 3 seeds or more, and each has 2" in written.html.read_text()


def test_models_that_tell_tokens_are_compared_by_their_loss(tmp_path):
    better = {"loss": "min", "accuracy": "max", "perplexity": "min"}
    test = {"loss": 0.5, "accuracy": 0.9, "perplexity": 1.65, "examples": 10}
    report_fake.make(tmp_path, test=test, eval=test, select_metric="loss", better=better)
    comparison = results.load(tmp_path)
    assert (comparison.metric, comparison.higher_is_better) == ("loss", False)


def test_what_differs_is_shown_and_more_than_attention_is_said(tmp_path):
    report_fake.make(tmp_path)
    page = report.write(tmp_path).html.read_text()
    assert "Attention only: every other key" in page and "attention.rank" in page
    for seed in (0, 1, 2):
        path = tmp_path / "runs" / f"bigbird-{seed}" / "config.json"
        config = json.loads(path.read_text())
        config["model"]["width"] = 128
        path.write_text(json.dumps(config))
    page = report.write(tmp_path).html.read_text()
    assert "More than attention: model.width differ" in page


# Output.


def test_the_page_stands_alone_and_pictures_are_written(tmp_path):
    written = report.write(
        report_fake.make(tmp_path), cost_rows=report_fake.cost_rows(), variant_patterns=report_fake.patterns()
    )
    page = written.html.read_text()
    inside = r"data:(?:image/webp|text/csv;charset=utf-8);base64,"
    assert not re.search(rf'(?:src|href|srcset)="(?!{inside})', page), "the page loads something"
    assert not re.search(r"<script[^>]* src|fetch\(|import", page) and "@import" not in page and "url(" not in page
    assert page.count("data:image/webp;base64,") == 16  # four pictures, light and dark, wide and narrow
    markdown = (tmp_path / "report.md").read_text()
    for name in ("quality", "pareto", "costs", "patterns"):
        assert f"({name}.png)" in markdown
        png = (tmp_path / f"{name}.png").read_bytes()
        width, height = struct.unpack(">II", png[16:24])
        assert png.startswith(b"\x89PNG") and width > 300 and height > 100
    assert not list(tmp_path.glob("*.tmp"))


def test_odd_names_are_text_everywhere(tmp_path):
    names = ("full", "_a$b_c", "<i>x|y</i>", "été*", "50%")
    report_fake.make(tmp_path, variants=names, seeds=(0, 1))
    written = report.write(tmp_path, cost_rows=report_fake.cost_rows(names))
    assert "<i>" not in written.html.read_text() and "&lt;i&gt;x|y" in written.html.read_text()
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| \\<i")]
    assert rows and all(row.count(" | ") == rows[0].count(" | ") for row in rows[:1])
    assert "\\|y" in rows[0]


def test_a_table_keeps_its_columns():
    table = Table(("name", "value"), (("a|b", "1"), ("日本", "22")))
    assert table.markdown().splitlines() == ["| name | value |", "| --- | ---: |", "| a\\|b | 1 |", "| 日本 | 22 |"]
    assert table.text().splitlines() == ["name  value", "----  -----", "a|b       1", "日本     22"]


def test_equal_results_make_equal_pictures(tmp_path):
    report_fake.make(tmp_path, seeds=(0, 1))
    report.write(tmp_path)
    first = (tmp_path / "quality.png").read_bytes()
    report.write(tmp_path)
    assert (tmp_path / "quality.png").read_bytes() == first


def test_the_metric_that_runs_select_by_is_compared_and_its_baseline_shown(tmp_path):
    better = {"r2": "max", "mean_absolute_error": "min", "loss": "min"}
    scores = {"test": {"r2": 0.1, "loss": 1.0}, "validation": {"r2": 0.05}}
    baseline = {"name": "answers the mean of the training split", "scores": scores}
    test = {"r2": 0.5, "loss": 0.6, "examples": 10}
    own = {"select_metric": "r2", "better": better, "baseline": baseline, "info": {}}
    report_fake.make(tmp_path, test=test, eval={"r2": 0.5}, **own)
    for seed in range(3):
        report_fake.edit(tmp_path, "bigbird", seed, test={"r2": 0.04, "loss": 0.9, "examples": 10})
    written = report.write(tmp_path)
    assert "test r2" in written.table and "0.0400 ± 0.0000 [3 at chance]" in written.table
    page = written.html.read_text()
    assert "A guesser that answers the mean of the training split gives 0.1000." in page and "trivial guess" in page
    assert "test r2 is not clearly above a guesser that answers the mean of the training split" in page
    assert "commonest class" not in page


def test_an_accuracy_without_class_shares_has_the_baseline_of_its_task(tmp_path):
    baseline = {"name": "answers the commonest class of the training split at each token", "scores": {}}
    baseline["scores"] = {"test": {"accuracy": 0.9}, "validation": {"accuracy": 0.9}}
    report_fake.make(tmp_path, info={}, baseline=baseline)
    page = report.write(tmp_path).html.read_text()
    assert "gives 90.0 %" in page and "Every run ended at chance level" in page


def test_other_simple_methods_are_drawn_and_named(tmp_path, monkeypatch):
    drawn = []
    axhline = matplotlib.axes.Axes.axhline
    monkeypatch.setattr(
        matplotlib.axes.Axes, "axhline", lambda ax, y, **kw: drawn.append((y, kw.get("ls"))) or axhline(ax, y, **kw)
    )
    scores = {"test": {"accuracy": 0.91}, "validation": {"accuracy": 0.92}}
    others = [{"title": "TF-IDF", "name": "sees the words", "scores": scores}, {"title": "none", "scores": {}}]
    report_fake.make(tmp_path, baseline={"name": "answers 0", "scores": {}, "others": others})
    text = report.write(tmp_path).html.with_name("report.md").read_text()
    assert "Dash-dotted: TF-IDF, a classifier that sees the words, gives 91.0 %." in text
    assert "| TF-IDF | step time |" in text and "TF-IDF | none" not in text
    assert {(0.92, "-."), (0.91, "-.")} <= set(drawn)


@pytest.mark.parametrize(
    ("mean", "half", "spelled"),
    [(0.72214, 0.0451, "0.7221 ± 0.0451"), (20.3149, 0.4, "20.31 ± 0.40"), (566.1496, 12.345, "566.1 ± 12.3")],
)
def test_values_that_are_not_shares_have_four_digits(mean, half, spelled):
    estimate = stats.Estimate(mean, half, 3)
    assert formatting.quality(estimate, "perplexity") == spelled
    assert formatting.metric_value(mean, "perplexity") == spelled.split(" ")[0]
