"""What the runs of a comparison say: one row a variant, and what a reader must be warned of."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xformer.report import formatting
from xformer.report.results import Comparison, Run, number
from xformer.report.stats import Estimate, at_chance, estimate

MAX_PARAM_DIFFERENCE = 0.10


@dataclasses.dataclass(frozen=True)
class Row:
    """A variant over its finished seeds; NaN where no run says.

    Attributes:
      quality: the metric on the test split.
      chance_seeds: seeds whose test accuracy is not clearly above that of always answering the commonest class.
      broken_seeds: seeds whose metric is NaN or infinite; `quality` leaves them out.
      input_wait: share of training time spent waiting for data.
    """

    variant: str
    quality: Estimate
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


def rows(comparison: Comparison) -> list[Row]:
    """One row a variant, the reference first; variants without a finished run have NaNs."""
    return [_row(comparison, variant) for variant in comparison.variants]


def _row(comparison: Comparison, variant: str) -> Row:
    runs = comparison.finished(variant)
    values = [run.test(comparison.metric) for run in runs]
    return Row(
        variant=variant,
        quality=estimate(values),
        finished=len(runs),
        planned=len(comparison.runs[variant]),
        chance_seeds=tuple(run.seed for run in runs if is_at_chance(run)),
        broken_seeds=tuple(run.seed for run, value in zip(runs, values, strict=True) if not math.isfinite(value)),
        num_params=_over(runs, "num_params", max),
        flops_per_step=_over(runs, "flops_per_step", statistics.median),
        train_flops=_over(runs, "train_flops", statistics.fmean),
        step_time_ms=_over(runs, "step_time_ms", statistics.median),
        peak_memory_bytes=_over(runs, "peak_memory_bytes", max),
        input_wait=_over(runs, "input_wait_share", statistics.fmean),
    )


def _over(runs: Sequence[Run], key: str, combine: Callable[[list[float]], float]) -> float:
    values = [value for run in runs if math.isfinite(value := number(run.result, key))]
    return float(combine(values)) if values else math.nan


def majority(run: Run) -> float:
    """Accuracy on the test split of always answering the commonest class, NaN where the result doesn't say."""
    shares = (run.result or {}).get("info", {}).get("majority_accuracy")
    return number(shares, "test")


def is_at_chance(run: Run) -> bool:
    """Whether a finished run ended at chance level on the test split."""
    return at_chance(run.test("accuracy"), run.test("examples"), majority(run))


def warnings(comparison: Comparison) -> list[str]:
    """What to know before believing the table, one plain-text line each."""
    found = [_unfinished(run) for run in comparison.all_runs() if run.result is None]
    summary = rows(comparison)
    reference = next(row for row in summary if row.variant == comparison.reference)
    for row in summary:
        if row.broken_seeds:
            found.append(f"{row.variant}: the test {comparison.metric} of {_seeds(row.broken_seeds)} is no finite "
                         "number; the mean leaves it out")  # fmt: skip
        if row.chance_seeds:
            found.append(f"{row.variant}: {_seeds(row.chance_seeds)} ended at chance level: test accuracy is not "
                         "clearly above always answering the commonest class")  # fmt: skip
        change = row.num_params / reference.num_params - 1 if reference.num_params else math.nan
        if math.isfinite(change) and abs(change) > MAX_PARAM_DIFFERENCE:
            found.append(f"{row.variant} has {abs(change):.0%} {'more' if change > 0 else 'fewer'} parameters than "
                         f"{reference.variant}, above the 10 % that a comparison of attention allows")  # fmt: skip
    counts = {row.quality.count for row in summary if row.quality.count}
    if counts == {1}:
        found.append("one seed: no interval can be given, and differences between variants may be chance")
    elif len(counts) > 1:
        found.append("the variants have different numbers of seeds, so their intervals do not compare like with like")
    for key, values in (("device", devices(comparison)), ("software versions", versions(comparison))):
        if len(values) > 1:
            found.append(f"the runs were made with different {key}, so times and memory do not compare")
    uncounted = sorted(
        {name for run in comparison.all_runs() for name in (run.result or {}).get("flops_uncounted", ())}
    )
    if uncounted:
        found.append(f"FLOPs leave out what cannot be counted: {', '.join(uncounted)}")
    return found


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
    return list(dict.fromkeys(_spelt(value) for value in values if value is not None))


def _spelt(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_spelt(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_spelt(item) for item in value)
    return str(value)


def differences(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Config keys in which the variants differ: key -> variant -> value, a dash where the variant has no such key."""
    flat = {}
    for variant, runs in comparison.runs.items():
        config = next((run.config for run in runs if run.config), None)
        if config is not None:
            flat[variant] = {key: value for key, value in flatten(config) if key not in ("name", "seed")}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    table = {key: {variant: values.get(key, formatting.MISSING) for variant, values in flat.items()} for key in keys}
    return {key: values for key, values in table.items() if len(set(values.values())) > 1}


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """(`a.b`, value as text) of every leaf of a nested config."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
