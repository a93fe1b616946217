"""What a report says and draws: only what was measured, readable by everybody, written whole or not at all."""

import io
import itertools
import json
import math
import os

import numpy as np
import pytest
import report_fake
from matplotlib.colors import to_rgb
from PIL import Image

from xformer import report
from xformer.report import claims, costs, quality, results, speed, style, summary, tables
from xformer.report.costs import CostRow


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setattr(style, "DPI", 50)


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn since the test began."""
    found = []
    draw = style.png
    monkeypatch.setattr(style, "png", lambda fig: found.append(fig) or draw(fig))
    return found


def compared(tmp_path, accuracies, examples=2000, majority=0.5, **changes):
    """A comparison whose variants have these test accuracies, one a seed."""
    seeds = range(max(map(len, accuracies.values())))
    report_fake.make(tmp_path, variants=tuple(accuracies), seeds=tuple(seeds), **changes)
    for variant, values in accuracies.items():
        for seed, value in enumerate(values):
            test = {"accuracy": value, "loss": 1.0, "examples": examples}
            shares = {"majority_accuracy": dict.fromkeys(("train", "validation", "test"), majority)}
            report_fake.edit(tmp_path, variant, seed, test=test, info=shares)
    return results.load(tmp_path)


def lead(comparison):
    return claims.lead(comparison, summary.rows(comparison))


# Who is better.


@pytest.mark.parametrize(
    ("full", "bigbird", "says"),
    [
        (
            [0.610],
            [0.612],
            "No variant is called better: that takes 3 seeds or more, and each has 1.",
        ),
        ([0.61, 0.61], [0.95, 0.95], "No variant is called better: that takes 3 seeds or more"),
        (
            [0.80, 0.82, 0.84],
            [0.81, 0.83, 0.85],
            "bigbird has the highest mean test accuracy, 83.0 ± 5.0 %, but",
        ),
        ([0.8, 0.8, 0.8], [0.8, 0.8, 0.8], "full and bigbird share the highest mean test accuracy, 80.0 ± 0.0 %."),
        ([0.80, 0.80, 0.80], [0.81, 0.81, 0.81], "but is not clearly better than full"),  # 2,000 examples cannot tell
        ([0.70, 0.71, 0.70], [0.90, 0.91, 0.90], "bigbird has the best test accuracy, 90.3 ± 1.4 %"),
    ],
)
def test_better_is_said_from_three_seeds_and_outside_the_noise(tmp_path, full, bigbird, says):
    text = lead(compared(tmp_path, {"full": full, "bigbird": bigbird}))
    assert says in text
    assert ("best" in text) == ("has the best" in says)


def test_the_best_is_not_called_better_than_what_the_paired_tests_do_not_tell_from_it(tmp_path):
    """Intervals that are apart, but of seven comparisons: with Holm's correction none is found."""
    others = {f"window-{index}": [0.80, 0.95, 0.84, 0.91, 0.87] for index in range(7)}
    text = lead(compared(tmp_path, {"full": [0.999, 1.0, 1.0, 1.0, 1.0], **others}, examples=10**6))
    assert text.startswith(
        "full has the highest mean test accuracy, 100.0 ± 0.1 %, but is not clearly better than window"
    )
    assert "or paired tests don't tell them apart" in text
    text = lead(compared(tmp_path, {"full": [1.0] * 5, "window-0": others["window-0"]}, examples=10**6))
    assert text.startswith("full has the best test accuracy, 100.0 ± 0.0 %")


def test_at_equal_flops_none_takes_the_fewest(tmp_path):
    found = compared(tmp_path, {"full": [0.7, 0.71, 0.7], "bigbird": [0.69, 0.7, 0.7]})
    assert "bigbird takes the fewest training FLOPs" in lead(found)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"budget": {"train_flops": 1e9}}))
    assert "fewest" not in lead(results.load(tmp_path))


def test_more_test_examples_can_tell(tmp_path):
    accuracies = {"full": [0.80] * 3, "bigbird": [0.81] * 3}
    assert "bigbird has the best test accuracy" in lead(compared(tmp_path, accuracies, examples=1_000_000))


