"""Train every variant of a comparison with every seed, and write the report.

  python -m experiments.compare --config=configs/compare_listops.py --workdir=runs/b [--config.base.train.num_steps=200]

A comparison config has `name`, `base` (an experiment), `variants` (name -> what it changes of the base, as a rule only
`attention`), `seeds` and `report`. The same command again skips the runs that are finished and resumes the others; it
ends with the table, and `report.html`, `report.md` and `results.jsonl` lie in the workdir.
Exit codes: 0 finished; 2 wrong config or arguments, nothing computed; 75 interrupted and resumable; 1 some run failed,
all others are done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import statistics
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from xformer import attention, extras, report
from xformer import config as configs
from xformer import experiment as experiments
from xformer.bench import attention_costs
from xformer.commands import cli, hosts, inspect, pictures
from xformer.report import results, summary
from xformer.report.formatting import listed
from xformer.tasks import DataMissing
from xformer.train import DataChanged, Interrupted, ProcessLost, WorkdirMismatch, data_record
from xformer.train import workdir as folders
from xformer.train.checkpoint import barrier
from xformer.train.progress import clock
from xformer.train.step import num_params

PATTERN_LENGTH = 1024  # tokens on a side of the patterns that are drawn, at most
GO_ON = "the same command goes on from there"


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run that a comparison asks for."""

    variant: str
    seed: int
    config: ConfigDict
    folder: Path

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def result(self) -> dict | None:
        """What the finished run found; None where it is not finished or its `result.json` is damaged."""
        return results.read_result(self.folder)


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--config", required=True, help="path.py[:argument]; --config.key=value overrides a key")
    parser.add_argument("--workdir", required=True, help="folder of the comparison, made if it is not there")
    parser.add_argument("--data_dir", help="folder of prepared data (default: $XFORMER_DATA or ~/.cache/xformer)")
    parser.add_argument("--report_only", action="store_true", help="train nothing, report on the runs that are there")
    hosts.add_flags(parser)
    args, overrides = parser.parse(argv)
    workdir = parser.folder("--workdir", args.workdir)
    if args.data_dir is not None:
        parser.folder("--data_dir", args.data_dir)
    if args.report_only and not (workdir / "config.json").is_file():
        raise configs.ConfigError(f"--workdir: {workdir} holds no comparison to report on (no config.json)")
    extras.check("report")  # now, not when everything is trained
    hosts.start(args)
    config = configs.load_comparison(args.config, overrides)
    runs = plan(config, workdir)
    main = hosts.is_main()
    with folders.lock(workdir) if main else contextlib.nullcontext():
        if main:
            claim(workdir, config)
        barrier("comparison claimed")
        failed: list[Planned] = []
        stopped: list[Planned] = []
        if not args.report_only:
            fingerprints = prepare(runs, args.data_dir)
            failed, stopped = train(runs, args.data_dir, fingerprints)
        if main:
            written = write_report(workdir, config, runs)
            print(written.table)
            for warning in written.warnings:
                print(f"! {warning}")
            print(f"report: {written.html}", flush=True)
    if failed:
        raise cli.CommandFailed(f"{len(failed)} of {len(runs)} runs failed: {listed([str(run) for run in failed])}; "
                                "the same command tries them again")  # fmt: skip
    if stopped:
        raise Interrupted(f"{len(stopped)} of {len(runs)} runs stopped at stop_at_step, saved; "
                          "the same command with a later stop_at_step, or None, goes on from there", 0)  # fmt: skip


def plan(config: ConfigDict, workdir: Path) -> list[Planned]:
    """Every run, the seeds one after the other, so that a comparison cut short has all variants."""
    runs = [
        Planned(variant, seed, run, results.run_folder(workdir, variant, seed))
        for variant, seed, run in configs.comparison_runs(config)
    ]
    order = {seed: index for index, seed in enumerate(config.seeds)}
    return sorted(runs, key=lambda run: order[run.seed])


