"""Accuracy by distance: the numbers behind the picture, and when there is one."""

import numpy as np
import pytest
import report_fake

from xformer import report
from xformer.report import distances, results, style

VARIANTS = ("full", "window")


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "DPI", 50)
    report_fake.make(tmp_path, variants=VARIANTS)
    report_fake.keep_examples(tmp_path, VARIANTS)
    return results.load(tmp_path)


def test_bins_hold_the_accuracy_of_their_distances(comparison):
    edges = distances.even_edges(distances.furthest(distances.read(comparison)), 8)
    assert edges == [1, 5, 9, 13, 17, 21, 25, 29, 33]
    found = distances.bins(distances.read(comparison)["window"], edges)
    assert [(part.low, part.high) for part in found][:3] == [(1, 4), (5, 8), (9, 12)]
    assert [part.accuracy.mean for part in found] == [1.0, 1.0, 0, 0, 0, 0, 0, 0]
    assert all(part.accuracy.half_width == 0 and part.accuracy.count == 3 for part in found)
    assert {part.accuracy.mean for part in distances.bins(distances.read(comparison)["full"], edges)} == {1.0}


def test_an_interval_is_over_seeds(comparison, tmp_path):
    folder = tmp_path / "runs" / "full-0"
    with np.load(folder / "test_examples.npz") as kept:
        arrays = dict(kept)
    np.savez(folder / "test_examples.npz", **arrays | {"accuracy": 0 * arrays["accuracy"]})
    (whole,) = distances.bins(distances.read(comparison)["full"], [1, 33])
    assert whole.accuracy.mean == pytest.approx(2 / 3) and whole.accuracy.half_width > 0.5


def test_even_edges_are_whole_and_end_behind_the_furthest():
    assert distances.even_edges(5, 12) == [1, 2, 3, 4, 5, 6]
    assert distances.even_edges(255)[0] == 1 and distances.even_edges(255)[-1] == 256
    assert len(distances.even_edges(255)) == distances.BINS + 1


def test_the_page_draws_it_with_the_reach_of_each_window(comparison, tmp_path):
    written = report.write(tmp_path, reaches={"window": 8})
    page = written.html.read_text()
    assert "<h2>Accuracy by distance</h2>" in page and "in 12 ranges of distances" in page
    assert (tmp_path / "distances.png").exists()


def test_the_picture_holds_lines_reach_and_baseline(comparison, monkeypatch):
    kept = []
    monkeypatch.setattr(style, "png", lambda fig: kept.append(fig) or b"png")
    assert distances.picture(comparison, distances.read(comparison), {"window": 8, "full": 32}, style.LIGHT) == b"png"
    (ax,) = kept[0].axes
    texts = {text.get_text() for text in ax.texts}
    assert {"full", "window", "window reaches 8", "commonest class"} <= texts and "full reaches 32" not in texts
    assert any(list(line.get_xdata()) == [8.5, 8.5] for line in ax.lines)


@pytest.mark.parametrize("change", ["mean pooling", "nothing kept", "damaged"])
def test_without_distances_there_is_no_picture(comparison, tmp_path, change):
    for folder in (tmp_path / "runs").iterdir():
        if change == "mean pooling":
            report_fake.write_json(folder / "config.json", {"model": {"pooling": "mean"}})
        elif change == "damaged":
            (folder / "test_examples.npz").write_bytes(b"PK cut")
        else:
            (folder / "test_examples.npz").unlink()
    assert distances.read(results.load(tmp_path)) == {}
    assert "Accuracy by distance" not in report.write(tmp_path).html.read_text()


def test_one_table_of_several_tasks(comparison, tmp_path, monkeypatch):
    work = tmp_path / "both"
    for task in ("near", "far"):
        report_fake.make(work / task, variants=VARIANTS, seeds=(0, 1))
    report_fake.edit(work / "far", "window", 0, train_flops=2e12, step_time_ms=1.0)
    report_fake.edit(work / "far", "window", 1, train_flops=2e12, step_time_ms=1.0)
    written = report.write_tasks(work, "two tasks", {"near": report.Measured(), "far": report.Measured()})
    header, _, full, window = written.table.splitlines()
    assert header.index("near: test accuracy") < header.index("far: test accuracy") < header.index("mean")
    assert full.split()[-2:] == ["1.00×", "1.00×"]
    near = 1e9 / 3.1e9  # FLOPs of a step of the fake runs
    assert window.split()[-2] == f"{(near * 2e12 / 3.1e12) ** 0.5:.2f}×"
    page = written.html.read_text()
    assert page.count('<h2 class="task">') == 2 and "<h3>Runs</h3>" in page
    assert "![Quality against cost](far/pareto.png)" in (work / "report.md").read_text()
    assert (work / "far" / "pareto.png").exists() and len((work / "results.jsonl").read_text().splitlines()) == 8
