"""What `make test` samples of the conformance matrix, and that `make test-full` has the rest."""

import itertools

import conformance


def tiers(**options):
    """(Rows that `make test` runs, rows that `make test-full` runs) of a parametrisation."""
    params = conformance.rows(**options).args[1]
    full = [param.values[0] for param in params if any(mark.name == "full" for mark in param.marks)]
    return [param.values[0] for param in params if not param.marks], full


def test_each_variant_position_and_implementation_is_sampled():
    often, rest = tiers(positions=True, causal=(False, True), implementations=conformance.BOTH)
    kind = lambda row: (type(row.op), type(getattr(row.op, "position", None)), row.op.implementation)
    assert {kind(row) for row in often} == {kind(row) for row in [*often, *rest]}
    assert len(rest) >= len(often) / 4, "the matrix is hardly sampled"


def test_causal_and_other_rows_are_sampled_in_both_implementations():
    often, _ = tiers(positions=True, causal=(False, True), implementations=conformance.BOTH)
    positioned = {(row.op.implementation, row.op.causal) for row in often if getattr(row.op, "position", None)}
    assert positioned == set(itertools.product(conformance.BOTH, (False, True)))


def test_every_projection_and_every_pattern_is_sampled():
    often, _ = tiers()
    names = {row.name for row in often}
    assert {"full", "window", "bigbird", "bigbird-etc"} <= names
    assert {row.op.projection for row in often if hasattr(row.op, "projection")} == {"learned", "conv", "mean"}


def test_no_row_is_left_out():
    often, rest = tiers(causal=(False, True), implementations=conformance.BOTH)
    expected = sum(2 * (1 + case.causal) for case in conformance.CASES)
    assert len({str(row) for row in [*often, *rest]}) == len(often) + len(rest) == expected
