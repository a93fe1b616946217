"""Differences between variants: intervals that cover, corrections, ties, and what `comparison.json` says of them."""

import json
import math

import numpy as np
import pytest
import report_fake
import scipy.stats

from xformer import comparison as comparisons
from xformer import config as configs
from xformer.report import against, inference, page, results, style, summary
from xformer.report.inference import holm, paired_examples, paired_seeds, seeds_needed


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setattr(style, "DPI", 50)


def by_seed(values):
    return dict(enumerate(map(float, values)))


# The arithmetic, against SciPy's own tests and by simulation.


def test_paired_seeds_are_scipy_s_paired_t_test():
    rng = np.random.default_rng(0)
    for count in (2, 3, 5, 8):
        ours, theirs = rng.normal(0.7, 0.02, count), rng.normal(0.68, 0.02, count)
        found, expected = paired_seeds(by_seed(ours), by_seed(theirs)), scipy.stats.ttest_rel(ours, theirs)
        interval = expected.confidence_interval(0.95)
        assert found.p == pytest.approx(expected.pvalue) and found.count == count
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_only_seeds_that_both_have_are_paired():
    found = paired_seeds({0: 0.9, 1: 0.8, 2: math.nan, 7: 0.1}, {1: 0.7, 0: 0.6, 2: 0.5, 3: 0.4})
    assert found.count == 2 and found.mean == pytest.approx(0.2)
    assert paired_seeds({0: 0.9}, {1: 0.9}).count == 0
    assert math.isnan(paired_seeds({0: 0.9}, {0: 0.8}).p)


def test_equal_runs_are_no_difference():
    same = by_seed([0.5, 0.6, 0.7])
    assert paired_seeds(same, same).p == 1.0
    higher = by_seed([0.75, 0.75])
    assert paired_seeds(higher, by_seed([0.5, 0.5])).p == 0.5  # no spread: two seeds that agree are a coin thrown twice


@pytest.mark.parametrize("count", [3, 5])
def test_intervals_over_seeds_cover_95_percent(count):
    """4,000 comparisons in which the true difference is 1 point: seeds move both variants together, and apart."""
    rng, truth, inside, trials = np.random.default_rng(count), 0.01, 0, 4000
    for _ in range(trials):
        seed = rng.normal(0, 0.03, count)
        ours, theirs = (0.7 + add + seed + rng.normal(0, 0.01, count) for add in (truth, 0.0))
        found = paired_seeds(by_seed(ours), by_seed(theirs))
        inside += found.low <= truth <= found.high
    assert inside / trials == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / trials))


def test_intervals_over_examples_cover_95_percent(monkeypatch):
    monkeypatch.setattr(inference, "RESAMPLES", 400)
    rng, inside, trials = np.random.default_rng(0), 0, 300
    for trial in range(trials):
        hard = rng.random(300)
        ours, theirs = ((hard < share).astype(np.float32) for share in (0.72, 0.68))
        ours = np.where(rng.random(300) < 0.1, 1 - ours, ours)  # its own mistakes
        truth = 0.9 * 0.72 + 0.1 * 0.28 - 0.68
        ones = np.ones(300, np.float32)
        found = paired_examples(np.stack([ours, ones]), np.stack([theirs, ones]), seed=trial)
        inside += found.low <= truth <= found.high
    assert inside / trials == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / trials))


def test_fillers_of_no_weight_change_nothing():
    ours = np.array([[1, 0, 1, 1, 9], [1, 1, 1, 1, 0]], np.float32)
    theirs = np.array([[1, 0, 0, 1, -9], [1, 1, 1, 1, 0]], np.float32)
    assert paired_examples(ours, theirs).mean == pytest.approx(0.25)


def test_holm_is_the_published_procedure():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, math.nan, 0.5])[0] == pytest.approx(1.0) and math.isnan(holm([0.9, math.nan, 0.5])[1])
    assert holm([]) == []


def test_of_equal_variants_one_is_called_different_in_five_percent_of_comparisons_at_most():
    rng, wrong, trials = np.random.default_rng(1), 0, 1500
    for _ in range(trials):
        baseline = by_seed(rng.normal(0, 1, 3))
        found = holm([paired_seeds(by_seed(rng.normal(0, 1, 3)), baseline).p for _ in range(5)])
        wrong += min(found) < 0.05
    assert wrong / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_seeds_needed_find_the_difference_in_80_percent():
    count = seeds_needed(0.012, 0.01)
    rng, found, trials = np.random.default_rng(2), 0, 3000
    for _ in range(trials):
        found += scipy.stats.ttest_1samp(rng.normal(0.01, 0.012, count), 0).pvalue < 0.05
    assert found / trials >= 0.8 - 3 * math.sqrt(0.16 / trials)
    needed = [seeds_needed(deviation, 0.01) for deviation in np.geomspace(1e-5, 0.05, 40)]
    assert needed == sorted(needed) and needed[0] == 2, "more spread never needs fewer, and little needs few"
    assert seeds_needed(0.0, 0.01) == 2 and seeds_needed(math.nan, 0.01) is None and seeds_needed(50.0, 0.01) is None


