"""The sentences of a report that compare variants. Each says only what was measured or checked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xformer import budget
from xformer.report import against, formatting, summary
from xformer.report.results import Comparison
from xformer.report.summary import MIN_SEEDS, Row

FLOPS = "2 per multiply-add of matrix products and convolutions"
LEFT_OUT = "elementwise work, softmax, normalisation and moving data"
PRETRAINING = (
    "What the runs started from, each with its seed: the pretraining's own test score, and its cost. Times are those of"
    " training steps, compilation and evaluation left out."
)


def lead(comparison: Comparison, rows: Sequence[Row]) -> str:
    """What the comparison found, in a few sentences: which variant is better, if that can be told, and at what cost."""
    planned, finished = (sum(getattr(row, name) for row in rows) for name in ("planned", "finished"))
    state = "" if finished == planned else f"{finished} of {planned} runs are finished."
    done = [row for row in rows if row.quality.count]
    if summary.data_differ(comparison):
        found = ["The runs were made on different data, so nothing is compared."]
    elif not done:
        found = [] if state else ["No run has a result."]
    else:
        some = f"{len(done)} of {len(rows)} variants have a result." if 1 < len(done) < len(rows) else ""
        found = [some, _quality(comparison, done), _cheapest(comparison, rows, done)]
    return " ".join(sentence for sentence in (state, *found) if sentence)


def _quality(comparison: Comparison, done: Sequence[Row]) -> str:
    metric = f"test {comparison.metric}"
    spell = lambda row: formatting.quality(row.quality, comparison.metric)
    ordered = sorted(done, key=lambda row: row.quality.mean, reverse=not comparison.higher_is_better)
    worst, best = ordered[0], ordered[-1]
    if all(len(row.chance_seeds) == row.finished for row in done):
        return (f"Every run ended at chance level: no result is clearly {summary.above(comparison)} "
                f"{summary.guesser(comparison)}, so the variants cannot be told apart.")  # fmt: skip
    if len(done) == 1:
        return f"{best.variant} reaches a {metric} of {spell(best)}; no other variant has a result."
    if len(few := [row for row in done if row.quality.count < MIN_SEEDS]):
        counts = {row.quality.count for row in done}
        have = formatting.listed([f"{row.variant} has {row.quality.count}" for row in few])
        have = f"each has {counts.pop()}" if len(counts) == 1 else have
        return (f"Mean {metric} lies between {spell(worst)} ({worst.variant}) and {spell(best)} ({best.variant}). No "
                f"variant is called better: that takes {MIN_SEEDS} seeds or more, and {have}.")  # fmt: skip
    over = "over seeds and test examples" if any(row.examples_half_width for row in done) else "over seeds"
    end = "highest" if comparison.higher_is_better else "lowest"
    level = [row for row in done if row.quality.mean == best.quality.mean]
    ties = _ties(comparison, done, level)
    near = {row.variant for row in done if row not in level and not summary.clearly_differ(best, row)}
    rivals = [row.variant for row in done if row.variant in near | ties and row not in level]
    if len(level) > 1:
        but = f", but are not clearly better than {formatting.listed(rivals)}" if rivals else ""
        return f"{formatting.listed([row.variant for row in level])} share the {end} mean {metric}, {spell(best)}{but}."
    if rivals:
        return (f"{best.variant} has the {end} mean {metric}, {spell(best)}, but is not clearly better than "
                f"{formatting.listed(rivals)}: their 95 % intervals, {over}, overlap"
                + (", or paired tests don't tell them apart." if ties - near else "."))  # fmt: skip
    return (f"{best.variant} has the best {metric}, {spell(best)}: its 95 % interval, {over}, overlaps no other "
            "variant's.")  # fmt: skip


def _ties(comparison: Comparison, done: Sequence[Row], level: Sequence[Row]) -> set[str]:
    """The variants that the paired tests don't tell from the baseline, where that is among the best."""
    best = comparison.reference in {row.variant for row in level}
    return {one.row.variant for one in against.against(comparison, done) if best and one.verdict == "tie"}


