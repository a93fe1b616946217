"""Curves that a reader can hover and switch: their numbers, and the page's script run in Node."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import report_fake
import scipy.stats

from xformer.report import curves, page, results


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return report_fake.make(tmp_path_factory.mktemp("work"), variants=("full", "bigbird"), seeds=(0, 1, 2))


def rows(work, variant, seed):
    lines = (work / "runs" / f"{variant}-{seed}" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == "validation"]


def test_points_are_means_over_seeds_by_every_axis(work):
    found = curves.data(results.load(work))
    assert found["axes"] == ["step", "train_flops", "seconds"] and found["metric"] == "accuracy"
    for variant in found["variants"]:
        seeds = [rows(work, variant["name"], seed) for seed in (0, 1, 2)]
        assert len(variant["points"]) == len(seeds[0]) == 10
        for index, point in enumerate(variant["points"]):
            values = [run[index]["accuracy"] for run in seeds]
            half = scipy.stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / math.sqrt(3)
            assert point["mean"] == pytest.approx(np.mean(values))
            assert point["high"] - point["low"] == pytest.approx(2 * half)
            for axis in ("step", "train_flops", "seconds"):
                assert point[axis] == pytest.approx(np.mean([run[index][axis] for run in seeds]))


def test_an_axis_that_a_run_does_not_know_is_left_out(tmp_path):
    work = report_fake.make(tmp_path, variants=("full", "bigbird"), seeds=(0,))
    path = work / "runs" / "full-0" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"seconds"', '"other"'))
    assert curves.data(results.load(work))["axes"] == ["step", "train_flops"]


def test_names_cannot_end_the_script_element(tmp_path):
    work = report_fake.make(tmp_path, variants=("full", "</script><b>&"), seeds=(0,))
    text = curves.script(results.load(work))
    assert not set("<>&") & set(text)
    assert json.loads(text)["variants"][1]["name"] == "</script><b>&"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_script_draws_switches_hides_and_tells(work, monkeypatch):
    monkeypatch.setattr(page.style, "DPI", 30)
    written = page.write(work)
    dom = Path(__file__).parent / "report_dom.js"
    done = subprocess.run(["node", str(dom), str(written.html)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["buttons"] == ["steps", "training FLOPs", "training time", "log", "full", "bigbird"]
    data = curves.data(results.load(work))["variants"]

    def expected(axis, log):
        """Where points stand along x, from 0 to 1, recomputed."""
        scale = np.log if log else np.asarray
        every = [[point[axis] for point in variant["points"]] for variant in data]
        low = min(map(min, every)) if log else 1e-300
        low, high = scale(low), scale(max(map(max, every)))
        return [(scale(xs) - low) / (high - low) for xs in every]

    for state, axis, log in (("first", "train_flops", True), ("steps", "step", False)):
        assert len(found[state]["curves"]) == 2
        for drawn, places in zip(found[state]["curves"], expected(axis, log), strict=True):
            xs = np.array([x for x, _ in drawn])
            np.testing.assert_allclose((xs - 58) / (700 - 58 - 14), places, atol=1e-6)
    for variant, drawn in zip(data, found["first"]["curves"], strict=True):
        order = np.argsort([point["mean"] for point in variant["points"]])
        assert (np.argsort([-y for _, y in drawn]) == order).all(), "better is higher"
    third = data[0]["points"][2]
    assert found["hover"].startswith(f"full: accuracy {100 * third['mean']:.1f} % (")
    assert found["hover"].endswith("step 300, 930 GFLOP, 30 s; 3 seeds")
    assert found["first"]["pressed"] == ["training FLOPs", "log", "full", "bigbird"]
    assert found["hidden"]["pressed"] == ["steps", "full"] and len(found["hidden"]["curves"]) == 1
    assert "steps so far" in found["steps"]["labels"] and "commonest class" in found["steps"]["labels"]


def test_the_page_has_one_script_and_the_picture_for_who_runs_none(work, monkeypatch):
    monkeypatch.setattr(page.style, "DPI", 30)
    text = page.write(work).html.read_text()
    assert len(re.findall("<script>", text)) == 1 and len(re.findall("<figure data-curves>", text)) == 1
    figure = text[text.index("<figure data-curves>") :]
    assert "<picture>" in figure[: figure.index("</figure>")]
