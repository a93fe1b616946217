"""Train every variant of a comparison with every seed, and write the report.

  xformer compare --config=compare_listops --workdir=runs/b [--config.base.train.num_steps=200]

A comparison config has `name`, `base` (an experiment), `variants` (name -> what it changes of the base, as a rule only
`attention`), `seeds` and `report`; `baseline` names the variant that the others are compared with (full attention, or
else the first). With `tasks` (name -> what it changes of the base, as a rule only `task`) the variants are compared on
each of them, under WORKDIR/TASK, and the report begins with one table of all. With `pretrain` (`num_steps` and more)
every run starts from a masked language model of its own, trained first. With `tune` (values to try by key) each variant
is tuned before its runs; `budget` (`steps`, `train_flops` or `seconds`) says what each run may cost. The same command
again skips the runs that are finished and resumes the others; it ends with the table, and `report.html`, `report.md`,
`results.jsonl` (every run and trial) and `comparison.json` (the tables) lie in the workdir.
With `--workers=2` two runs are trained at once, by processes that share out the cores; `--launcher=ray` or `slurm`
gives the runs to a cluster that sees the workdir.
`--config.variants=full,local --config.seeds=0,1` picks runs by name, and adds them to a comparison that is finished.
Exit codes: 0 finished; 2 wrong config or arguments, nothing computed; 75 interrupted and resumable; 1 some run failed,
all others are done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from xformer import extras, report
from xformer.bench import attention_costs
from xformer.checks import ArgumentError
from xformer.commands import budgets, cli, compile_cache, dry_run, hosts, launched, pictures, sessions, tuned
from xformer.commands.comparison_plan import Planned, plan, plan_trials
from xformer.commands.comparison_runs import interrupted, prepare, train
from xformer.commands.launchers.interface import Launcher
from xformer.comparison import (
    COMPARISON,
    ReportOptions,
    check_comparison,
    comparison_parts,
    comparison_runs,
    load_comparison,
)
from xformer.config_help import comparison_help
from xformer.difference import difference
from xformer.experiment import Experiment, as_json, build
from xformer.pretraining import Pretrain
from xformer.report import results
from xformer.report.formatting import listed
from xformer.schema import ConfigError
from xformer.train import Engine, Interrupted, WorkdirMismatch
from xformer.train import workdir as folders
from xformer.train.checkpoint import barrier

PATTERN_LENGTH = 1024  # tokens on a side of the patterns that are drawn, at most


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--config", required=True, help="path.py[:argument]; --config.key=value overrides a key")
    parser.add_argument("--workdir", help="folder of the comparison, made if it is not there")
    parser.add_argument("--data_dir", help="folder of prepared data (default: $XFORMER_DATA or ~/.cache/xformer)")
    parser.add_argument("--report_only", action="store_true", help="train nothing, report on the runs that are there")
    parser.add_argument("--dry_run", action="store_true", help="train nothing, say what the runs cost")
    parser.add_argument(
        "--keep_checkpoints", action="store_true", help="keep all checkpoints of finished runs, not the best one alone"
    )
    launched.add_flags(parser)
    hosts.add_flags(parser)
    args, overrides = parser.parse(argv)
    workdir = parser.workdir(args)
    if args.data_dir is not None:
        parser.folder("--data_dir", args.data_dir)
    if args.report_only and args.dry_run:
        raise ConfigError("--dry_run: got --report_only too; takes one of them, neither trains")
    if args.report_only and not (workdir / "config.json").is_file():
        raise ConfigError(f"--workdir: {workdir} holds no comparison to report on (no config.json)")
    extras.check("report")  # now, not when everything is trained
    hosts.start(args)
    config = load_comparison(args.config, overrides)
    if args.config_help:
        print(comparison_help(as_json(config), COMPARISON, ReportOptions, Pretrain))
        return
    try:
        report.find_sections(config.report.sections)
    except ArgumentError as error:
        raise ConfigError(str(error)) from error
    parts = comparison_parts(config)
    runs = plan(parts, workdir)
    launcher = launched.launcher(args, workdir)
    if args.dry_run:
        trials = tuned.undecided(plan_trials(parts, workdir), workdir)
        print(dry_run.table(runs, args.data_dir, trials, parts))
        return
    main = hosts.is_main()
    with folders.lock(workdir) if main else contextlib.nullcontext():
        if main:
            config = claim(workdir, config)
            for task, part in comparison_parts(config).items():
                if task:
                    (workdir / task).mkdir(exist_ok=True)
                    claim(workdir / task, part)
        barrier("comparison claimed")
        failed: list[Planned] = []
        stopped: list[Planned] = []
        hopeless: list[str] = []
        if not args.report_only:
            everything = lambda: [*plan_trials(parts, workdir), *plan(parts, workdir)]
            with sessions.recorded(workdir, argv, everything), compile_cache.kept(workdir):
                failed, stopped, hopeless = train_all(parts, workdir, args.data_dir, args.keep_checkpoints, launcher)
            runs = plan(parts, workdir)
        if main:
            written = write_report(workdir, config, runs)
            print(written.table)
            for warning in written.warnings:
                print(f"! {warning}")
            print(f"report: {written.html}", flush=True)
    if hopeless:
        raise cli.CommandFailed(f"no trial of {listed(hopeless)} finished, so nothing is chosen and no run of it is "
                                "trained; another grid needs another workdir")  # fmt: skip
    if failed:
        what = f"{len(failed)} of {len(runs)} runs" if failed[0].role == "run" else f"{len(failed)} trials"
        raise cli.CommandFailed(f"{what} failed: {listed([str(run) for run in failed])}; "
                                "the same command tries them again")  # fmt: skip
    if stopped:
        what = f"{len(stopped)} of {len(runs)} runs" if stopped[0].role == "run" else f"{len(stopped)} trials"
        raise Interrupted(f"{what} stopped at stop_at_step, saved; "
                          "the same command with a later stop_at_step, or None, goes on from there", 0)  # fmt: skip


def train_all(
    parts: Mapping[str, ConfigDict],
    workdir: Path,
    data_dir: str | None,
    keep: bool = False,
    launcher: Launcher | None = None,
) -> tuple[list[Planned], list[Planned], list[str]]:
    """Steps by the budget, then the trials, then the runs with what was chosen; only what is not done yet.

    Returns:
      The runs (or, where they keep runs from starting, trials) that failed, those that stopped at `stop_at_step`, and
      the variants none of whose trials finished.

    Raises:
      ConfigError: the budget is too small.
    """
    runs, trials = plan(parts, workdir), plan_trials(parts, workdir)
    fingerprints = prepare(runs, data_dir, trials)
    budgets.settle(trials or runs, parts, workdir, data_dir)
    trials = tuned.undecided(plan_trials(parts, workdir), workdir)
    engines: dict[Hashable, Engine] = {}

    def train_these(planned: Sequence[Planned]) -> tuple[list[Planned], list[Planned]]:
        if launcher is not None:
            return launched.train(planned, launcher, workdir, data_dir, fingerprints, keep)
        return train(planned, data_dir, fingerprints, engines, keep)

    failed_trials, stopped_trials = train_these(trials)
    hopeless = tuned.choose(trials, workdir)
    failed, stopped = train_these(plan(parts, workdir))
    failed_trials = [trial for trial in failed_trials if not trial.ended]
    return failed_trials or failed, stopped_trials or stopped, hopeless


def claim(workdir: Path, config: ConfigDict) -> ConfigDict:
    """Writes `config.json`, or checks the one that is there: what was computed must not change, the report may.

    Where nothing has been computed yet, everything may: a budget that was too small for a step can be corrected.

    Returns:
      The comparison of the workdir: that of `config`, and the variants and seeds that were there and are not asked for
      now. They are not trained again, and stay in the report.

    Raises:
      WorkdirMismatch: the workdir holds another comparison; the message shows the difference.
    """
    path = workdir / "config.json"
    given = json.loads(json.dumps(as_json(config)))
    if path.exists():
        before = results.read_json(path)
        if before is None:
            raise WorkdirMismatch(f"{path} is empty or damaged; put it back as it was, or choose another workdir")
        if "variants" not in before:
            raise WorkdirMismatch(f"{workdir} holds no comparison, perhaps a run; choose another workdir")
        whole, changes = _against(before, given)
        if changes:
            with contextlib.suppress(ConfigError):  # keys that are newer than the comparison have their defaults
                before = json.loads(json.dumps(as_json(check_comparison(before))))
                whole, changes = _against(before, given)
        if not changes:
            given = whole
        elif not isinstance(before["variants"], dict) or _has_computed(workdir):
            raise WorkdirMismatch(f"{workdir} holds another comparison: {'; '.join(changes)}; choose another workdir")
        else:
            (workdir / results.BUDGET).unlink(missing_ok=True)
        config = check_comparison(given)
    folders.write_json(path, given)
    return config


def _against(before: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The comparison `given` with what was there, and what differs that may not."""
    whole = joined(before, given) if isinstance(before["variants"], dict) else dict(given)
    found = difference(before, whole)
    return whole, [
        f"{key}: {there} there, {now} now" for key, (there, now) in found.items() if not _may_change(key, before)
    ]


