"""What a comparison's config says: its runs, trials and parts, complete and checked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from xformer import budget, experiment, presets, pretraining, schema, sections, tuning
from xformer.checks import ArgumentError
from xformer.config import check, override, plain, read_plain
from xformer.schema import ConfigError, Text

__all__ = [
    "ReportOptions",
    "check_comparison",
    "comparison_parts",
    "comparison_runs",
    "comparison_trials",
    "load_comparison",
    "pretraining_run",
]


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """What a comparison's report computes besides the runs.

    Attributes:
      cost_lengths: lengths in tokens at which each variant's FLOPs are counted.
      measure_up_to: longest length in tokens at which time and memory are measured too.
      measure_seconds: time that all measurements together may take.
      sections: sections of one's own, each "package.module:function"; see `xformer.report.Section`.
    """

    cost_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    measure_up_to: int = 4096
    measure_seconds: float = 60.0
    sections: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.cost_lengths or min(self.cost_lengths) < 1:
            raise ValueError(f"cost_lengths: got {self.cost_lengths}, takes integers from 1, at least one")
        for name in ("measure_up_to", "measure_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 0 or more")


COMPARISON = {
    "name": schema.Parameter(str),
    "base": schema.Parameter(Any),
    "variants": schema.Parameter(dict[str, Any]),
    "tasks": schema.Parameter(dict[str, Any], {}),
    "seeds": schema.Parameter(tuple[int, ...], (0,)),
    "report": schema.Parameter(Any, {}),
    "baseline": schema.Parameter(str | None, None),
    "pretrain": schema.Parameter(Any, None),
    "tune": schema.Parameter(Any, None),
    "tune_seed": schema.Parameter(int | None, None),
    "budget": schema.Parameter(Any, None),
}


def load_comparison(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """The checked comparison config of a file, complete: `name`, `base`, `variants`, `tasks`, `seeds`, `report`, and
    `baseline` and `pretrain` where it has them.

    Overrides of an experiment's sections are overrides of `base`: `train.num_steps=10` is `base.train.num_steps=10`.
    `variants=full,local` picks variants by name; one that the file lacks is taken from `xformer.presets.attention`.
    `seeds=0` is one seed, `seeds=0,1` are two.
    """
    to_base = lambda item: f"base.{item}" if re.split("[.=]", item)[0] in sections.SECTIONS else item
    config = read_plain(spec)
    overrides = [re.sub(r"^seeds=\s*(\d+)\s*$", r"seeds=(\1,)", to_base(item)) for item in overrides]
    for item in [item for item in overrides if re.match(r"variants=\s*[^\s{]", item)]:
        overrides.remove(item)
        config = _picked(config, item.partition("=")[2])
    for item in overrides:
        _check_is_read(config, item)
    return check_comparison(override(config, overrides))


def _picked(config: Mapping[str, Any], names: str) -> dict[str, Any]:
    """A comparison with the variants of these names, separated by commas: those of the file, or of the table."""
    known = schema.as_mapping("variants", config.get("variants"))
    picked: dict[str, Any] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        if name in picked:
            raise ConfigError(f"variants: got {name!r} twice, takes each name once")
        try:
            picked[name] = known[name] if name in known else _of_table(name, config)
        except ArgumentError as error:
            raise ConfigError(f"variants: got {name!r}; has {', '.join(known)}, and {error}") from None
    tasks = dict(schema.as_mapping("tasks", config.get("tasks") or {}))
    for task, changes in tasks.items():
        if isinstance(changes, Mapping) and isinstance(own := changes.get("variants"), Mapping):
            tasks[task] = {**changes, "variants": {name: own[name] for name in own if name in picked}}
    return {**config, "variants": picked, **({"tasks": tasks} if tasks else {})}


def _of_table(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a variant of the table changes."""
    section = presets.attention(name)
    parts = [config.get("base"), *dict(config.get("tasks") or {}).values()]
    return presets.changes_for(section, *(part.get("model") for part in parts if isinstance(part, Mapping)))