def claim(workdir: Path, config: ConfigDict) -> None:
    """Writes `config.json`, or checks the one that is there: what was computed must not change, the report may.

    Raises:
      WorkdirMismatch: the workdir holds another comparison; the message shows the difference.
    """
    path = workdir / "config.json"
    given = json.loads(json.dumps(experiments.as_json(config)))
    if path.exists():
        before = results.read_json(path)
        if before is None:
            raise WorkdirMismatch(f"{path} is empty or damaged; put it back as it was, or choose another workdir")
        if "variants" not in before:
            raise WorkdirMismatch(f"{workdir} holds no comparison, perhaps a run; choose another workdir")
        there, now = dict(summary.flatten(before)), dict(summary.flatten(given))
        missing = "nothing"
        changes = [
            f"{key}: {there.get(key, missing)} there, {now.get(key, missing)} now"
            for key in dict.fromkeys([*there, *now])
            if there.get(key, missing) != now.get(key, missing) and not _may_change(key)
        ]
        if changes:
            raise WorkdirMismatch(f"{workdir} holds another comparison: {'; '.join(changes)}; choose another workdir")
    folders.write_json(path, given)


def _may_change(key: str) -> bool:
    section, _, rest = key.partition(".")
    return section == "report" or any(f".{rest}.".startswith(f".train.{name}.") for name in folders.MAY_CHANGE)


def prepare(runs: Sequence[Planned], data_dir: str | None) -> dict[str, Mapping[str, Any]]:
    """Makes the data, checks it against that of the runs that are there, and compares the variants' parameters.

    Returns:
      The data's fingerprint by task; it has to stay that until the last run has ended.

    Raises:
      DataMissing, ConfigError: the data that a run needs can't be made here.
      DataChanged: runs that are there were trained on other data.
    """
    first_runs = {run.variant: run for run in reversed(runs)}
    built = {variant: experiments.build(first_runs[variant].config) for variant in (run.variant for run in runs)}
    finished = all(run.result is not None for run in runs)
    fingerprints: dict[str, Mapping[str, Any]] = {}
    for variant, experiment in built.items():
        task = experiment.task
        if repr(task) not in fingerprints:
            try:
                task.prepare(data_dir, progress=None if finished else cli.say)
            except ValueError as error:  # the user's own files are at fault
                raise configs.ConfigError(f"base.task: {error}") from error
            except DataMissing as error:
                if not finished:
                    raise
                cli.say(f"warning: not checked whether the data has changed: {error}")
                return {}
            fingerprints[repr(task)] = task.open(data_dir).fingerprint
        for run in runs:
            if run.variant == variant:
                data_record.check(run.folder, fingerprints[repr(task)])
    if finished:
        return fingerprints
    sizes: dict[str, int] = {}
    for variant, experiment in built.items():
        data, source = inspect.data_sizes(experiment, data_dir)
        make = experiment.model_fn(**data)
        sizes[variant] = num_params(nnx.state(nnx.eval_shape(lambda make=make: make(nnx.Rngs(0))), nnx.Param))
    base, *_ = sizes
    for variant, size in sizes.items():
        if abs(size / sizes[base] - 1) > summary.MAX_PARAM_DIFFERENCE:
            share = f"{size / sizes[base] - 1:+.0%} (sizes {source})"
            cli.say(f"warning: {variant} has {size:,} parameters, {base} {sizes[base]:,}: {share}")
    return fingerprints


