"""What data there is, making it, and what it is like.

  xformer data --list                                      # sources, licences, sizes, what is ready, what makes it so
  xformer data --prepare needle --task.max_len=1023
  xformer data --describe documents --task.path=mine.jsonl --out=lengths.png

--list takes names of tasks, by default all, and also shows whatever is prepared in the data directory. --prepare and
--describe take the name of a task with --task.key=value, or --config (an experiment or a comparison) with
--config.key=value. --describe makes the data if it isn't there, as a run does; half-made data is never taken for ready.
Every file that was prepared is read, and what changed since is named.
Exit codes: 0 finished; 2 wrong arguments or files, nothing made; 75 interrupted, nothing half made is kept; 1 anything
else, such as data that is damaged or can't be made here.
"""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xformer import config_errors, parts, schema, tasks
from xformer.commands import cli, describe
from xformer.comparison import comparison_parts, comparison_runs, load_comparison
from xformer.config import override, read_plain
from xformer.config_help import task_help
from xformer.experiment import build
from xformer.report import formatting
from xformer.schema import ConfigError
from xformer.sections import check_task
from xformer.tasks import DataMissing, Task, readiness
from xformer.tasks.origin import Origin
from xformer.train import Interrupted

LENGTHS = (512, 1024, 4096)

Section = dict[str, Any]
"""The complete `task` section of a config."""


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--list", nargs="*", metavar="NAME", help="sources of these tasks, or of all")
    parser.add_argument("--prepare", nargs="?", const="", metavar="NAME", help="make the data of a task")
    parser.add_argument("--describe", nargs="?", const="", metavar="NAME", help="splits, lengths, labels, baselines, "
                        "near-duplicates and ten examples of a task's data")  # fmt: skip
    parser.add_argument("--config", help="path.py[:argument] or config.json of an experiment or a comparison")
    parser.add_argument("--data_dir", help="folder of prepared data (default: $XFORMER_DATA or ~/.cache/xformer)")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="with --describe: which share of the "
                        "texts is longer than each (default %(default)s)")  # fmt: skip
    parser.add_argument("--out", help="with --describe: a PNG file to draw the distribution of lengths in")
    # One spelling for both: `task.key` is what messages name.
    args, overrides = parser.parse([word.replace("--task.", "--config.task.", 1) if word.startswith("--task.") else word
                                    for word in argv])  # fmt: skip
    if args.data_dir is not None:
        parser.folder("--data_dir", args.data_dir)
    chosen = [flag for flag in ("list", "prepare", "describe") if getattr(args, flag) is not None]
    if len(chosen) != 1:
        given = " and ".join(f"--{flag}" for flag in chosen) or "none of them"
        raise ConfigError(f"takes one of --list, --prepare and --describe, got {given}")
    (action,) = chosen
    if action != "describe" and args.out is not None:
        raise ConfigError(f"--out: got {args.out!r}, but only --describe draws a picture")
    lengths = _lengths(args.lengths)
    out = parser.picture(args.out)
    if action == "list":
        if overrides or args.config is not None:
            raise ConfigError("--list: takes names of tasks; --config and --task.key=value go with the other two")
        for line in listing(args.list or list(tasks.TASKS), args.data_dir):
            print(line, flush=True)
        return
    for section, task in _tasks(f"--{action}", getattr(args, action), args.config, overrides):
        if args.config_help:
            print(task_help(section))
            continue
        folder = prepare(section, task, args.data_dir)
        if action == "describe":
            data = task.open(args.data_dir)
            cli.say(f"{section['name']}: scoring the baselines")
            print(describe.text(task, data, section["name"], folder, lengths), flush=True)
            if out is not None:
                print(describe.draw(data, out))


def prepare(section: Section, task: Task, data_dir: str | None) -> Path | None:
    """Makes the data unless it is there, and checks every file of it; the folder, None where none is known.

    Raises:
      ConfigError: the user's own files are at fault.
      DataMissing: the data can't be made here, or is damaged.
      Interrupted: by a signal.
    """
    name = section["name"]
    try:
        before = _construct(section, functools.partial(readiness.of, task, data_dir))
        if before.state in (readiness.DAMAGED, readiness.NO_SOURCE):
            raise DataMissing(before.why)
        found = before
        if before.state != readiness.READY:
            _construct(section, functools.partial(task.prepare, data_dir, progress=cli.say))
            found = _construct(section, functools.partial(readiness.of, task, data_dir))
    except KeyboardInterrupt as error:
        raise Interrupted(f"{name}: interrupted; nothing half made is kept, the same command makes it", 0) from error
    if found.state != readiness.READY:
        raise DataMissing(found.why or f"{name}: prepare() left no data in {found.folder}")
    folder: Path | None = found.folder
    where = "" if folder is None else f" in {folder}, {formatting.mebibytes(readiness.num_bytes(folder))}"
    cli.say(f"{name}: ready{where}")
    return folder


