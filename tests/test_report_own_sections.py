"""`report.sections`: a user's function makes a section of the page; what is wrong with one costs that section only."""

import sys

import pytest
import report_fake
import tiny_comparison

from xformer import report
from xformer.commands import cli, compare
from xformer.report import own_sections

MINE = '''
from xformer.report import Comparison, Section, Table

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8ffff3f0005fe02fe"
    "dccc59e70000000049454e44ae426082"
)


def best_seeds(comparison: Comparison) -> Section:
    """A table with the best seed of each variant."""
    score = lambda run: run.test(comparison.metric)
    rows = tuple((name, str(max(comparison.finished(name), key=score).seed)) for name in comparison.runs)
    return Section("Which seed was best & why", "As <measured>.", Table(("variant", "best seed"), rows), PIXEL)


def broken(comparison):
    return 1 / 0


def text(comparison):
    return "a title"


def short(comparison):
    return Section("Short", table=Table(("a", "b"), (("1",),)))


def damaged(comparison):
    return Section("Damaged", picture=PIXEL[:40])


def no_argument():
    return Section("None")


constant = 5
'''


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_sections.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("xformer.report.page._plots", lambda *given: [])
    yield
    sys.modules.pop("my_sections", None)


def test_a_section_of_a_user_s_module_stands_in_the_report(tmp_path):
    work = tmp_path / "work"
    report_fake.make(work)
    report.write(work, sections=["my_sections:best_seeds"])
    page, text = (work / "report.html").read_text(), (work / "report.md").read_text()
    assert "<h2>Which seed was best &amp; why</h2>" in page and "<p>As &lt;measured&gt;.</p>" in page
    assert '<img src="data:image/webp;base64,' in page and "best seed</th>" in page
    assert "## Which seed was best & why" in text and "![Which seed was best & why](own-0.png)" in text
    assert "| variant | best seed |" in text and (work / "own-0.png").read_bytes().startswith(own_sections.PNG)
    assert text.index("Which seed") < text.index("## Runs")
    report.write(work, sections=[])
    assert not list(work.glob("own-*.png"))  # a picture of a section that is gone


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "raised ZeroDivisionError: division by zero (my_sections.py, line "),
        ("text", "gave a str, takes an xformer.report.Section"),
        ("short", "gave a table with a row of another length than its 2 headers"),
        ("damaged", "gave a picture that is a damaged PNG"),
    ],
)
def test_what_is_wrong_with_a_section_is_one_line_and_the_rest_is_there(name, message, tmp_path):
    work = tmp_path / "work"
    report_fake.make(work, seeds=(0,), variants=("full", "linformer"))
    written = report.write(work, sections=[f"my_sections:{name}", "my_sections:best_seeds"])
    (line,) = [line for line in written.warnings if line.startswith("report.sections[0] ")]
    assert f"'my_sections:{name}' {message}" in line and line.endswith("the report is without it")
    assert "Which seed was best" in (work / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_sectoins:best_seeds", "but importing my_sectoins fails with ModuleNotFoundError"),
        ("my_sections:best_seed", "but there is no best_seed in "),
        ("my_sections.best_seeds", "takes 'package.module:Class'"),
        ("my_sections:constant", "takes a function or a class"),
        ("my_sections:no_argument", "takes a function of one argument, the comparison (too many positional arguments)"),
    ],
)
def test_a_name_that_can_t_be_used_is_one_line_before_anything_runs(name, message, tmp_path, capsys):
    path = tiny_comparison.write(tmp_path / "config.py")
    flags = [f"--config={path}", f"--workdir={tmp_path / 'work'}", f"--config.report.sections=('{name}',)"]
    assert cli.exit_code(compare.command, flags) == cli.WRONG_ARGUMENTS
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and f"report.sections[0]: got '{name}', " in err and message in err
    assert not (tmp_path / "work").exists()