def _check_is_read(config: Mapping[str, Any], item: str) -> None:
    """Raises ConfigError for an override of `base` that no run would see."""
    key, _, value = item.partition("=")
    parts = key.split(".")
    if parts[0] != "base" or len(parts) < 2:
        return
    if parts[1] in ("name", "seed"):
        raise ConfigError(f"{key}: got {value}, but a comparison names and seeds its runs; it takes name and seeds")
    for kind in ("variant", "task"):
        named = config.get(f"{kind}s")
        changes = dict(named.items()) if isinstance(named, Mapping) else {}
        there = {name: part.get(parts[1]) or {} for name, part in changes.items() if isinstance(part, Mapping)}
        replacing = [name for name, keys in there.items() if "name" in keys]
        setting = [name for name, keys in there.items() if len(parts) > 2 and parts[2] in keys]
        if changes and len(replacing) == len(changes):
            raise ConfigError(
                f"{key}: got {value}, but every {kind} replaces {parts[1]}; override {kind}s.NAME.{parts[1]} instead"
            )
        if kind == "task" and setting and not replacing:  # a base of many tasks is what they happen to share
            raise ConfigError(
                f"{key}: got {value}, but of the tasks {', '.join(setting)} set it too; override "
                f"tasks.NAME.{'.'.join(parts[1:])} instead"
            )


def check_comparison(config: Mapping | ConfigDict) -> ConfigDict:
    """Checks a comparison and each run of it. A variant changes keys of `base`; a section with a `name` is replaced.

    So does a task where there are `tasks`, for all variants, before them; under `variants` it says what a variant
    changes on this task alone. With `pretrain` every run starts from a pretraining of its own; see
    `xformer.pretraining.Pretrain`. `tune` lists values to try, for all variants or under `variants.NAME.tune` for one;
    see `xformer.tuning`. `budget` says what a run may cost; see `xformer.budget`.
    """
    given = plain(config)
    checked = schema.check_keys("", given, COMPARISON, "a comparison")
    report = schema.as_mapping("report", checked["report"])
    checked["report"] = schema.check_keys("report", report, schema.parameters(ReportOptions), "a comparison's report")
    try:
        ReportOptions(**checked["report"])
    except ValueError as error:
        raise ConfigError(f"report.{error}") from None
    for key in ("variants", "seeds"):
        if not checked[key]:
            raise ConfigError(f"{key}: got {checked[key]!r}, takes at least one")
    schema.check_name("name", checked["name"])
    for key in ("variants", "tasks"):
        for name in checked[key]:  # names become folders
            if not re.fullmatch(r"[\w+-]+", name) or len(name) > schema.MAX_NAME or (key, name) == ("tasks", "runs"):
                most = f"at most {schema.MAX_NAME} letters, digits and _ + -"
                most += ", and not 'runs', where a comparison keeps its runs" if key == "tasks" else ""
                raise ConfigError(f"{key}: got the name {schema.show(name)}, takes {most}")
    if checked["baseline"] is None:
        del checked["baseline"]
    elif checked["baseline"] not in checked["variants"]:
        got = schema.show(checked["baseline"])
        raise ConfigError(f"baseline: got {got}, takes one of the variants: {', '.join(checked['variants'])}")
    seeds = checked["seeds"]
    if len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**32 for seed in seeds):
        raise ConfigError(f"seeds: got {seeds}, takes different integers from 0 to 2**32 - 1")
    name, base = checked["name"], schema.as_mapping("base", checked["base"])
    variants = {
        variant: _check_changes(f"variants.{variant}", changes, (*sections.SECTIONS, "tune"), "a variant")
        for variant, changes in checked["variants"].items()
    }
    grids = {
        variant: {"tune": tuning.complete(f"variants.{variant}.tune", own)} if own is not None else {}
        for variant, changes in variants.items()
        for own in [_none(changes.pop("tune", None))]
    }
    checked["base"], found = _check_runs(name, base, variants, seeds[0])
    checked["variants"] = {variant: changes | grids[variant] for variant, changes in found.items()}
    _check_tuning_and_budget(checked)
    for task, given_changes in checked["tasks"].items():
        path = f"tasks.{task}"
        changes = _check_changes(path, given_changes, (*sections.SECTIONS, "variants"), "a task")
        own = schema.as_mapping(f"{path}.variants", changes.pop("variants", {}))
        for variant in own.keys() - variants.keys():
            raise ConfigError(f"{path}.variants: got {variant!r}, takes {', '.join(variants)}")
        try:
            both = {variant: _merge(variants[variant], own.get(variant, {})) for variant in variants}
            there, found = _check_runs(f"{name}-{task}", _merge(base, changes), both, seeds[0])
        except ConfigError as error:
            raise ConfigError(f"{path}.{str(error).removeprefix('base.')}") from None
        differs = {key: there[key] for key in sections.SECTIONS if there[key] != checked["base"][key]}
        checked["tasks"][task] = differs | {"variants": found}
    if not checked["tasks"]:
        del checked["tasks"]  # so that comparisons without are what they always were
    if _none(checked["pretrain"]) is None:
        del checked["pretrain"]
    else:
        checked["pretrain"] = pretraining.complete(checked["pretrain"])
    config = experiment.as_config(plain(checked))
    for part in comparison_parts(config).values():
        for variant, seed, run in comparison_runs(part):
            if seed == seeds[0]:
                pretraining_run(part, run)
                if "budget" in checked and run.train.num_epochs is not None:
                    raise ConfigError(
                        f"train.num_epochs: got {run.train.num_epochs}, takes None where there is a budget; in the "
                        "command: --config.base.train.num_epochs=None"
                    )
                if (steps := checked.get("budget", {}).get("steps")) is not None:
                    budget.check_warmup(budget.scaled(run.to_dict(), steps), variant, checked["budget"])
        for variant, values, run in comparison_trials(part):
            try:
                check(run)
            except ConfigError as error:
                raise ConfigError(f"tune: {variant} with {tuning.spelt(values)}: {error}") from None
    return config


