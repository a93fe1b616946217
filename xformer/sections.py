"""The sections of an experiment's config: the constructor that reads each, its keys checked and completed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from xformer import attention, config_errors, lookup, parts, schema, tasks
from xformer.arguments import positional
from xformer.attention.registry import STACK
from xformer.attention_sections import (
    ATTENTION_ELSEWHERE,
    NO_ATTENTION,
    all_ops,
    attention_sections,
    check_attention,
    ops,
    slots,
)
from xformer.models import MODELS
from xformer.schema import ConfigError, Parameter, Text
from xformer.train import TrainConfig, optimizers

SECTIONS = ("attention", "model", "task", "optimizer", "train")
MODEL_ELSEWHERE = ("attention", "dtype", "param_dtype", "rngs", "name")  # and the sizes that the data gives
CONSTRUCTORS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "optimizer": (optimizers.build, ("num_steps", "blocks")),
    "train": (TrainConfig, ()),
}
# The keys of the optimizer section that an optimizer from outside leaves to us.
OPTIMIZER_SHARED = (
    "name",
    "learning_rate",
    "schedule",
    "warmup_steps",
    "end_factor",
    "clip_norm",
    "layer_decay",
    "freeze",
)
MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # `*arguments` and `**keywords`
# What the model is given and other keys decide, by the name that its messages use.
MODEL_GIVEN = {
    "attention": "attention",
    "max_len": "task.max_len",
    "dtype": "train.dtype",
    "head_dim": "model.num_heads",
    "q_len": "task.max_len",
    "kv_len": "task.max_len",
}


def check_keys(config: Mapping | ConfigDict) -> dict[str, Any]:
    """Checks the name, type and choices of every key, section by section, and fills in the defaults.

    The attention section is left without what it does not set: that depends on the length of the inputs. So is the
    model section: the sizes that the task gives are no keys of it.
    """
    given = schema.as_mapping("config", config)
    if "variants" in given:
        raise ConfigError("--config: this is a comparison; run it with xformer compare")
    sections = {name: Parameter(Any) for name in SECTIONS}
    takes = {"name": Parameter(str), "seed": Parameter(int, 0), **sections}
    checked = schema.check_keys("", given, takes, "an experiment")
    schema.check_name("name", checked["name"])
    if not 0 <= checked["seed"] < 2**32:
        raise ConfigError(f"seed: got {checked['seed']}, takes an integer from 0 to 2**32 - 1")
    checked["model"] = _check_model(checked["model"])
    checked["attention"] = check_attention(checked["attention"], checked["model"]["name"])
    checked["task"] = check_task("task", checked["task"])
    for section in CONSTRUCTORS:
        keys = schema.as_mapping(section, checked[section])
        takes = takes_of(section, keys)
        checked[section] = schema.check_keys(section, keys, takes, f"the {section} section")
    checked["train"] = parts.check(checked["train"])
    return checked


def check_task(path: str, section: Any) -> dict[str, Any]:
    """A task's section; an option that is a task itself, such as the `source` of `masked_lm`, is a section like it."""
    given = schema.as_mapping(path, section)
    name = given.get("name")
    chosen = None if name is None else tasks.TASKS[schema.check_choice(f"{path}.name", name, tasks.TASKS)]
    inner = {}
    for key in _task_options(chosen):
        if key not in given:
            raise ConfigError(f"{path}.{key}: missing; takes the section of a task")
        inner[key] = check_task(f"{path}.{key}", given.pop(key))
    checked = schema.check_named(path, given, tasks.TASKS, exclude=tuple(inner))
    return checked | inner


def _task_options(task: Any) -> list[str]:
    """The options of a task that are tasks themselves."""
    takes = {} if task is None else schema.parameters(task)
    return [key for key, parameter in takes.items() if parameter.annotation is tasks.Task]


def task_sections(section: Mapping[str, Any], path: str = "task") -> dict[str, Mapping[str, Any]]:
    """A task's section and those of the tasks in it, by dotted path."""
    found = {path: section}
    for key in _task_options(tasks.TASKS[section["name"]]):
        found |= task_sections(section[key], f"{path}.{key}")
    return found