def train(
    runs: Sequence[Planned], data_dir: str | None, fingerprints: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Planned], list[Planned]]:
    """Trains what is not finished; the runs that failed and those that stopped at `stop_at_step`.

    Raises:
      Interrupted: a signal came; the message says what is done.
      DataChanged: the data changed between two runs.
    """
    failed: list[Planned] = []
    stopped: list[Planned] = []
    seconds: dict[str, list[float]] = {}
    todo = [run for run in runs if run.result is None]
    if len(todo) < len(runs):
        cli.say(f"{len(runs) - len(todo)} of {len(runs)} runs are finished already")
    for number, run in enumerate(todo):
        left = time_left(runs, todo[number:], seconds)
        cli.say(
            f"run {len(runs) - len(todo) + number + 1} of {len(runs)}: {run}" + (f", about {left} left" if left else "")
        )
        began = time.perf_counter()
        try:
            train_one(run, data_dir, fingerprints)
            seconds.setdefault(run.variant, []).append(time.perf_counter() - began)
        except Interrupted as error:
            stop = run.config.train.stop_at_step
            if stop is None or error.step < stop:
                raise _interrupted(runs, f"{run} is saved at step {error.step}") from error
            stopped.append(run)
        except KeyboardInterrupt as error:
            raise _interrupted(runs, f"{run} was starting or ending") from error
        except (ProcessLost, DataChanged):
            raise
        except Exception as error:  # one run's failure must not cost the others
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if not isinstance(error, (*cli.FORESEEN, ValueError)):
                traceback.print_exc()
            cli.say(f"failed: {run}: {line}")
            if hosts.is_main():
                run.folder.mkdir(parents=True, exist_ok=True)
                folders.write_json(run.folder / "failure.json", {"error": line})
            failed.append(run)
    return failed, stopped


def train_one(run: Planned, data_dir: str | None, fingerprints: Mapping[str, Mapping[str, Any]]) -> None:
    """Trains one run to its end; what it leaves in memory is freed. A damaged `result.json` is made again."""
    if hosts.is_main():
        (run.folder / "failure.json").unlink(missing_ok=True)
        if run.result is None and (damaged := run.folder / "result.json").exists():
            cli.say(f"{damaged} is damaged: it is made again from the run's last checkpoint")
            damaged.unlink()
    try:
        trainer = experiments.build(run.config).trainer(run.folder, data_dir, progress=cli.say)
        if changes := data_record.differences(fingerprints[repr(trainer.task)], trainer.data.fingerprint):
            raise DataChanged(f"{run}: the data changed since the comparison began: {', '.join(changes)}")
        trainer.fit()
    finally:
        jax.clear_caches()
        gc.collect()


def _interrupted(runs: Sequence[Planned], where: str) -> Interrupted:
    done = sum(run.result is not None for run in runs)
    return Interrupted(f"{done} of {len(runs)} runs are finished, {where}; {GO_ON}", 0)


def time_left(runs: Sequence[Planned], todo: Sequence[Planned], seconds: Mapping[str, Sequence[float]]) -> str:
    """`h:mm:ss` that `todo` will take; nothing where there is nothing to judge by.

    A variant takes what its runs took in this session (`seconds`, compilation included), else what its finished runs
    spent on training, else the mean of the variants that are known.
    """
    known = {variant: list(times) for variant, times in seconds.items()}
    for run in runs:
        if run.variant not in seconds and (spent := results.number(run.result, "train_seconds")) > 0:
            known.setdefault(run.variant, []).append(spent)
    if not known:
        return ""
    means = {variant: statistics.fmean(times) for variant, times in known.items()}
    return clock(sum(means.get(run.variant, statistics.fmean(means.values())) for run in todo))


def write_report(workdir: Path, config: ConfigDict, runs: Sequence[Planned]) -> report.Report:
    """Measures the attention of each variant, unless that is done, and writes the report."""
    ops = {run.variant: attention.build(experiments.as_json(run.config.attention)) for run in runs}
    model, options = config.base.model, config.report
    num_heads = model.num_heads
    comparison = results.load(workdir)
    plan = attention_costs.Plan(
        ops={variant: ops[variant] for variant in comparison.variants},
        reference=comparison.reference,
        num_heads=num_heads,
        head_dim=model.get("head_dim") or model.width // num_heads,
        num_kv_heads=model.get("num_kv_heads"),
        dtype=config.base.train.dtype,
        lengths=tuple(options.cost_lengths),
        measure_up_to=options.measure_up_to,
        seconds=options.measure_seconds,
    )
    length = min(experiments.build(config.base).task.length, PATTERN_LENGTH)
    try:
        rows = attention_costs.cached(workdir / "costs.json", plan, cli.say)
        return report.write(
            workdir,
            cost_rows=rows,
            cost_note=plan.note,
            variant_patterns={name: pictures.pattern(op, length, num_heads) for name, op in plan.ops.items()},
        )
    except KeyboardInterrupt as error:
        raise _interrupted(runs, "the report is not written") from error