# What a report makes of it: a planted winner, a planted loser, a tie, one at chance.


PLANTED = {
    "full": [0.700, 0.720, 0.710, 0.690],
    "better": [0.751, 0.769, 0.762, 0.740],  # by 5 points, whatever the seed
    "worse": [0.649, 0.672, 0.660, 0.640],
    "tie": [0.700, 0.705, 0.730, 0.685],
    "chance": [0.500, 0.501, 0.499, 0.500],
}


def planted(tmp_path, values=PLANTED, examples=2000):
    seeds = tuple(range(len(values["full"])))
    report_fake.make(tmp_path, variants=tuple(values), seeds=seeds)
    for variant, of_seeds in values.items():
        for seed, accuracy in enumerate(of_seeds):
            report_fake.edit(tmp_path, variant, seed, test={"accuracy": accuracy, "loss": 1.0, "examples": examples})
    return tmp_path


def test_winner_loser_and_tie_are_named_as_what_they_are(tmp_path):
    written = page.write(planted(tmp_path))
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert stored["baseline"] == "full" and stored["metric"] == "accuracy"
    verdicts = {name: entry["verdict"] for name, entry in stored["variants"].items()}
    assert verdicts == {"full": None, "better": "better", "worse": "worse", "tie": "tie", "chance": "worse"}
    assert stored["variants"]["chance"]["excluded"] == "at chance: seed 0, 1, 2, 3"
    better = stored["variants"]["better"]
    assert better["difference"] == pytest.approx(0.0505) and better["excluded"] is None
    low, high = better["difference_interval"]
    assert 0.04 < low < better["difference"] < high < 0.06 and better["p_adjusted"] < 0.001
    assert better["paired_over"] == "4 seeds" and better["train_flops"] > 0
    text = (tmp_path / "report.md").read_text()
    assert "## Against full" in text and "tie is neither clearly better nor clearly worse" in text
    assert "Against full</h2>" in written.html.read_text()


def test_two_seeds_call_nobody_better(tmp_path):
    page.write(planted(tmp_path, {name: values[:2] for name, values in PLANTED.items()}))
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert {entry["verdict"] for entry in stored["variants"].values()} == {None}
    assert "No variant is called better or worse: that takes 3 seeds" in (tmp_path / "report.md").read_text()


def test_one_seed_is_paired_over_its_test_examples_and_says_so(tmp_path):
    rng = np.random.default_rng(0)
    report_fake.make(tmp_path, variants=("full", "window"), seeds=(0,))
    hard = rng.random(500)
    for variant, share in (("full", 0.9), ("window", 0.6)):
        right = (hard < share).astype(np.float32)
        report_fake.edit(tmp_path, variant, 0, test={"accuracy": float(right.mean()), "loss": 1.0, "examples": 500})
        np.savez(tmp_path / "runs" / f"{variant}-0" / "test_examples.npz", accuracy=np.stack([right, right * 0 + 1]))
    page.write(tmp_path)
    entry = json.loads((tmp_path / "comparison.json").read_text())["variants"]["window"]
    assert entry["verdict"] == "worse" and entry["paired_over"] == "500 test examples"
    text = (tmp_path / "report.md").read_text()
    assert "not what another seed would" in text and "window is worse in its one run" in text
    assert "this run is worse" in text


def test_the_baseline_is_the_named_one(tmp_path):
    planted(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"baseline": "tie"}))
    comparison = results.load(tmp_path)
    found = against.against(comparison, summary.rows(comparison))
    assert comparison.reference == "tie" and [one.row.variant for one in found][:1] == ["full"]


def test_a_baseline_that_is_no_variant_is_one_line():
    with pytest.raises(configs.ConfigError, match=r"^baseline: got 'ful', takes one of the variants: full, "):
        comparisons.load_comparison("compare_demo", ["baseline=ful"])
    assert comparisons.load_comparison("compare_demo", ["baseline=window"]).baseline == "window"
    assert "baseline" not in comparisons.load_comparison("compare_demo")