def _none(value: Any) -> Any:
    """The value; None where that is what a text on the command line spells."""
    return None if isinstance(value, Text) and value.literal() is None else value


def _check_tuning_and_budget(checked: dict[str, Any]) -> None:
    """Checks `tune`, `tune_seed` and `budget` and completes them; those that are not used are left out."""
    for key, complete in (("tune", lambda given: tuning.complete("tune", given)), ("budget", budget.complete)):
        if _none(checked[key]) is None:
            del checked[key]
        else:
            checked[key] = complete(checked[key])
    tuned = "tune" in checked or any("tune" in changes for changes in checked["variants"].values())
    if tuned:
        tuning.check_numbers(checked.get("tune"), checked["variants"])
        checked["tune_seed"] = tuning.seed_for(checked["tune_seed"], checked["seeds"])
    elif checked.pop("tune_seed") is not None:
        raise ConfigError("tune_seed: takes None where nothing is tuned; tune says what is")


def _check_changes(path: str, changes: Any, takes: Sequence[str], what: str) -> dict[str, Any]:
    changes = dict(schema.as_mapping(path, changes))
    for key in changes.keys() - takes:
        raise ConfigError(f"{path}.{key}: got {schema.show(changes[key])}, but {what} changes only {', '.join(takes)}")
    return changes


def _check_runs(
    name: str, base: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]], seed: int
) -> tuple[ConfigDict, dict[str, Any]]:
    """The complete base, and for each variant the complete sections in which it differs from that."""
    try:
        checked = check(base)
    except ConfigError as error:
        raise ConfigError(f"base.{str(error).removeprefix('base.')}") from None
    found: dict[str, Any] = {}
    for variant, changes in variants.items():
        try:  # from what the base was given: what it leaves unset may be chosen differently for a variant
            run = check(_run_config(name, base, variant, changes) | {"seed": seed})
        except ConfigError as error:
            raise ConfigError(f"variants.{variant}.{error}") from None
        found[variant] = {key: run[key] for key in sections.SECTIONS if key in changes or run[key] != checked[key]}
    return checked, found