def takes_of(section: str, keys: Mapping[str, Any]) -> dict[str, Parameter]:
    """The keys that a section of `CONSTRUCTORS` takes; with an optimizer from outside, the arguments of that too."""
    constructor, elsewhere = CONSTRUCTORS[section]
    takes = schema.parameters(constructor, exclude=elsewhere)
    if section != "optimizer" or "name" not in keys:
        return takes
    name = schema.check_choice("optimizer.name", keys["name"], optimizers.OPTIMIZERS)
    if not lookup.is_dotted(name):
        return takes
    shared = {key: takes[key] for key in OPTIMIZER_SHARED}
    own = list(schema.named_parameters("optimizer.name", name, optimizers.OPTIMIZERS).items())
    if not own:
        raise ConfigError(f"optimizer.name: {name} takes no argument, but is given the learning rate's schedule")
    if clash := [key for key, _ in own[1:] if key in shared]:
        raise ConfigError(
            f"optimizer.name: {name} takes {', '.join(clash)}, which the section decides for every optimizer"
        )
    return shared | dict(own[1:])


def _check_model(section: Any) -> dict[str, Any]:
    """The model's section, its slots checked as `attention` is; a slot that is left out is Full."""
    given = {"name": "classifier", **schema.as_mapping("model", section)}
    name = given["name"].literal() if isinstance(given["name"], Text) else given["name"]
    inner = slots(schema.check_choice("model.name", name, MODELS))
    own = {slot: given.pop(slot, None) for slot in inner}
    own = {slot: x.literal() if isinstance(x, Text) else x for slot, x in own.items()}
    checked = schema.check_named("model", given, MODELS, exclude=(*MODEL_ELSEWHERE, *inner), fill=False)
    default = {"name": "full"}
    return checked | {slot: check_attention(x or default, name, f"model.{slot}") for slot, x in own.items()}


def build_attention(
    config: Mapping[str, Any], num_positions: int, path: str = "attention"
) -> tuple[attention.Attention | None, dict[str, Any]]:
    """The op of a slot for so many positions, and its section with every argument that was chosen for them.

    None for a model without attention.
    """
    section = attention_sections(config)[path]
    if section["name"] == NO_ATTENTION:
        return None, dict(section)
    built = {
        own: construct(own, config, functools.partial(attention.build, op, num_positions), keys=op)
        for own, op in ops(section, path).items()
    }
    complete = {own: _complete(op, built[own]) for own, op in ops(section, path).items()}
    if section["name"] != STACK:
        return built[path], complete[path]
    return attention.Layers(tuple(built.values())), {"name": STACK, STACK: tuple(complete.values())}


def build_slots(
    config: Mapping[str, Any], sizes: Mapping[str, Any]
) -> tuple[dict[str, attention.Attention | None], dict[str, Any]]:
    """The ops of the model's own slots and their sections, as `build_attention` gives those of `attention`.

    sizes: those of the task; one that it leaves to the model is the model's, or `max_len`.
    """
    named = slots(config["model"]["name"])
    length = lambda size: sizes.get(size) or config["model"].get(size) or sizes["max_len"]
    found = {slot: build_attention(config, length(size), f"model.{slot}") for slot, size in named.items()}
    return {slot: op for slot, (op, _) in found.items()}, {slot: section for slot, (_, section) in found.items()}


def _complete(section: Mapping[str, Any], op: attention.Attention) -> dict[str, Any]:
    def arguments(value: Any, exclude: Sequence[str] = ()) -> dict[str, Any]:
        takes = schema.parameters(type(value), (*exclude, "name"))
        chosen = {key: getattr(value, key) for key in takes}
        chosen = {key: x for key, x in chosen.items() if x is not takes[key].default or schema.storable(x)}
        return schema.check_keys("attention", chosen, takes, type(value).__name__)

    term = getattr(op, "position", None)
    position = {"name": section["position"]["name"], **(arguments(term) if term is not None else {})}
    return {"name": section["name"], "position": position, **arguments(op, ("position", *ATTENTION_ELSEWHERE))}


