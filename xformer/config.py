"""From a config file and command-line overrides to a config that is complete and checked."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from xformer import experiment, presets, schema, shipped
from xformer.experiment import Experiment
from xformer.schema import ConfigError, Text

__all__ = [
    "ConfigError",
    "build",
    "check",
    "load_config",
    "load_experiment",
    "override",
    "plain",
    "read",
    "read_plain",
]


def check(config: Mapping | ConfigDict) -> ConfigDict:
    """The config with every default filled in, after checking every key and combination, and that it fits the devices.

    Nothing is computed.

    Raises:
      ConfigError: one line that names the key, what it got and what it takes.
    """
    return build(config).config


def build(config: Mapping | ConfigDict) -> Experiment:
    """The experiment of a config, after checking that it fits the devices of this machine too; nothing is computed.

    Raises:
      ConfigError: one line that names the key, what it got and what it takes.
    """
    built = experiment.build(config)
    experiment.check_devices(built)
    return built


def load_config(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """The checked, complete config of what `load_experiment` gives."""
    return load_experiment(spec, overrides).config


def load_experiment(spec: str, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment of `path.py`, `path.py:arg` or a run's `config.json`, checked as `build` does.

    Args:
      spec: the file, with the argument for its `get_config(arg)` after a colon.
      overrides: `a.b=value` each, in order; values are parsed for the type of their key, `None` included.

    Raises:
      ConfigError: one line, for a wrong file, argument, override or config.
    """
    return build(override(read_plain(spec), overrides))


def read(spec: str) -> ConfigDict:
    """What the config file says, unchecked, to build another config from: `read("demo:full").train.num_steps`."""
    return experiment.as_config(read_plain(spec))


def read_plain(spec: str) -> dict[str, Any]:
    """What the config file says, as nested dicts, unchecked."""
    match = re.fullmatch(r"(?P<path>.*?\.(?P<kind>py|json))(?::(?P<arg>.*))?", shipped.locate(spec))
    if match is None:
        name, known = spec.partition(":")[0], shipped.names()
        raise ConfigError(
            f"--config: got {spec!r}, takes path/to/config.py, path/to/config.py:argument, a config.json, or a shipped "
            f"config: {', '.join(known)}{schema.nearest(name, known)}"
        )
    path, arg = Path(match["path"]), match["arg"]
    if not path.is_file():
        siblings = [str(file) for file in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        raise ConfigError(f"--config: no such file: {path}{schema.nearest(path, siblings)}")
    if match["kind"] == "py":
        return plain(_call_get_config(path, arg))
    if arg is not None:
        raise ConfigError(f"--config: {path} takes no argument, got {arg!r}")
    try:
        return schema.as_mapping(f"--config {path}", json.loads(path.read_text()))
    except (ValueError, OSError) as error:
        raise ConfigError(
            error if isinstance(error, ConfigError) else f"--config: {path} is no JSON: {error}"
        ) from None


def _call_get_config(path: Path, arg: str | None) -> Any:
    try:
        module = presets.load_module(path)
    except Exception as error:  # a config is a program: whatever it raises, it is the config that is wrong
        raise ConfigError(f"--config: {path} fails with {type(error).__name__}: {_line(error)}") from error
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(f"--config: {path} has no function get_config(arg)")
    takes_arg = bool(inspect.signature(get_config).parameters)
    if arg is not None and not takes_arg:
        raise ConfigError(f"--config: {path} takes no argument, got {arg!r}")
    try:
        return get_config(arg) if arg is not None else get_config()
    except Exception as error:
        given = "no argument" if arg is None else f"argument {arg!r}"
        raise ConfigError(f"--config: {path} with {given}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def plain(config: Any) -> Any:
    """ConfigDicts and field references as plain dicts and values, at any depth."""
    if isinstance(config, ConfigDict):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return type(config)(plain(value) for value in config)
    return config


def override(config: Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` with the overrides set: values by `a.b`, or `a.b=value`, text that `check` parses."""
    result = plain(config)
    given = list(overrides.items()) if isinstance(overrides, Mapping) else [_as_text(item) for item in overrides]
    for dotted, value in given:
        if not all(dotted.split(".")):
            raise ConfigError(f"--config.{schema.show(dotted)[1:-1]}: got an empty part, takes --config.key=value")
        *parents, last = dotted.split(".")
        section = result
        for depth, key in enumerate(parents):
            inner = section.get(key)
            if isinstance(inner, Text):
                inner = inner.literal()
            if inner is None:  # a section that the file left out, or a position of None
                inner = {}
            if not isinstance(inner, Mapping):
                path = ".".join(parents[: depth + 1])
                shown = value.value if isinstance(value, Text) else value
                raise ConfigError(
                    f"{dotted}: got {shown!r}, but {path} is the value {schema.show(inner)}, not a section"
                )
            section[key] = section = dict(inner)
        section[last] = value
    return result


def _as_text(item: str) -> tuple[str, Text]:
    dotted, equals, value = item.partition("=")
    if not equals:
        raise ConfigError(f"--config.{schema.show(dotted)[1:-1]}: got {schema.show(item)}, takes --config.key=value")
    return dotted, Text(value)