def test_few_flops_at_chance_level_are_no_merit(tmp_path):
    accuracies = {"full": [0.7, 0.71, 0.7], "linformer": [0.5, 0.7, 0.7], "bigbird": [0.69, 0.7, 0.7]}
    comparison = compared(tmp_path, accuracies)
    rows, text = summary.rows(comparison), lead(comparison)
    assert [row.variant for row in quality.front(rows, lambda row: row.train_flops, True)] == ["bigbird", "full"]
    assert "Of the variants above chance in every run, bigbird takes the fewest training FLOPs, 0.61× those" in text
    text = lead(compared(tmp_path, {"full": [0.7], "linformer": [0.5]}))
    assert "fewest" not in text
    text = lead(compared(tmp_path, {"full": [0.5, 0.5], "linformer": [0.49, 0.5]}))
    assert text.startswith("Every run ended at chance level") and "fewest" not in text


def test_what_has_no_result_yet_is_not_beaten(tmp_path):
    compared(tmp_path, {"full": [0.7] * 3, "bigbird": [0.9] * 3, "linformer": [0.7] * 3})
    for seed in range(3):
        (tmp_path / "runs" / f"linformer-{seed}" / "result.json").unlink()
    text = lead(results.load(tmp_path))
    assert text.startswith("6 of 9 runs are finished. 2 of 3 variants have a result. bigbird has the best")


def test_uncounted_flops_are_said_where_the_flops_are(tmp_path):
    report_fake.make(tmp_path, flops_uncounted=["while (a.py:3 f)"])
    rows = [CostRow("full", 512, 10.0, uncounted=("sort (b.py:1 g)",))]
    report.write(tmp_path, cost_rows=rows)
    table, _, below = (tmp_path / "report.md").read_text().partition("Left out: elementwise work")
    assert "| full+shaw |" in table and "## Quality" not in table
    assert "could not be counted, while (a.py:3 f)" in below.split("## Quality")[0]
    assert "could not be counted, sort (b.py:1 g)" in below
    assert "the fewest counted training FLOPs" in lead(results.load(tmp_path))
    assert tables.lengths(rows, ["full"]).rows[0][-1] == "FLOPs leave out sort (b.py:1 g)"


# Whether the data are the same.


def give_digests(tmp_path, digest_of):
    for folder in (tmp_path / "runs").iterdir():
        path = folder / "result.json"
        found = json.loads(path.read_text())
        if (digest := digest_of(folder.name)) is not None:
            found["info"]["digest"] = digest
        path.write_text(json.dumps(found))


def test_the_same_data_are_checked_and_not_assumed(tmp_path):
    report_fake.make(tmp_path)
    note = lambda: claims.differences_note(results.load(tmp_path))
    assert "Whether the data are the same was not checked" in note()
    give_digests(tmp_path, lambda name: None if name == "full-0" else "c0ffee" * 8)
    assert "The data are the same" in note() and "every finished run but full-0, which hold none" in note()
    give_digests(tmp_path, lambda name: "c0ffee" * 8)
    assert "(c0ffeec0ffee) is in the result of every finished run." in note()


def test_nothing_is_compared_across_different_data(tmp_path):
    report_fake.make(tmp_path)
    give_digests(tmp_path, lambda name: "b" * 64 if name in ("bigbird-0", "linformer-0", "linformer-1") else "a" * 64)
    written = report.write(tmp_path, cost_rows=report_fake.cost_rows())
    markdown = (tmp_path / "report.md").read_text()
    assert "The runs were made on different data, so nothing is compared." in markdown
    assert written.warnings[0].startswith("THE RUNS WERE MADE ON DIFFERENT DATA")
    assert "linformer-0, linformer-1, bigbird-0 on bbbbbbbbbbbb" in written.warnings[0]
    assert "data are NOT the same" in markdown
    assert not (tmp_path / "quality.png").exists() and not (tmp_path / "pareto.png").exists()
    assert "best test" not in markdown and "×" not in written.table
    rows = {row.variant: row for row in summary.rows(results.load(tmp_path))}
    assert rows["bigbird"].quality.count == 0 and rows["full"].quality.count == 3


# Costs: only what was measured.


def measured(variant, *times, note=""):
    lengths = (512, 1024, 2048)
    rows = [CostRow(variant, length, 10.0 * length, time_ms=time) for length, time in zip(lengths, times, strict=True)]
    return [CostRow(row.variant, row.length, row.flops, note=note) if math.isnan(row.time_ms) else row for row in rows]


LATE = "not measured: beyond the 3 s for measuring"