def complete_model(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The model section with every key but the sizes, which the data gives.

    Raises:
      ConfigError: a key that the data decides, or one that is missing in the section or among the sizes.
    """
    given = dict(config["model"])
    name = given.pop("name")
    inner = {slot: given.pop(slot) for slot in slots(name)}
    takes = schema.parameters(MODELS[name], exclude=(*MODEL_ELSEWHERE, *inner))
    for key in given.keys() & sizes.keys():
        raise ConfigError(f"model.{key}: got {schema.show(given[key])}, but the data of the task decides it")
    keys = {key: parameter for key, parameter in takes.items() if key not in sizes}
    missing = [key for key, parameter in keys.items() if parameter.default is schema.REQUIRED and key not in given]
    check_sizes(config, [key for key in positional(MODELS[name]) if key in missing], sizes)
    return {"name": name, **schema.check_keys("model", given, keys, f"model {name!r}"), **inner}


def check_sizes(config: Mapping[str, Any], needed: Sequence[str], sizes: Mapping[str, Any]) -> None:
    """Raises ConfigError where the data gives no such size."""
    for key in needed:
        if key not in sizes:
            raise ConfigError(
                f"model.name: {config['model']['name']} needs {key}, task {config['task']['name']} gives "
                f"{', '.join(sizes)}"
            )


def check_call(config: Mapping[str, Any], inputs: Collection[str]) -> None:
    """Raises ConfigError unless the model is called with what the task gives, arguments of these names."""
    name, task = config["model"]["name"], config["task"]["name"]
    _, *takes = inspect.signature(MODELS[name].__call__).parameters.values()  # self comes first
    for parameter in takes:
        needed = parameter.default is parameter.empty and parameter.kind not in MANY
        if needed and parameter.name not in inputs:
            raise ConfigError(f"model.name: {name} reads {parameter.name}, task {task} gives {', '.join(inputs)}")
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        return
    for key in inputs:
        if key not in [parameter.name for parameter in takes]:
            raise ConfigError(f"model.name: {name} does not read {key}, which task {task} gives")


def owners(config: Mapping[str, Any]) -> dict[Any, str]:
    """The classes that a config names, and the section of each."""
    named: dict[Any, str] = {}
    for path, op in all_ops(config).items():
        named.setdefault(attention.ATTENTIONS[op["name"]], path)
        named.setdefault(attention.POSITIONS[op["position"]["name"]], f"{path}.position")
    named |= {
        **{tasks.TASKS[task["name"]]: path for path, task in task_sections(config["task"]).items()},
        MODELS[config["model"]["name"]]: "model",
        TrainConfig: "train",
    }
    return {cls: section for cls, section in named.items() if cls is not None}


def construct(
    section: str, config: Mapping[str, Any], make: Callable[[], Any], *, keys: Mapping[str, Any] | None = None
) -> Any:
    """`make()`, where what it refuses is a wrong config: its own section first, and for the model the others too.

    `keys` are those of `section`, where it is a part of one.
    """
    known: dict[str, Any] = {section: config[section] if keys is None else keys}
    if section == "model" or section.startswith(("attention", "model.")):
        for path, op in all_ops(config).items():
            if section in ("model", path):
                known |= {path: op, f"{path}.position": op["position"]}
    if section == "task":
        known |= task_sections(config["task"])
    if section == "model":
        known |= {other: config[other] for other in ("task", "train")}
    names = {cls.__name__: own for cls, own in owners(config).items()}
    make = parts.guarded(known, make)
    own = [key for key, value in config["model"].items() if value is not None]
    elsewhere = {key: path for key, path in MODEL_GIVEN.items() if section == "model" and key not in own}
    return config_errors.construct(section, make, keys=known, owners=names, elsewhere=elsewhere)
