"""Accuracy by distance and by length: the numbers behind the picture, and when there is one."""

import numpy as np
import pytest
import report_fake

from xformer import report
from xformer.report import accuracy_by, results, style
from xformer.report.accuracy_by import DISTANCE, LENGTH

VARIANTS = ("full", "window")


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "DPI", 50)
    report_fake.make(tmp_path, variants=VARIANTS)
    report_fake.keep_examples(tmp_path, VARIANTS)
    return results.load(tmp_path)


def test_bins_hold_the_accuracy_of_their_distances(comparison):
    kept = accuracy_by.read(comparison, DISTANCE)
    edges = accuracy_by.even_edges(accuracy_by.values(kept), 8)
    assert edges == [1, 5, 9, 13, 17, 21, 25, 29, 33]
    found = accuracy_by.bins(kept["window"], edges)
    assert [(part.low, part.high) for part in found][:3] == [(1, 4), (5, 8), (9, 12)]
    assert [part.accuracy.mean for part in found] == [1.0, 1.0, 0, 0, 0, 0, 0, 0]
    assert all(part.accuracy.half_width == 0 and part.accuracy.count == 3 for part in found)
    assert {part.accuracy.mean for part in accuracy_by.bins(kept["full"], edges)} == {1.0}


def test_an_interval_is_over_seeds(comparison, tmp_path):
    folder = tmp_path / "runs" / "full-0"
    with np.load(folder / "test_examples.npz") as kept:
        arrays = dict(kept)
    np.savez(folder / "test_examples.npz", **arrays | {"accuracy": arrays["accuracy"] * [[0], [1]]})
    (whole,) = accuracy_by.bins(accuracy_by.read(comparison, DISTANCE)["full"], [1, 33])
    assert whole.accuracy.mean == pytest.approx(2 / 3) and whole.accuracy.half_width > 0.5


def test_even_edges_are_whole_and_end_behind_the_furthest():
    assert accuracy_by.even_edges(np.array([2, 5])) == [1, 2, 3, 4, 5, 6]
    edges = accuracy_by.even_edges(np.array([1, 255]))
    assert (edges[0], edges[-1], len(edges)) == (1, 256, 13)


def test_the_page_draws_it_with_the_reach_of_each_window(comparison, tmp_path):
    written = report.write(tmp_path, reaches={"window": 8})
    page = written.html.read_text()
    assert "<h2>Accuracy by distance</h2>" in page and "in 12 ranges of distances" in page
    assert (tmp_path / "distances.png").exists()


def test_the_picture_holds_lines_reach_and_baseline(comparison, monkeypatch):
    kept = []
    monkeypatch.setattr(style, "png", lambda fig: kept.append(fig) or b"png")
    marks = accuracy_by.marks(comparison, DISTANCE, {"window": 8, "full": 32})
    kept_examples = accuracy_by.read(comparison, DISTANCE)
    assert accuracy_by.picture(comparison, DISTANCE, kept_examples, marks, style.LIGHT) == b"png"
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
    assert accuracy_by.read(results.load(tmp_path), DISTANCE) == {}
    assert "Accuracy by distance" not in report.write(tmp_path).html.read_text()


@pytest.fixture
def lengths(comparison, tmp_path):
    """The comparison with the length of each test example: texts above 100 tokens are answered wrong, and cut at 64."""
    length = np.repeat([10, 50, 90, 110, 200, 400], [40, 30, 30, 20, 20, 20])
    for variant in VARIANTS:
        for seed in range(3):
            right = length <= 100
            weights = np.where(np.arange(len(length)) == 0, 3.0, 1.0)
            path = tmp_path / "runs" / f"{variant}-{seed}" / "test_examples.npz"
            np.savez(path, accuracy=np.stack([right, weights]).astype(np.float32), length=length)
            report_fake.edit(tmp_path, variant, seed, info={"max_len": 64, "source": "made", "tokenizer":
                             {"kind": "bytes", "size": 257}, "truncated": {"test": 0.25}})  # fmt: skip
    return results.load(tmp_path)


def test_accuracy_by_length_in_bins_of_as_many_texts(lengths):
    kept = accuracy_by.read(lengths, LENGTH)
    edges = accuracy_by.quantile_edges(accuracy_by.values(kept), 4)
    assert edges == [10, 90, 110, 401]  # two of the quarters begin with the 40 texts of ten tokens
    assert [part.accuracy.mean for part in accuracy_by.bins(kept["full"], edges)] == [1.0, 1.0, 0.0]


def test_the_page_draws_accuracy_by_length_and_where_texts_are_cut(lengths, tmp_path, monkeypatch):
    page = report.write(tmp_path).html.read_text()
    assert "<h2>Accuracy by length</h2>" in page and "Accuracy by distance" not in page
    assert "longer texts are cut there" in page and "<dt>Tokenizer</dt><dd>bytes, 257 ids</dd>" in page
    assert "<dt>Truncated</dt><dd>test 25.0 %</dd>" in page and (tmp_path / "lengths.png").exists()
    kept = []
    monkeypatch.setattr(style, "png", lambda fig: kept.append(fig) or b"png")
    marks = accuracy_by.marks(lengths, LENGTH, {"window": 8})
    assert marks == [(64, "cut at 64", None)]
    accuracy_by.picture(lengths, LENGTH, accuracy_by.read(lengths, LENGTH), marks, style.LIGHT)
    assert "cut at 64" in {text.get_text() for text in kept[0].axes[0].texts}


def test_texts_of_one_length_are_not_drawn(lengths, tmp_path):
    for path in (tmp_path / "runs").rglob("*.npz"):
        with np.load(path) as kept:
            arrays = dict(kept)
        np.savez(path, **arrays | {"length": np.full_like(arrays["length"], 255)})
    assert accuracy_by.read(results.load(tmp_path), LENGTH) == {}


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


def test_rows_of_next_tokens_are_pieces_and_not_drawn(lengths, tmp_path):
    for path in (tmp_path / "runs").rglob("*.npz"):
        with np.load(path) as kept:
            arrays = dict(kept)
        np.savez(path, **arrays, context_tokens=np.ones((len(arrays["length"]), 6), np.float32))
    assert accuracy_by.read(results.load(tmp_path), LENGTH) == {}