def joined(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison `given`, with the variants and the seeds of `before` too; both as JSON."""
    old, new = before.get("variants", {}), given["variants"]
    whole = {**given, "variants": {**{name: new.get(name, old[name]) for name in old}, **new}}
    seeds = before.get("seeds", [])
    whole["seeds"] = [*seeds, *(seed for seed in given["seeds"] if seed not in seeds)]
    for task, changes in before.get("tasks", {}).items():
        if task in given.get("tasks", {}):
            both = {**changes.get("variants", {}), **given["tasks"][task]["variants"]}
            whole["tasks"] = {**whole["tasks"], task: {**given["tasks"][task], "variants": both}}
    return whole


def _has_computed(workdir: Path) -> bool:
    """Whether a run or trial of a comparison, or of one of its tasks, has computed something or failed."""
    traces = ("metrics.jsonl", "result.json", "failure.json", "checkpoints/*")
    return any(any(workdir.rglob(trace)) for trace in traces)


def _may_change(key: str, before: Mapping[str, Any]) -> bool:
    section, _, rest = key.partition(".")
    if section == "tasks" and rest.partition(".")[2].startswith("variants."):  # of one task
        section, rest = "variants", rest.partition(".")[2].removeprefix("variants.")
    new = section == "variants" and rest.partition(".")[0] not in results.mapping(before["variants"])
    if new or section in ("report", "baseline", "seeds"):
        return True
    return any(f".{rest}.".startswith(f".train.{name}.") for name in folders.MAY_CHANGE)


def write_report(workdir: Path, config: ConfigDict, runs: Sequence[Planned]) -> report.Report:
    """Measures the attention of each variant, unless that is done, and writes the report.

    Where tasks are alike in all that attention depends on, it is measured and drawn for the first of them only.
    """
    measured: dict[str, report.Measured] = {}
    seen: list[tuple[attention_costs.Plan, int]] = []
    try:
        for task, part in comparison_parts(config).items():
            chosen = comparison_runs(part, results.tuned(workdir / task))
            experiments = {variant: build(run) for variant, seed, run in chosen if seed == part.seeds[0]}
            plan, base = costs_of(part, experiments, results.load(workdir / task)), build(part.base)
            length = min(base.task.length, base.num_positions)  # without a CLS vector
            own = measured[task] = report.Measured(reaches=reaches(experiments), sections=part.report.sections)
            if (plan, length) in seen:
                continue
            seen.append((plan, length))
            side = min(length, PATTERN_LENGTH)
            measured[task] = dataclasses.replace(
                own,
                cost_rows=attention_costs.cached(workdir / task / "costs.json", plan, cli.say),
                cost_note=plan.note,
                variant_patterns={name: pictures.pattern(op, side, plan.num_heads) for name, op in plan.ops.items()},
            )
        if list(measured) != [""]:
            return report.write_tasks(workdir, config.name, measured)
        only = measured[""]
        return report.write(workdir, **{field.name: getattr(only, field.name) for field in dataclasses.fields(only)})
    except KeyboardInterrupt as error:
        raise interrupted(runs, "the report is not written") from error


def costs_of(
    config: ConfigDict, experiments: Mapping[str, Experiment], comparison: results.Comparison
) -> attention_costs.Plan:
    """Which costs of its variants the report of a comparison shows."""
    model, options = config.base.model, config.report
    found = {variant: experiments[variant].attention for variant in comparison.variants}
    ops = {variant: op for variant, op in found.items() if op is not None}
    num_heads = model.get("num_heads", 1)
    return attention_costs.Plan(
        ops=ops,
        reference=comparison.reference if comparison.reference in ops else next(iter(ops), ""),
        num_heads=num_heads,
        head_dim=model.get("head_dim") or model.width // num_heads,
        num_kv_heads=model.get("num_kv_heads"),
        dtype=config.base.train.dtype,
        lengths=tuple(options.cost_lengths),
        measure_up_to=options.measure_up_to,
        seconds=options.measure_seconds,
    )


def reaches(experiments: Mapping[str, Experiment]) -> dict[str, int]:
    """How many tokens each variant sees from a CLS vector through all its layers; those that see all are left out."""
    found = {}
    for variant, experiment in experiments.items():
        model, positions = experiment.config.model, experiment.num_positions
        if model.get("pooling") != "cls" or experiment.attention is None:
            continue
        reach = pictures.reach(experiment.attention, positions, model.num_layers, model.num_heads)
        if reach is not None and reach < positions - 1:
            found[variant] = reach
    return found
