"""Reads a comparison's workdir: result files only, so a report can be made anywhere, long after the runs."""

from __future__ import annotations

import dataclasses
import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xformer import tuning

METRICS = {"accuracy": "max", "loss": "min"}  # where results say nothing, in order of preference: which way is better
TUNED, BUDGET = "tuned.json", "budget.json"  # files of a comparison: what was chosen, and what a budget pays for


@dataclasses.dataclass(frozen=True)
class Run:
    """One (variant, seed). `result` is None until it has finished; `failure` says in one line why it did not.

    `values` are those of a trial, dotted key -> value, or those chosen for a run; empty where nothing is tuned.
    """

    variant: str
    seed: int
    folder: Path
    result: Mapping[str, Any] | None
    config: Mapping[str, Any]
    failure: str | None
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def info(self) -> Mapping[str, Any]:
        """What the result says of the data: `majority_accuracy`, `digest` and more; empty where it says nothing."""
        return mapping((self.result or {}).get("info"))

    @property
    def guesser(self) -> str:
        """What the trivial guesser does whose scores the result holds; empty where it holds none."""
        return str(mapping((self.result or {}).get("baseline")).get("name", ""))

    def guess(self, metric: str, split: str) -> float:
        """What the trivial guesser scores on a split, NaN where the result doesn't say."""
        scores = mapping(mapping((self.result or {}).get("baseline")).get("scores"))
        return number(mapping(scores.get(split)), metric)

    def others(self, metric: str, split: str) -> dict[str, tuple[str, float]]:
        """(what it does, what it scores) of each other simple method that the result knows, by its title."""
        found = mapping((self.result or {}).get("baseline")).get("others")
        methods = [mapping(method) for method in found] if isinstance(found, list) else []
        scores = {method.get("title"): mapping(mapping(method.get("scores")).get(split)) for method in methods}
        return {
            str(method["title"]): (str(method.get("name", "")), value)
            for method in methods
            if "title" in method and math.isfinite(value := number(scores[method["title"]], metric))
        }

    @property
    def source(self) -> Mapping[str, Any]:
        """What the run started from: what that cost, and what it scored; empty where it started from nothing."""
        return started_from(self.result)

    @property
    def digest(self) -> str | None:
        """The digest of the contents of the data that the run was made on; None where the result holds none."""
        found = self.info.get("digest")
        return None if found is None else str(found)

    @property
    def num_steps(self) -> int | None:
        """The steps that the run was to take; None where its config doesn't say."""
        return mapping(self.config.get("train")).get("num_steps")

    @property
    def spent(self) -> Mapping[str, float]:
        """`train_flops` and `train_seconds` so far, finished or not; 0 where it has not begun."""
        if self.result is not None:
            return {key: total(self.result, key) for key in ("train_flops", "train_seconds")}
        rows = read_jsonl(self.folder / "metrics.jsonl")
        last = rows[-1] if rows else {"train_flops": 0, "seconds": 0}
        return {"train_flops": number(last, "train_flops"), "train_seconds": number(last, "seconds")}

    @property
    def uncounted(self) -> list[str]:
        """What the training FLOPs leave out because it could not be counted."""
        found = (self.result or {}).get("flops_uncounted")
        return [str(name) for name in found] if isinstance(found, list) else []

    @property
    def status(self) -> str:
        """`finished`, `failed`, `unfinished` (resumable) or `not started`."""
        if self.result is not None:
            return "finished"
        if self.failure is not None:
            return "failed"
        return "unfinished" if (self.folder / "metrics.jsonl").exists() else "not started"

    def test(self, metric: str) -> float:
        """A metric on the test split, NaN where the run has none."""
        return number((self.result or {}).get("test"), metric)

    @property
    def pooling(self) -> str:
        """What the model makes one vector of, "cls" or "mean"; empty where its config says nothing."""
        return str(mapping(self.config.get("model")).get("pooling", ""))

    def test_examples(self) -> dict[str, np.ndarray]:
        """What was kept of each test example, [..., examples] for metrics and [examples, ...] for the rest."""
        try:
            with np.load(self.folder / "test_examples.npz") as kept:
                return {name: kept[name] for name in kept.files}
        except (OSError, ValueError, zipfile.BadZipFile):  # none, or damaged
            return {}

    def history(self, metric: str) -> list[dict[str, float]]:
        """`step`, `train_flops` and `seconds` so far, and the metric as `value`, of every evaluation, by rising steps.

        On the validation split. FLOPs and time of what the run started from are among those so far.
        """
        rows = {}
        costs = (("train_flops", "train_flops"), ("seconds", "train_seconds"))  # in a row, in a result
        before = {key: spent(self.source, source) for key, source in costs}
        for row in read_jsonl(self.folder / "metrics.jsonl"):
            if row.get("split") == "validation" and math.isfinite(step := number(row, "step")):
                so_far = {key: start + number(row, key) for key, start in before.items()}
                rows[step] = {"step": step, "value": number(row, metric), **so_far}
        return [rows[step] for step in sorted(rows)]

    def curve(self, metric: str) -> list[tuple[float, float]]:
        """(training FLOPs so far, metric on the validation split) of every evaluation, in order of steps."""
        return [(row["train_flops"], row["value"]) for row in self.history(metric)]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All runs of a comparison by variant, the reference first.

    Attributes:
      metric: what quality means here: what all runs select by, or else a key of METRICS.
      higher_is_better: whether more of it is better.
      reference: the variant that the others are set against: the config's `baseline`, else full attention without a
        position term, else the first.
      trials: those of each variant that is tuned, in the order of its grid.
      grids: what was tried, by variant: nested keys -> values.
      chosen: number of the trial whose values were chosen, by variant; those that are decided.
      budget: what each run may cost, such as `{"train_flops": 1e12}`; that of the base in steps where it says nothing.
    """

    name: str
    runs: Mapping[str, Sequence[Run]]
    seeds: Sequence[int]
    metric: str
    higher_is_better: bool
    reference: str
    trials: Mapping[str, Sequence[Run]] = dataclasses.field(default_factory=dict)
    grids: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    chosen: Mapping[str, int] = dataclasses.field(default_factory=dict)
    budget: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def finished(self, variant: str) -> list[Run]:
        return [run for run in self.runs[variant] if run.result is not None]

    def all_runs(self) -> Iterator[Run]:
        for runs in self.runs.values():
            yield from runs

    @property
    def variants(self) -> list[str]:
        return list(self.runs)


def run_folder(workdir: Path, variant: str, seed: int) -> Path:
    """Where a comparison keeps the run of a variant and a seed."""
    return workdir / "runs" / f"{variant}-{seed}"


def trial_folder(workdir: Path, variant: str, number: int) -> Path:
    """Where a comparison keeps a trial of a variant, numbered as `xformer.tuning.points` numbers them."""
    return workdir / "trials" / f"{variant}-{number}"


def tuned(workdir: Path) -> dict[str, Mapping[str, Any]]:
    """The values that were chosen, dotted key -> value, by variant; those that are chosen so far."""
    chosen = read_json(workdir / TUNED) or {}
    return {variant: mapping(mapping(choice).get("values")) for variant, choice in chosen.items()}


def budget_steps(workdir: Path, of: str = "") -> dict[str, int]:
    """How many steps the budget pays for, by what a step's cost is of (`full`, or `full, width 64`).

    of: "pretrain": those of pretraining, and its own budget.
    """
    content = read_json(workdir / BUDGET) or {}
    known = mapping((mapping(content.get(of)) if of else content).get("steps"))
    return {key: int(steps) for key, entry in known.items() if (steps := number(entry, "num_steps")) >= 1}


def load(workdir: Path) -> Comparison:
    """Reads the comparison in `workdir`, finished or not: its `config.json` and the folders under `runs/`.

    Raises:
      ValueError: there is no comparison in `workdir`.
    """
    config = read_json(workdir / "config.json") or {}
    changes, seeds = config.get("variants"), config.get("seeds")
    if not (isinstance(changes, dict) and changes and isinstance(seeds, list)):
        raise ValueError(f"{workdir} holds no comparison: its config.json is missing, damaged or another program's")
    base = mapping(config.get("base"))
    settings = {variant: _attention(base, mapping(change)) for variant, change in changes.items()}
    full = [variant for variant, op in settings.items() if op.get("name") == "full"]
    plain = [variant for variant in full if _position(settings[variant]) == "none"]
    named = [variant for variant in settings if variant == config.get("baseline")]
    reference = (named or plain or full or list(settings))[0]
    # The reference first, the others as configured: JSON written from a ConfigDict has them by name.
    variants = sorted(settings, key=lambda variant: variant != reference)
    steps = mapping(base.get("train")).get("num_steps")
    values, decided = tuned(workdir), read_json(workdir / TUNED) or {}
    runs = {variant: [_read_run(run_folder(workdir, variant, seed), variant, seed, values.get(variant, {}))
                      for seed in seeds] for variant in variants}  # fmt: skip
    grids = {name: tuning.grid_of(mapping(config.get("tune")), mapping(changes[name])) for name in variants}
    trials = {variant: [_read_run(trial_folder(workdir, variant, index), variant, config.get("tune_seed", 0), point)
                        for index, point in enumerate(tuning.points(grid))]
              for variant, grid in grids.items() if grid}  # fmt: skip
    metric, direction = _metric([run.result for some in runs.values() for run in some if run.result is not None])
    return Comparison(
        name=str(config.get("name", workdir.name)),
        runs=runs,
        seeds=seeds,
        metric=metric,
        higher_is_better=direction == "max",
        reference=reference,
        trials=trials,
        grids={variant: grid for variant, grid in grids.items() if grid},
        chosen={variant: int(mapping(choice)["trial"]) for variant, choice in decided.items() if variant in trials},
        budget=mapping(config.get("budget")) or ({"steps": steps} if steps else {}),
    )


def _metric(results: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(the metric that results are compared by, "min" or "max")."""
    known = [name for name in METRICS if results and all(name in mapping(result.get("test")) for result in results)]
    chosen = {str(result.get("select_metric")) for result in results}
    better = mapping(results[0].get("better")) if results else {}
    selected = next(iter(chosen)) if len(chosen) == 1 else ""
    # Runs that select by loss are compared by accuracy where they have one; those that tell tokens have a perplexity.
    tests = [mapping(result.get("test")) for result in results]
    tells = all("perplexity" in test for test in tests)
    if selected in better and (selected != "loss" or tells) and all(selected in test for test in tests):
        return selected, str(better[selected])
    metric = known[0] if known else "accuracy"
    return metric, METRICS[metric]