def listing(names: Sequence[str], data_dir: str | None) -> Iterator[str]:
    """The lines of `--list`."""
    for name in names:
        for source, origins in itertools.groupby(_find(name).origins(), key=lambda own: (own.source, own.licence)):
            yield "{}: {}; licence: {}".format(name, *source)
            for origin in origins:
                yield from _of_origin(name, origin, data_dir)
        yield ""
    root = tasks.data_root(data_dir)
    found = list(readiness.prepared(data_dir))
    yield f"{'Prepared' if found else 'Nothing is prepared'} in {root}" + (":" if found else "")
    for entry in found:
        size = formatting.mebibytes(entry.num_bytes)
        shown = entry.folder.relative_to(root).parent
        yield f"  {shown}  {size}  " + (entry.damage or f"ready  {entry.source}").rstrip()
    for left in readiness.leftovers(data_dir):
        yield f"  {left.relative_to(root)}  half made: a process is at it, or was killed; preparing it again removes it"


def _of_origin(name: str, origin: Origin, data_dir: str | None) -> Iterator[str]:
    state, why, size = readiness.NO_SOURCE, "", origin.size
    if origin.given:
        state = "for you to give"
    else:
        try:
            found = readiness.of(_find(name)(**origin.options), data_dir)
        except ValueError as error:  # a file of the source that can't be read
            found = readiness.Readiness(readiness.DAMAGED, str(error))
        state, why = found.state, found.why
        if state == readiness.READY and found.folder is not None:
            size += f", {formatting.mebibytes(readiness.num_bytes(found.folder))} on disk"
    chosen = ", ".join(f"{key}={value}" for key, value in origin.options.items())
    yield f"  {state}: {size}{chosen and f' ({chosen})'}"
    if state == readiness.DAMAGED:
        yield f"      {' '.join(why.split())}"
    elif state != readiness.READY:
        yield f"      {_command(name, origin, data_dir, fetch=state == readiness.NO_SOURCE)}"


def _command(name: str, origin: Origin, data_dir: str | None, *, fetch: bool) -> str:
    """What makes it ready, as a line for a shell."""
    root = shlex.quote(str(tasks.data_root(data_dir)))
    options = {**origin.options, **origin.given}
    words = ["xformer", "data", "--prepare", name, *(f"--task.{key}={value}" for key, value in options.items())]
    words += [] if data_dir is None else [f"--data_dir={data_dir}"]
    first = f"{origin.fetch.format(data_dir=root)} && " if fetch and origin.fetch else ""
    return first + shlex.join(words)


def _tasks(flag: str, name: str, config: str | None, overrides: Sequence[str]) -> list[tuple[Section, Task]]:
    """The task of a name, or those of a config, each once."""
    if config is None:
        if not name:
            raise ConfigError(f"{flag}: missing; takes the name of a task ({', '.join(tasks.TASKS)}), or --config")
        for item in overrides:
            if not item.startswith("task."):
                raise ConfigError(f"--config.{item}: goes with --config; the task {name} takes --task.key=value")
        given = override({"task": {"name": name}}, overrides)["task"]
        section = check_task("task", given)
        return [(section, _construct(section, lambda: tasks.build(section)))]
    raw = read_plain(config)
    if "variants" in raw:
        compared = comparison_parts(load_comparison(config, overrides)).values()
        sections = [run.task.to_dict() for part in compared for _, _, run in comparison_runs(part)]
    else:
        sections = [build(override(raw, overrides)).config.task.to_dict()]
    sections = [section for i, section in enumerate(sections) if section not in sections[:i]]
    if name and any(section["name"] != name for section in sections):
        others = ", ".join(dict.fromkeys(section["name"] for section in sections))
        raise ConfigError(f"{flag}: got {name!r}, but the task of --config={config} is {others}")
    return [(section, tasks.build(section)) for section in sections]


def _construct(section: Section, make: Any) -> Any:
    """`make()`, where what the task refuses is a wrong `task` section."""
    owners = {_find(section["name"]).__name__: "task"}
    guarded = parts.guarded({"task": section}, make)
    return config_errors.construct("task", guarded, keys={"task": section}, owners=owners)


def _find(name: str) -> type[Task]:
    return tasks.TASKS[schema.check_choice("--list", name, tasks.TASKS)]


def _lengths(given: str) -> tuple[int, ...]:
    words = [word.strip() for word in given.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--lengths: got {given!r}, takes integers from 1 with commas between")
    return tuple(sorted({int(word) for word in words}))
