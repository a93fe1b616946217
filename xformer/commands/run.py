"""Train and evaluate one experiment.

  xformer run --config=listops:bigbird --workdir=runs/a [--config.train.num_steps=200]

The same command again goes on from the last checkpoint. `--config=runs/a/config.json` repeats a run exactly. On many
hosts, start it on each; under SLURM and Open MPI the processes find each other, elsewhere name them with --coordinator,
--num_processes and --process_id.
Exit codes: 0 finished; 2 wrong config or arguments, nothing computed; 75 interrupted and resumable; 1 anything else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from xformer.commands import cli, hosts
from xformer.config import load_experiment
from xformer.config_help import experiment_help
from xformer.experiment import as_json, complete, recommend_half
from xformer.schema import ConfigError
from xformer.train import workdir as folders


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--config", help="path.py[:argument] or a run's config.json; --config.key=value overrides a key"
    )
    parser.add_argument("--workdir", help="folder of the run, made if it is not there")
    parser.add_argument("--data_dir", help="folder of prepared data (default: $XFORMER_DATA or ~/.cache/xformer)")
    parser.add_argument(
        "--eval_only",
        action="store_true",
        help="evaluate the best checkpoint of a finished run, as its own config.json says",
    )
    parser.add_argument(
        "--checkpoint",
        choices=("best", "last"),
        default="best",
        help="with --eval_only: the best checkpoint, or the newest intact one, whatever its step",
    )
    hosts.add_flags(parser)
    args, overrides = parser.parse(argv)
    workdir = parser.workdir(args)
    if args.data_dir is not None:
        parser.folder("--data_dir", args.data_dir)
    hosts.start(args)
    if args.eval_only and not (workdir / "result.json").is_file():
        raise ConfigError(f"--workdir: {workdir} holds no finished run to evaluate (no result.json)")
    if args.eval_only and not (workdir / "config.json").is_file():
        raise ConfigError(f"--workdir: {workdir} holds a run whose config.json is missing")
    if args.checkpoint != "best" and not args.eval_only:
        raise ConfigError("--checkpoint: goes with --eval_only; training goes on from the newest intact checkpoint")
    spec = str(workdir / "config.json") if args.eval_only else args.config
    if spec is None:
        raise ConfigError("--config: missing; takes path.py, path.py:argument or a run's config.json")
    if args.eval_only and args.config:
        cli.say(f"--config is not read: --eval_only evaluates the run of {spec}")
    experiment = load_experiment(spec, overrides)
    if args.config_help:
        print(experiment_help(as_json(experiment.config)))
        return
    folders.check(workdir, as_json(experiment.config), complete)  # another run's is refused before data is made
    trainer = experiment.trainer(workdir, args.data_dir, progress=cli.say)
    if args.eval_only:
        splits = {"eval": "validation", "test": "test"}
        metrics = {name: trainer.evaluate(split, args.checkpoint) for name, split in splits.items()}
        if hosts.is_main():
            print(json.dumps(metrics))
        return
    recommend_half([experiment.config.train.dtype], cli.say)
    result = trainer.fit()
    cli.say(f"finished {result['name']}: test {json.dumps(result['test'])}, result in {workdir / 'result.json'}")
