"""What the runs of a comparison say: one row a variant, and what a reader must be warned of."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xformer.report import formatting
from xformer.report.results import Comparison, Run, mapping, number, total
from xformer.report.stats import Estimate, at_chance, estimate, wilson

MAX_PARAM_DIFFERENCE = 0.10
MIN_SEEDS = 3  # a variant, before one is called better than another


@dataclasses.dataclass(frozen=True)
class Row:
    """A variant over its finished seeds; NaN where no run says.

    Attributes:
      quality: the metric on the test split; empty where the variant's runs were made on different data.
      examples_half_width: half the 95 % interval of the mean accuracy that the number of test examples leaves; 0 for
        other metrics, and where the number is not known.
      chance_seeds: seeds whose test metric is not clearly better than that of a guesser that reads nothing.
      broken_seeds: seeds whose metric is NaN or infinite; `quality` leaves them out.
      train_flops: of the run and of what it started from.
      input_wait: share of training time spent waiting for data.
      num_steps: steps that were taken; NaN where seeds took different numbers.
      train_seconds: time of the training steps of a run and of what it started from, the median.
    """

    variant: str
    quality: Estimate
    examples_half_width: float
    finished: int
    planned: int
    chance_seeds: tuple[int, ...]
    broken_seeds: tuple[int, ...]
    num_params: float
    flops_per_step: float
    train_flops: float
    step_time_ms: float
    peak_memory_bytes: float
    input_wait: float
    num_steps: float = math.nan
    train_seconds: float = math.nan


def rows(comparison: Comparison) -> list[Row]:
    """One row a variant, the reference first; variants without a finished run have NaNs."""
    return [_row(comparison, variant) for variant in comparison.variants]


def _row(comparison: Comparison, variant: str) -> Row:
    runs = comparison.finished(variant)
    values = [run.test(comparison.metric) for run in runs]
    same_data = len({run.digest for run in runs if run.digest is not None}) <= 1
    quality = estimate(values if same_data else [])
    return Row(
        variant=variant,
        quality=quality,
        examples_half_width=_examples_half_width(comparison.metric, quality, runs),
        finished=len(runs),
        planned=len(comparison.runs[variant]),
        chance_seeds=tuple(
            run.seed for run in runs if is_at_chance(run, comparison.metric, comparison.higher_is_better)
        ),
        broken_seeds=tuple(run.seed for run, value in zip(runs, values, strict=True) if not math.isfinite(value)),
        num_params=_over(runs, "num_params", max),
        flops_per_step=_over(runs, "flops_per_step", statistics.median),
        train_flops=_over(runs, "train_flops", statistics.fmean, total),
        step_time_ms=_over(runs, "step_time_ms", statistics.median),
        peak_memory_bytes=_over(runs, "peak_memory_bytes", max),
        input_wait=_over(runs, "input_wait_share", statistics.fmean),
        num_steps=_over(runs, "last_step", lambda steps: steps[0] if len(set(steps)) == 1 else math.nan),
        train_seconds=_over(runs, "train_seconds", statistics.median, total),
    )


def _examples_half_width(metric: str, quality: Estimate, runs: Sequence[Run]) -> float:
    examples = [run.test("examples") for run in runs]
    if metric != "accuracy" or not 0 <= quality.mean <= 1 or not all(count >= 1 for count in examples):
        return 0.0
    low, high = wilson(quality.mean, round(min(examples)))  # the seeds share the examples, so more seeds do not help
    return (high - low) / 2


def clearly_differ(one: Row, other: Row) -> bool:
    """Whether both have MIN_SEEDS seeds and their 95 % intervals, over seeds and over test examples, are apart.

    False does not say that they are equal: only that these runs cannot tell.
    """
    room = 0.0
    for row in (one, other):
        if row.quality.count < MIN_SEEDS or row.quality.half_width is None:
            return False
        room += max(row.quality.half_width, row.examples_half_width)
    return abs(one.quality.mean - other.quality.mean) > room


def _over(
    runs: Sequence[Run],
    key: str,
    combine: Callable[[list[float]], float],
    read: Callable[[Any, str], float] = number,
) -> float:
    values = [value for run in runs if math.isfinite(value := read(run.result, key))]
    return float(combine(values)) if values else math.nan


def baseline_of(run: Run, metric: str, split: str = "test") -> float:
    """What a trivial guesser scores, NaN where the result doesn't say.

    That is what the result's own baseline scores; or for an accuracy always answering the commonest class of the split,
    where classes have shares, if that is more.
    """
    known = [value for value in (run.guess(metric, split), _majority(run, metric, split)) if math.isfinite(value)]
    return max(known, default=math.nan) if metric == "accuracy" else next(iter(known), math.nan)


def _majority(run: Run, metric: str, split: str) -> float:
    return number(run.info.get("majority_accuracy"), split) if metric == "accuracy" else math.nan


def baseline(comparison: Comparison, split: str) -> float:
    """`baseline_of` the comparison's metric in the runs that know it, NaN where none does."""
    known = (baseline_of(run, comparison.metric, split) for run in comparison.all_runs())
    return next((value for value in known if math.isfinite(value)), math.nan)