def comparison_parts(config: ConfigDict) -> dict[str, ConfigDict]:
    """The comparisons that a checked one is made of: one for each of its tasks, or under "" itself."""
    if "tasks" not in config:
        return {"": config}
    given = plain(config)
    parts = {}
    for task, changes in given.pop("tasks").items():
        base = _merge(given["base"], {key: value for key, value in changes.items() if key != "variants"})
        grids = {name: {"tune": own["tune"]} for name, own in given["variants"].items() if "tune" in own}
        variants = {name: own | grids.get(name, {}) for name, own in changes["variants"].items()}
        part = {"name": f"{config.name}-{task}", "base": base, "variants": variants}
        parts[task] = experiment.as_config(given | part)
    return parts


def pretraining_run(config: ConfigDict, run: ConfigDict, num_steps: int | None = None) -> ConfigDict | None:
    """The complete config of what a run of a checked comparison starts from; None where there is no `pretrain`.

    num_steps: those that `pretrain.train_flops` pay for, where they are known.

    Raises:
      ConfigError: that can't be run, or the run starts elsewhere.
    """
    if "pretrain" not in config:
        return None
    if run.train.init_from != pretraining.FOLDER:
        raise ConfigError(f"pretrain: got a section, takes None where train.init_from is {run.train.init_from!r}")
    try:
        started = pretraining.config_of(plain(run), plain(config.pretrain))
        if config.pretrain.train_flops is not None and num_steps:
            started = budget.scaled(started, num_steps)
        return check(started)
    except ConfigError as error:
        raise ConfigError(f"pretrain: {str(error).removeprefix('pretrain: ')}") from None


def comparison_runs(
    config: ConfigDict,
    tuned: Mapping[str, Mapping[str, Any]] | None = None,
    steps: Mapping[str, int | None] | None = None,
) -> list[tuple[str, int, ConfigDict]]:
    """(variant, seed, complete experiment config) of every run of a checked comparison, variants in order.

    Args:
      tuned: the values that were chosen, dotted key -> value, by variant; others run as the config has them.
      steps: how many each variant takes by the budget; others take those of the config.
    """
    runs = []
    for variant in config.variants:
        values = (tuned or {}).get(variant, {})
        run = _comparison_run(config, variant, values, (steps or {}).get(variant))
        runs += [(variant, seed, experiment.as_config(run | {"seed": seed})) for seed in config.seeds]
    return runs


def comparison_trials(
    config: ConfigDict, steps: Callable[[str, Mapping[str, Any]], int | None] = lambda variant, values: None
) -> list[tuple[str, dict[str, Any], ConfigDict]]:
    """(variant, values, complete experiment config) of every trial of a checked comparison, variants in order.

    Args:
      steps: how many a trial takes by the budget, of its variant and values; None: as the config has it.
    """
    trials = []
    for variant, changes in config.variants.items():
        grid = tuning.grid_of(config.get("tune"), changes)
        for values in tuning.points(plain(grid)):
            run = _comparison_run(config, variant, values, steps(variant, values))
            trials.append((variant, values, experiment.as_config(run | {"seed": config.tune_seed})))
    return trials


def _comparison_run(
    config: ConfigDict, variant: str, values: Mapping[str, Any], num_steps: int | None
) -> dict[str, Any]:
    """The complete config of a variant's runs, without their seed."""
    changes = {key: value for key, value in plain(config.variants[variant]).items() if key != "tune"}
    run = _run_config(config.name, plain(config.base), variant, changes)
    if "pretrain" in config and run["train"]["init_from"] is None:
        run["train"] = {**run["train"], "init_from": pretraining.FOLDER}
    run = override(run, values)
    return budget.scaled(run, num_steps) if num_steps else run


def _run_config(name: str, base: Mapping[str, Any], variant: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    return _merge(base, changes) | {"name": f"{name}-{variant}"}


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        value = value.literal() if isinstance(value, Text) and not isinstance(value.literal(), str) else value
        updates = isinstance(value, Mapping) and "name" not in value and isinstance(result.get(key), Mapping)
        result[key] = _merge(result[key], value) if updates else value
    return result
