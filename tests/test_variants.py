"""The table and the picture of all variants, against what other tests and the papers say of them."""

from pathlib import Path

import pytest
from conformance import CASES

from xformer.attention import ATTENTIONS, build
from xformer.commands import cli, pictures, variants

ROOT = Path(__file__).parent.parent


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_page_of_the_documentation_has_what_the_code_says(name):
    page = (ROOT / "docs/variants.md").read_text().splitlines()
    cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
    (row,) = (cells(line) for line in page if line.startswith(f"| `{name}`"))
    heads, _, found = map(cells, variants.table([variants.facts(name, 4096)]).splitlines())
    assert heads in map(cells, page)
    assert row == found


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name in {case.name for case in CASES}])
def test_facts_are_those_of_the_conformance_suite(name):
    (case,) = (case for case in CASES if case.name == name)
    found = variants.facts(name, 64)
    assert found.causal == case.causal
    assert ("dropout" in found.takes) == case.dropout
    assert ("bias" in found.takes) == case.pairs
    assert ("masks by query" in found.takes) == (case.pairs and case.masks)
    assert bool(found.positions) == (set(case.positions) != {"none"})
    assert (found.keeps == "cannot") == (case.causal and not case.offsets)


def test_growth_is_the_exponent_of_the_papers():
    growth = {name: variants.facts(name, 4096).growth for name in ("full", "window", "linear")}
    assert growth["full"] == 4
    assert growth["linear"] == 2
    assert 2 <= growth["window"] < 2.05


def test_chosen_pairs_are_drawn():
    drawn = pictures.pattern(build({"name": "routing"}, 64), 64, 1)
    assert drawn.note == "of random inputs"
    assert 0 < drawn.allowed.mean() < 0.5


def test_the_command_refuses_a_length_of_nothing():
    with pytest.raises(cli.ConfigError, match="--length: got 0, takes an integer from 1 to 1048576"):
        variants.command(["--length=0"])