def others(comparison: Comparison, split: str) -> dict[str, tuple[str, float]]:
    """(what it does, what it scores by the comparison's metric) of each other simple method, by its title."""
    runs = reversed(list(comparison.all_runs()))
    return {title: found for run in runs for title, found in run.others(comparison.metric, split).items()}


def above(comparison: Comparison) -> str:
    """What is better than a value of the metric: "above" or "below" it."""
    return "above" if comparison.higher_is_better else "below"


def guesser(comparison: Comparison) -> str:
    """What the baseline does, for the middle of a sentence: "always answering the commonest class"."""
    metric = comparison.metric
    for run in comparison.all_runs():
        majority = _majority(run, metric, "test")
        if run.guesser and not run.guess(metric, "test") <= majority:
            return f"a guesser that {run.guesser}"
    return "always answering the commonest class"


def baseline_title(comparison: Comparison) -> str:
    """What stands above, and beside, the score of a guesser that reads nothing."""
    return "commonest class" if guesser(comparison).endswith("commonest class") else "trivial guess"


def is_at_chance(run: Run, metric: str = "accuracy", higher_is_better: bool = True) -> bool:
    """Whether a finished run ended at chance level on the test split: not clearly above the baseline."""
    if metric == "accuracy":
        return at_chance(run.test(metric), run.test("examples"), baseline_of(run, metric))
    value, guess = run.test(metric), run.guess(metric, "test")
    return value <= guess if higher_is_better else value >= guess  # False where one is NaN


def warnings(comparison: Comparison) -> list[str]:
    """What to know before believing the table, one plain-text line each."""
    found = _data_warnings(comparison)
    found += [_unfinished(run) for run in comparison.all_runs() if run.result is None]
    summary = rows(comparison)
    reference = next(row for row in summary if row.variant == comparison.reference)
    for row in summary:
        if row.broken_seeds:
            found.append(f"{row.variant}: the test {comparison.metric} of {_seeds(row.broken_seeds)} is no finite "
                         "number; the mean leaves it out")  # fmt: skip
        if row.chance_seeds:
            found.append(f"{row.variant}: {_seeds(row.chance_seeds)} ended at chance level: test {comparison.metric} "
                         f"is not clearly {above(comparison)} {guesser(comparison)}")  # fmt: skip
        change = row.num_params / reference.num_params - 1 if reference.num_params else math.nan
        other_model = model_name(comparison, row.variant) != model_name(comparison, reference.variant)  # on purpose
        if math.isfinite(change) and abs(change) > MAX_PARAM_DIFFERENCE and not other_model:
            found.append(f"{row.variant} has {abs(change):.0%} {'more' if change > 0 else 'fewer'} parameters than "
                         f"{reference.variant}, above the 10 % that a comparison of attention allows")  # fmt: skip
    counts = {row.quality.count for row in summary if row.quality.count}
    if counts == {1}:
        found.append("one seed: no interval can be given, and differences between variants may be chance")
    elif counts == {2}:
        found.append("two seeds: intervals are wide, and differences between variants may be chance")
    elif len(counts) > 1:
        found.append("the variants have different numbers of seeds, so their intervals do not compare like with like")
    for key, values in (("device", devices(comparison)), ("software versions", versions(comparison))):
        if len(values) > 1:
            found.append(f"the runs were made with different {key}, so times and memory do not compare")
    if left_out := uncounted(comparison):
        found.append(f"FLOPs leave out what cannot be counted: {', '.join(left_out)}")
    return found