def test_one_measured_length_is_called_that_and_no_line_is_drawn(figures):
    nan = math.nan
    rows = measured("full", 2.0, nan, nan, note=LATE) + measured("bigbird", 1.0, nan, nan, note=LATE)
    rows += measured("window", 1.0, nan, 3.0, note="not measured: out of memory")
    assert costs.crossover_text(rows, "bigbird", "full", "time_ms") == "at 512"
    assert costs.crossover_text(rows, "full", "bigbird", "time_ms") == "not at 512"
    assert costs.coverage(rows) == (
        "Time and memory were measured of full and bigbird at 512 tokens; of window at 512 and 2,048 tokens. "
        "At 1,024 tokens FLOPs were counted, nothing was measured."
    )
    assert f"cost of attention of full and bigbird at 1,024 and 2,048 tokens: {LATE}" in costs.warnings(rows)
    assert "cost of attention of window at 1,024 tokens: not measured: out of memory" in costs.warnings(rows)
    assert costs.picture(rows, ["full", "bigbird", "window"], "full", style.LIGHT)
    time = next(ax for ax in figures[0].axes if ax.get_title(loc="left") == "time, forward")
    for line in time.lines:
        values = np.asarray(line.get_ydata(), float)
        assert line.get_marker() not in ("", "None")
        neighbours = np.isfinite(values[1:]) & np.isfinite(values[:-1])
        assert not neighbours.any(), "no two neighbouring lengths were measured, so no line may be seen"
    assert len(time.lines) == 3, "no ring where one length was measured"
    low, high = time.get_xlim()
    assert low < 512 and high > 2048, "the axis shows the lengths where nothing was measured too"


def test_labels_stand_beside_points_that_end_early(figures):
    nan = math.nan
    rows = measured("full", 2.0, nan, nan) + measured("bigbird", 1.0, nan, nan)
    assert costs.picture(rows, ["full", "bigbird"], "full", style.LIGHT)
    flops, time = figures[0].axes
    assert all(text.xyann[0] < 0.2 for text in time.texts) and all(text.xyann[0] > 0.9 for text in flops.texts)


def test_warnings_about_costs_reach_the_report(tmp_path):
    rows = measured("full", 2.0, math.nan, math.nan, note=LATE)
    written = report.write(report_fake.make(tmp_path), cost_rows=rows)
    assert any(LATE in warning for warning in written.warnings)
    assert "measured at 512 tokens" in (tmp_path / "report.md").read_text()
    assert "Time and memory were not measured" in costs.coverage(measured("full", *[math.nan] * 3))


# Pictures.


def test_every_interval_is_drawn_whole_and_the_baseline_is_shown(tmp_path, figures):
    accuracies = {"full": [0.76, 0.77, 0.768], "full+shaw": [0.70, 0.78, 0.83], "bigbird": [0.99, 0.7, 0.999]}
    comparison = compared(tmp_path, accuracies, majority=0.2)
    rows = summary.rows(comparison)
    assert quality.pareto(comparison, rows, style.LIGHT) and quality.curves(comparison, style.LIGHT)
    pareto, curves = figures
    for ax in pareto.axes:
        low, high = ax.get_ylim()
        for row in rows:
            bottom, top = row.quality.mean - row.quality.half_width, min(1, row.quality.mean + row.quality.half_width)
            assert low < bottom and top < high, row.variant
    (ax,) = curves.axes
    low, high = ax.get_ylim()
    assert low < 0.2 < high and any(set(line.get_ydata()) == {0.2} for line in ax.lines)
    assert any(text.get_text() == "commonest class" for text in ax.texts)
    bands = [path.vertices[:, 1] for collection in ax.collections for path in collection.get_paths()]
    assert len(bands) == 3 and all(low < band.min() and band.max() < high for band in bands)


# Machado, Oliveira, Fernandes 2009, "A physiologically-based model for simulation of color vision deficiency":
# severity 1.0, for linear RGB.
VISION = {
    "normal": np.eye(3),
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def linear(colours):
    colours = np.array([to_rgb(colour) for colour in colours])
    return np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)


def lab(light):
    """CIELAB of linear RGB, white point D65."""
    xyz = np.clip(light, 0, 1) @ XYZ.T / XYZ.sum(1)
    x, y, z = np.moveaxis(np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29), -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK], ids=lambda theme: theme.name)
@pytest.mark.parametrize("eyes", VISION)
def test_colours_are_told_apart(theme, eyes):
    seen = lab(linear(theme.cycle) @ np.asarray(VISION[eyes]).T)
    distances = [float(np.linalg.norm(one - other)) for one, other in itertools.combinations(seen, 2)]
    assert min(distances) > 25  # the palette before had 3.9 for deuteranopes; 2.3 is just noticeable
    luminance = linear((*theme.cycle, theme.paper)) @ XYZ[1] + 0.05
    contrast = luminance[:-1] / luminance[-1]
    assert np.maximum(contrast, 1 / contrast).min() >= 3  # WCAG 2.1, 1.4.11: graphical objects