def _cheapest(comparison: Comparison, rows: Sequence[Row], done: Sequence[Row]) -> str:
    """Which variant takes the fewest FLOPs, among those that learnt something: a run at chance is cheap for nothing."""
    if "train_flops" in comparison.budget and not any(run.source for run in comparison.all_runs()):
        return ""  # as many for all, but for what is left of one step
    reference = next(row for row in rows if row.variant == comparison.reference)
    usable = [row for row in done if math.isfinite(row.train_flops) and not row.chance_seeds and not row.broken_seeds]
    if len(usable) < 2 or not math.isfinite(reference.train_flops):
        return ""
    cheapest = min(usable, key=lambda row: row.train_flops)
    if cheapest is reference:
        return ""
    judged = math.isfinite(summary.baseline(comparison, "test"))
    counted = "counted training FLOPs" if summary.uncounted(comparison) else "training FLOPs"
    among = "Of the variants above chance in every run, " if judged else ""
    return (
        f"{among}{cheapest.variant} takes the fewest {counted}, "
        f"{formatting.ratio(cheapest.train_flops, reference.train_flops)} those of {reference.variant}, with a test "
        f"{comparison.metric} of {formatting.quality(cheapest.quality, comparison.metric)}."
    )


def budget_note(comparison: Comparison) -> str:
    """What is the same for all runs: steps, training FLOPs or training time. Nothing where no config says."""
    if not comparison.budget:
        return ""
    ((kind, amount),) = comparison.budget.items()
    steps = {run.num_steps for run in comparison.all_runs() if run.result is not None and run.num_steps}
    if kind == "steps" and len(steps) != 1:  # variants may have steps of their own
        return ""
    spell = {"steps": lambda _: f"{next(iter(steps)):,}", "train_flops": lambda x: formatting.si(x, "FLOP"),
             "seconds": formatting.seconds}[kind]  # fmt: skip
    note = f"Compared {budget.spelt(comparison.budget)}: {spell(amount)} a run"
    if kind == "steps":
        return f"{note}."
    how = "its step counts" if kind == "train_flops" else "its step took when it was timed, alone, before the runs"
    return f"{note}; each variant takes as many steps as that pays for, by what {how}."


def tasks_note(first: Comparison) -> str:
    """What the numbers of the table over tasks are."""
    return (
        f"Quality with its 95 % interval over seeds (where that would be as wide as the scale, lowest and highest seed "
        f"instead). FLOPs and step time are multiples of those of {first.reference}, "
        "the geometric mean over the tasks."
    )


def flops_note(comparison: Comparison) -> str:
    """What the FLOPs of the main table count and leave out."""
    begun = any(run.source for run in comparison.all_runs())
    return (
        f"FLOPs: {FLOPS}, in forward, backward, recomputation and optimizer of a training step. "
        f"Left out: {LEFT_OUT}{also(summary.uncounted(comparison))}."
        + (" Training FLOPs, in pictures too, count the pretraining that a run started from." if begun else "")
    )


def also(uncounted: Sequence[str]) -> str:
    """The end of a sentence about what FLOPs leave out: what the counter could not count."""
    return f"; and, since it could not be counted, {', '.join(uncounted)}" if uncounted else ""


def differences_note(comparison: Comparison) -> str:
    """In what the configs of the variants differ besides attention, and whether the data are the same."""
    return f"{_configs(comparison)} {_data(comparison)}"


def _configs(comparison: Comparison) -> str:
    other = [key for key in summary.differences(comparison) if not key.startswith("attention.")]
    if other:
        names = formatting.listed(other)
        note = f"More than attention: {names} differ too, so attention alone does not explain the results."
        if swapped := summary.swapped(other):
            note += f" Keys of {formatting.listed(swapped)} that not all variants have are not listed."
        return note
    missing = [f"{run.variant}-{run.seed}" for run in comparison.all_runs() if not run.config]
    if len(missing) == len(list(comparison.all_runs())):
        return "No run has left its config, so what differs was not checked."
    unchecked = f", but for {formatting.listed(missing)}, whose configs are not there" if missing else ""
    return f"Attention only: every other key of the runs' configs is the same, seeds aside{unchecked}."


def _data(comparison: Comparison) -> str:
    found = summary.digests(comparison)
    finished = [run for run in comparison.all_runs() if run.result is not None]
    without = [f"{run.variant}-{run.seed}" for run in finished if run.digest is None]
    if len(found) > 1:
        return "The data are NOT the same: the runs' results hold different digests of their contents."
    if not found:
        return "Whether the data are the same was not checked: no result holds a digest of their contents."
    same = f"The data are the same: a digest of their contents ({found[0][:12]}) is in the result of"
    if not without:
        return f"{same} every finished run."
    return f"{same} every finished run but {formatting.listed(without)}, which hold none and were not checked."