def uncounted(comparison: Comparison) -> list[str]:
    """What the training FLOPs of any run leave out because it could not be counted."""
    return sorted({name for run in comparison.all_runs() for name in run.uncounted})


def digests(comparison: Comparison) -> list[str]:
    """The digests of the data that finished runs were made on, each once."""
    return list(dict.fromkeys(run.digest for run in comparison.all_runs() if run.digest is not None))


def data_differ(comparison: Comparison) -> bool:
    """Whether runs were made on different data, so that their results do not compare."""
    return len(digests(comparison)) > 1


def _data_warnings(comparison: Comparison) -> list[str]:
    if not data_differ(comparison):
        return []
    by_digest: dict[str, list[str]] = {}
    for run in comparison.all_runs():
        if run.digest is not None:
            by_digest.setdefault(run.digest, []).append(f"{run.variant}-{run.seed}")
    groups = "; ".join(f"{', '.join(names)} on {digest[:12]}" for digest, names in by_digest.items())
    return [f"THE RUNS WERE MADE ON DIFFERENT DATA, so nothing is compared across them: {groups}"]


def _unfinished(run: Run) -> str:
    why = f": {run.failure}" if run.failure else ""
    return f"{run.variant}, seed {run.seed}: {run.status}{why}"


def _seeds(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {formatting.listed([str(seed) for seed in seeds])}"


def devices(comparison: Comparison) -> list[str]:
    return _distinct(comparison, "device")


def versions(comparison: Comparison) -> list[str]:
    return _distinct(comparison, "versions")


def _distinct(comparison: Comparison, key: str) -> list[str]:
    values = (run.result.get(key) for run in comparison.all_runs() if run.result is not None)
    return list(dict.fromkeys(spelt(value) for value in values if value is not None))


def spelt(value: Any) -> str:
    """A value of JSON in words: `key value, key value` for an object."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {spelt(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(spelt(item) for item in value)
    return str(value)


def differences(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Config keys in which runs differ: key -> variant -> value, a dash where the variant has no such key.

    Where the runs of one variant differ among themselves, all their values are given, joined by `or`. Of a section of
    `swapped`, keys that not all of them have are left out: the name says what else is there.
    """
    flat: dict[str, list[dict[str, str]]] = {}
    for variant, runs in comparison.runs.items():
        configs = [dict(flatten(run.config)) for run in runs if run.config]
        if configs:
            flat[variant] = configs
    every = [config for configs in flat.values() for config in configs]
    keys = dict.fromkeys(key for config in every for key in config if key not in ("name", "seed"))
    value = lambda config, key: config.get(key, formatting.MISSING)
    found = {
        key: {
            variant: " or ".join(dict.fromkeys(value(config, key) for config in configs))
            for variant, configs in flat.items()
        }
        for key in keys
        if len({value(config, key) for config in every}) > 1
    }
    names = {f"{section}.name" for section in swapped(found)}
    own = lambda key: f"{key.split('.')[0]}.name" in names - {key} and any(key not in config for config in every)
    return {key: values for key, values in found.items() if not own(key)}


def swapped(differing: Iterable[str]) -> list[str]:
    """The sections, attention aside, whose `name` is among keys that differ: another model, optimizer or task."""
    parts = [key.split(".") for key in differing]
    return [section for section, *rest in parts if rest == ["name"] and section != "attention"]


def model_name(comparison: Comparison, variant: str) -> str:
    """The model's name in a variant's configs; "" where none says."""
    named = (str(mapping(run.config.get("model")).get("name", "")) for run in comparison.runs[variant])
    return next(filter(None, named), "")


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """(`a.b`, value as text) of every leaf of a nested config."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
