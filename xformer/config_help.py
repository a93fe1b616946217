"""The keys of a config with their types, defaults, choices and values: what `--config.help` prints."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xformer import lookup, schema
from xformer.attention import ATTENTIONS, POSITIONS
from xformer.attention_sections import ATTENTION_ELSEWHERE, all_ops, slots
from xformer.models import MODELS
from xformer.schema import REQUIRED, Parameter
from xformer.sections import CONSTRUCTORS, takes_of, task_sections
from xformer.tasks import TASKS

BY_LENGTH = "chosen for the length of the inputs"
Row = tuple[str, str, str, str]


def experiment_help(config: Mapping[str, Any]) -> str:
    """A table of every key that an experiment takes, for the names that this complete config chooses.

    Its columns: the dotted key, its value here, its default, and what it takes.
    """
    model = config["model"]
    rows = [_row("name", config, Parameter(str)), _row("seed", config, Parameter(int, 0))]
    for path, op in all_ops(config).items():  # one, or those of a stack
        position = op["position"]
        rows += [
            _named(path, op, ATTENTIONS),
            *_rows(path, op, ATTENTIONS[op["name"]], ("position", *ATTENTION_ELSEWHERE), by_length=True),
            _named(f"{path}.position", position, POSITIONS),
            *_rows(f"{path}.position", position, POSITIONS[position["name"]], by_length=True),
        ]
    model_class = MODELS[model["name"]]
    # By the data or by other sections; slots have rows of their own.
    given = tuple(key for key in schema.parameters(model_class) if key not in model or key in slots(model["name"]))
    rows += [
        _named("model", model, MODELS),
        *_rows("model", model, model_class, given),
    ]
    rows += _task_rows(config["task"])
    for section in CONSTRUCTORS:
        rows += [(f"{section}.{row[0]}", *row[1:]) for row in _own_rows(section, config[section])]
    return _table(rows)


def task_help(section: Mapping[str, Any]) -> str:
    """The same for the keys of a complete `task` section alone."""
    return _table(_task_rows(section))


def _task_rows(section: Mapping[str, Any]) -> list[Row]:
    """The keys of a task, and of a task that is an option of it."""
    sections = task_sections(section)
    rows: list[Row] = []
    for path, task in sections.items():
        inner = tuple(other.rpartition(".")[2] for other in sections if other.rpartition(".")[0] == path)
        rows += [_named(path, task, TASKS), *_rows(path, task, TASKS[task["name"]], inner)]
    return rows


def comparison_help(
    config: Mapping[str, Any], takes: Mapping[str, Parameter], report: Callable, pretrain: Callable
) -> str:
    """The same for a comparison: its own keys, and those of its base, which its variants change.

    Args:
      takes: the keys of a comparison.
      report, pretrain: the constructors that read the sections of these names.
    """
    rows = [_row(key, config, takes[key]) for key in ("name", "seeds")]
    rows += [("variants", ", ".join(config["variants"]), "required", "a section for each, of what it changes in base")]
    rows += _rows("report", config["report"], report)
    if "pretrain" in config:
        rows += _rows("pretrain", config["pretrain"], pretrain)
    else:
        rows.append(("pretrain", "None", "None", f"a section of {', '.join(schema.parameters(pretrain))}"))
    rows += [
        ("tune", schema.show(config.get("tune")), "None", "values to try by key, such as tune.optimizer.learning_rate"),
        ("tune_seed", schema.show(config.get("tune_seed")), "None", "the seed of trials, none of seeds"),
        ("budget", schema.show(config.get("budget")), "None", "one of steps, train_flops, seconds, and how much of it"),
    ]
    return f"{_table(rows)}\n\nbase (the command line takes its sections without `base.` too):\n\n" + experiment_help(
        config["base"]
    )


def _rows(
    path: str,
    values: Mapping[str, Any],
    constructor: Callable | None,
    exclude: tuple[str, ...] = (),
    *,
    by_length: bool = False,
) -> Iterator[Row]:
    if constructor is None:  # no position
        return
    varies = _chosen_by_length(constructor) if by_length else set()
    for key, parameter in schema.parameters(constructor, exclude).items():
        name, value, default, takes = _row(key, values, parameter)
        yield f"{path}.{name}", value, BY_LENGTH if key in varies else default, takes


def _own_rows(section: str, values: Mapping[str, Any]) -> Iterator[Row]:
    return (_row(key, values, parameter) for key, parameter in takes_of(section, values).items())


def _chosen_by_length(cls: Any) -> set[str]:
    """The arguments that `for_length` chooses differently at two lengths."""
    short, long = cls.for_length(2**6), cls.for_length(2**12)
    keys = inspect.signature(cls).parameters
    return {key for key in keys if getattr(short, key) != getattr(long, key)}


def _row(key: str, values: Mapping[str, Any], parameter: Parameter) -> Row:
    default = "required" if parameter.default is REQUIRED else schema.show(parameter.default)
    return key, schema.show(values.get(key, parameter.default)), default, schema.describe(parameter.annotation)


def _named(path: str, section: Mapping[str, Any], table: Mapping[str, Any]) -> Row:
    default = "'none'" if "none" in table else "required"
    takes = f"one of {', '.join(map(repr, table))}, or {lookup.FORM!r}"
    return f"{path}.name", schema.show(section["name"]), default, takes


def _table(rows: list[Row]) -> str:
    rows = [("key", "value", "default", "takes"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
