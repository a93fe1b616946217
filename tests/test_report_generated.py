"""The report's table of what generated texts score, beside methods that need no model."""

import json

import pytest
import report_fake

from xformer.report import generated, results, write


def make(folder):
    """Two variants whose results have ROUGE of the test split alone, and a method with one metric of two."""
    lead = {"title": "lead", "name": "answers with the first sentence", "scores": {"test": {"rougeL": 0.2}}}
    words = {"title": "TF-IDF", "name": "sees words", "scores": {"test": {"accuracy": 0.6}}}
    baseline = {"name": "knows shares", "scores": {"test": {"accuracy": 0.5}}, "others": [lead, words]}
    report_fake.make(folder, variants=("full", "linformer"), seeds=(0, 1), baseline=baseline)
    for path in folder.glob("runs/*/result.json"):
        result = json.loads(path.read_text())
        more = {"rouge1": 0.5, "rougeL": 0.3 + result["seed"] / 10 if result["attention"] == "full" else 0.25}
        path.write_text(json.dumps({**result, "test": {**result["test"], **more}}))
    return folder


def test_generated_texts_have_a_table(tmp_path):
    comparison = results.load(make(tmp_path))
    assert generated.metrics(comparison) == ["rouge1", "rougeL"]
    table = generated.table(comparison)
    assert table.headers == ("test", "rouge1", "rougeL")
    full, linformer, lead = table.rows
    assert full[:2] == ("full", "0.5000 ± 0.0000") and full[2].startswith("0.3500 ± 0.63")
    assert linformer == ("linformer", "0.5000 ± 0.0000", "0.2500 ± 0.0000")
    assert lead[0] == "lead" and lead[2] == "0.2000" and not lead[1][0].isdigit()
    assert "lead answers with the first sentence." in generated.note(comparison)


@pytest.mark.full
def test_the_page_shows_it(tmp_path):
    write(make(tmp_path))
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "Generated texts" in text and "rougeL" in text and "0.3500" in text


def test_others_have_none(tmp_path):
    report_fake.make(tmp_path, variants=("full",), seeds=(0,))
    assert generated.table(results.load(tmp_path)) is None


@pytest.mark.parametrize("evaluated", [{}, None])
def test_a_result_without_an_evaluation_says_nothing(evaluated, tmp_path):
    report_fake.make(tmp_path, variants=("full",), seeds=(0,), eval=evaluated)
    assert generated.metrics(results.load(tmp_path)) == []