def test_variants_differ_in_shape_too():
    palette = style.Palette(style.LIGHT, [str(index) for index in range(16)])
    assert len({palette.marker(name) for name in palette.variants[:8]}) == 8
    looks = {(palette.colour(name), palette.marker(name)) for name in palette.variants}
    assert len(looks) == 16


def test_labels_of_a_crowded_panel_stay_inside_it(figures):
    rows = [
        {"variant": "full", "contender": f"contender {i}", "length": length, "mode": "forward", "seconds": length + i,
         "extra_bytes": None} for i in range(11) for length in (512, 1024)
    ]  # fmt: skip
    assert speed.picture({"rows": rows})
    (ax,) = figures[0].axes
    heights = sorted(text.xyann[1] for text in ax.texts)  # in units of the axes
    assert len(heights) == 11 and heights[0] > 0 and heights[-1] < 1
    points = 72 * ax.get_window_extent().height / figures[0].dpi
    assert min(high - low for low, high in itertools.pairwise(heights)) * points > 8  # the size of the letters


# Files.


def test_pictures_and_tables_fit_a_phone(tmp_path, figures):
    page = report.write(report_fake.make(tmp_path), cost_rows=report_fake.cost_rows()).html.read_text()
    assert {round(fig.get_figwidth(), 1) for fig in figures} == {style.WIDE, style.NARROW}
    assert page.count('<source media="(max-width: 640px)"') == 3
    assert '<td data-label="training FLOPs">' in page
    assert 'aria-hidden="true">■</i>linformer' in page


def test_a_kill_while_writing_leaves_whole_files_and_the_next_report_completes(tmp_path, monkeypatch):
    work = report_fake.make(tmp_path / "work", seeds=(0,), variants=("full", "bigbird"))
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "PNG")
    picture = buffer.getvalue()
    for module, name in ((quality, "curves"), (quality, "pareto"), (costs, "picture")):
        monkeypatch.setattr(module, name, lambda *given: picture)
    replace = os.replace
    names = ["quality.png", "pareto.png", "costs.png", "results.jsonl", "results.csv", "comparison.json", "report.md",
             "report.html"]  # fmt: skip
    for kill_at in range(len(names)):
        for path in work.glob("*.*"):
            if path.name in names:
                path.write_text("old")
        calls = itertools.count()

        def killed(source, target, calls=calls, kill_at=kill_at):
            if next(calls) == kill_at:
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            report.write(work)
        new = {path.name for path in work.iterdir() if path.name in names and path.read_bytes() != b"old"}
        assert new == set(names[:kill_at])
        monkeypatch.setattr(os, "replace", replace)
        report.write(work)
        assert (work / "report.html").read_text().endswith("</html>\n") and not list(work.glob("*.tmp"))


def test_odd_values_in_a_result_are_missing_values(tmp_path):
    report_fake.make(tmp_path, seeds=(0,))
    report_fake.edit(tmp_path, "full", 0, info=None, device=None)
    report_fake.edit(tmp_path, "bigbird", 0, info=[], test={"accuracy": "x", "examples": -1})
    report_fake.edit(tmp_path, "linformer", 0, flops_uncounted=None, info={"majority_accuracy": 5, "digest": None})
    with (tmp_path / "runs" / "bigbird-0" / "metrics.jsonl").open("ab") as file:
        file.write(b'5\n{}\n\xff\n{"split": "validation", "step": "x"}\n{"split": "validation", "step": 2')
    assert "4 of 4" not in report.write(tmp_path).html.read_text()


@pytest.mark.parametrize("content", ["", "{", "5", "{}", '{"test": 5}', "\x00"])
def test_a_damaged_result_is_no_result(tmp_path, content):
    report_fake.make(tmp_path, seeds=(0,), variants=("full", "bigbird"))
    (tmp_path / "runs" / "full-0" / "result.json").write_text(content)
    comparison = results.load(tmp_path)
    assert not comparison.finished("full") and lead(comparison).startswith("1 of 2 runs are finished.")


@pytest.mark.parametrize("content", ["", "{", "5", '{"variants": 5, "seeds": [0]}', '{"variants": {}, "seeds": [0]}'])
def test_a_damaged_config_is_refused_in_one_line(tmp_path, content):
    report_fake.make(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"^[^\n]*holds no comparison[^\n]*$"):
        results.load(tmp_path)