def _attention(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(changes.get("attention")) or mapping(base.get("attention"))


def _position(attention: Mapping[str, Any]) -> str:
    return str(mapping(attention.get("position")).get("name", "none"))


def _read_run(folder: Path, variant: str, seed: int, values: Mapping[str, Any]) -> Run:
    failure = read_json(folder / "failure.json")
    return Run(
        variant=variant,
        seed=seed,
        folder=folder,
        result=read_result(folder),
        config=read_json(folder / "config.json") or {},
        failure=None if failure is None else str(failure.get("error", "unknown error")),
        values=values,
    )


def read_result(folder: Path) -> dict[str, Any] | None:
    """A run's `result.json`; None where there is none or it is damaged: no object, or one without test metrics."""
    found = read_json(folder / "result.json")
    return found if found is not None and isinstance(found.get("test"), dict) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is none or it is damaged."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file; a damaged line, such as one that a kill cut short, is left out."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def started_from(result: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What a result says of the run that its own started from."""
    return mapping(mapping((result or {}).get("init_from")).get("source"))


def spent(source: Mapping[str, Any], key: str) -> float:
    """`train_flops` or `train_seconds` of what a run started from, 0 where it started from nothing."""
    return number(source, key) if key in source else 0.0


def total(result: Mapping[str, Any] | None, key: str) -> float:
    """`train_flops` or `train_seconds` of a run and of what it started from; NaN where the result doesn't say."""
    return number(result, key) + spent(started_from(result), key)


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def number(values: Any, key: str) -> float:
    """`values[key]` as a float, NaN where it is missing, None or no number."""
    value = mapping(values).get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)
