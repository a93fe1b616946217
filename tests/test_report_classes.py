"""Classes in a report: the numbers of the table and of the confusion matrix, and when there are none."""

import numpy as np
import pytest
import report_fake

from xformer import report
from xformer.report import classes, results, style, summary

VARIANTS = ("full", "linformer", "full+shaw")
NAMES = ["arm", "gpu", "x86"]


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "DPI", 50)
    report_fake.make(tmp_path, variants=VARIANTS)
    report_fake.keep_classes(tmp_path, VARIANTS, NAMES)
    report_fake.keep_classes(tmp_path, VARIANTS[1:2], NAMES, wrong=8)
    return tmp_path


def read(workdir):
    comparison = results.load(workdir)
    return comparison, classes.read(comparison, summary.rows(comparison))


def test_table_and_matrix_are_means_over_seeds_by_hand(workdir):
    _, found = read(workdir)
    assert found.shown == ["full", "full+shaw"]  # the reference, and the best
    table = classes.table(found)
    assert table.headers[:5] == ("class", "examples", "full: precision", "full: recall", "full: F1")
    # Of ten `arm`, 3, 4 and 5 were taken for `x86`: recall (0.7 + 0.6 + 0.5) / 3; F1 2 h / (2 h + misses).
    assert table.rows[0][:4] == ("arm", "10", "100.0 %", "60.0 %")
    f1 = np.mean([14 / 17, 12 / 16, 10 / 15])
    assert table.rows[0][4].startswith(f"{100 * f1:.1f} ± ") and table.rows[1][2:5] == (
        "100.0 %",
        "100.0 %",
        "100.0 ± 0.0 %",
    )
    assert table.rows[2][2] == f"{100 * np.mean([10 / 13, 10 / 14, 10 / 15]):.1f} %"
    np.testing.assert_allclose(found.confusion["full"], [[0.6, 0, 0.4], [0, 1, 0], [0, 0, 1]])
    more = classes.every_f1(found)
    assert more.headers == ("class", "full: F1", "linformer: F1", "full+shaw: F1")
    assert more.rows[0][2].startswith(f"{100 * np.mean([4 / 12, 2 / 11, 0]):.1f} ± ")


def test_the_page_has_table_and_picture(workdir):
    page = report.write(workdir).html.read_text()
    assert "<h2>Class by class</h2>" in page and "<h2>What is taken for what</h2>" in page
    assert "full+shaw, which has the best test accuracy: means over 3 seeds" in page and "F1 of all variants" in page
    text = (workdir / "report.md").read_text()
    assert "| arm | 10 | 100.0 % | 60.0 % |" in text and "(confusion.png)" in text
    assert (workdir / "confusion.png").exists()


def test_the_picture_holds_the_shares_of_each_variant_shown(workdir, monkeypatch):
    kept = []
    monkeypatch.setattr(style, "png", lambda fig: kept.append(fig) or b"png")
    assert classes.picture(*read(workdir), style.LIGHT) == b"png"
    left, right = kept[0].axes
    assert not any(label.get_text() for label in right.get_yticklabels())
    assert [text.get_text() for text in left.texts] == ["60", "40", "100", "100"]
    assert [label.get_text() for label in left.get_yticklabels()] == NAMES
    assert (left.get_title("left"), right.get_title("left")) == ("full", "full+shaw")


def test_several_labels_have_a_table_and_no_matrix(workdir):
    for variant in VARIANTS:
        for seed in range(3):
            details = results.load(workdir).runs[variant][seed].result["test_details"]
            report_fake.edit(workdir, variant, seed, test_details={"classes": details["classes"]})
    report.write(workdir)
    assert "Class by class" in (workdir / "report.md").read_text() and not (workdir / "confusion.png").exists()


@pytest.mark.parametrize("change", ["no classes", "other names", "too many", "other data"])
def test_without_common_classes_there_is_nothing(workdir, change):
    if change == "no classes":
        for variant in VARIANTS:
            for seed in range(3):
                report_fake.edit(workdir, variant, seed, test_details={})
    elif change == "other names":
        report_fake.keep_classes(workdir, ["linformer"], ["a", "b"])
    elif change == "too many":
        report_fake.keep_classes(workdir, VARIANTS, [f"class {index}" for index in range(41)])
    else:
        for seed in range(2):
            report_fake.edit(workdir, "full", seed, info={"digest": f"digest {seed}"})
    assert read(workdir)[1] is None


def test_a_best_variant_that_is_the_reference_stands_alone(workdir):
    for seed in range(3):
        report_fake.edit(workdir, "full", seed, test={"accuracy": 0.99, "examples": 30})
    comparison, found = read(workdir)
    assert found.shown == ["full"] and classes.note(comparison, found).startswith("Of full: means over 3 seeds")
