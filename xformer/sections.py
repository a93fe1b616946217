"""The sections of an experiment's config: the constructor that reads each, its keys checked and completed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from xformer import attention, config_errors, lookup, schema, tasks
from xformer.models import EncoderClassifier
from xformer.schema import ConfigError, Parameter
from xformer.train import CALLBACKS, Callback, TrainConfig, callbacks, optimizers

SECTIONS = ("attention", "model", "task", "optimizer", "train")
ATTENTION_ELSEWHERE = ("layer",)  # the model counts its layers
CONSTRUCTORS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "model": (
        EncoderClassifier,
        ("vocab_size", "num_classes", "max_len", "attention", "dtype", "param_dtype", "rngs"),
    ),
    "optimizer": (optimizers.build, ("num_steps",)),
    "train": (TrainConfig, ()),
}
# The keys of the optimizer section that an optimizer from outside leaves to us.
OPTIMIZER_SHARED = ("name", "learning_rate", "schedule", "warmup_steps", "end_factor", "clip_norm")
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

    The attention section is left without what it does not set: that depends on the length of the inputs.
    """
    given = config.to_dict() if isinstance(config, ConfigDict) else schema.as_mapping("config", config)
    if "variants" in given:
        raise ConfigError("--config: this is a comparison; run it with xformer compare")
    sections = {name: Parameter(Any) for name in SECTIONS}
    takes = {"name": Parameter(str), "seed": Parameter(int, 0), **sections}
    checked = schema.check_keys("", given, takes, "an experiment")
    schema.check_name("name", checked["name"])
    if not 0 <= checked["seed"] < 2**32:
        raise ConfigError(f"seed: got {checked['seed']}, takes an integer from 0 to 2**32 - 1")
    positions = {"position": attention.POSITIONS}
    checked["attention"] = schema.check_named(
        "attention",
        checked["attention"],
        attention.ATTENTIONS,
        exclude=ATTENTION_ELSEWHERE,
        nested=positions,
        fill=False,
    )
    checked["task"] = schema.check_named("task", checked["task"], tasks.TASKS)
    for section in CONSTRUCTORS:
        keys = schema.as_mapping(section, checked[section])
        takes = takes_of(section, keys)
        checked[section] = schema.check_keys(section, keys, takes, f"the {section} section")
    checked["train"]["callbacks"] = tuple(
        schema.check_named(f"train.callbacks[{i}]", {"name": entry} if isinstance(entry, str) else entry, CALLBACKS)
        for i, entry in enumerate(checked["train"]["callbacks"])
    )
    return checked


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


def complete(section: Mapping[str, Any], op: attention.Attention) -> dict[str, Any]:
    """The attention section with every argument of the op and its position, as they were chosen for the length."""

    def arguments(value: Any, exclude: Sequence[str] = ()) -> dict[str, Any]:
        takes = schema.parameters(type(value), exclude)
        chosen = {key: getattr(value, key) for key in takes}
        chosen = {key: x for key, x in chosen.items() if x is not takes[key].default or schema.storable(x)}
        return schema.check_keys("attention", chosen, takes, type(value).__name__)

    term = getattr(op, "position", None)
    position = {"name": section["position"]["name"], **(arguments(term) if term is not None else {})}
    return {"name": section["name"], "position": position, **arguments(op, ("position", *ATTENTION_ELSEWHERE))}


def owners(config: Mapping[str, Any]) -> dict[Any, str]:
    """The classes that a config names, and the section of each."""
    op = config["attention"]
    named = {
        attention.ATTENTIONS[op["name"]]: "attention",
        attention.POSITIONS[op["position"]["name"]]: "attention.position",
        tasks.TASKS[config["task"]["name"]]: "task",
        EncoderClassifier: "model",
        TrainConfig: "train",
    }
    return {cls: section for cls, section in named.items() if cls is not None}


def construct(section: str, config: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """`make()`, where what it refuses is a wrong config: its own section first, and for the model the others too."""
    name = config[section].get("name")
    if lookup.is_dotted(name):
        make = functools.partial(_from_outside, f"{section}.name: {name}", make)
    keys = {section: config[section]}
    if section == "attention" or section == "model":
        keys |= {"attention": config["attention"], "attention.position": config["attention"]["position"]}
    if section == "model":
        keys |= {other: config[other] for other in ("task", "train")}
    names = {cls.__name__: own for cls, own in owners(config).items()}
    elsewhere = MODEL_GIVEN if section == "model" else {}
    return config_errors.construct(section, make, keys=keys, owners=names, elsewhere=elsewhere)


def make_callbacks(config: Mapping[str, Any]) -> tuple[tuple[str, Callback], ...]:
    """Fresh callbacks of a checked config, each with the name that messages give it."""
    made = []
    for i, entry in enumerate(config["train"]["callbacks"]):
        path, name = f"train.callbacks[{i}]", entry["name"]
        make = functools.partial(callbacks.build, entry)
        if lookup.is_dotted(name):
            make = functools.partial(_from_outside, f"{path}.name: {name}", make)
        owners = {CALLBACKS[name].__name__: path}
        made.append((name, config_errors.construct(path, make, keys={path: entry}, owners=owners)))
    return tuple(made)


def _from_outside(what: str, make: Callable[[], Any]) -> Any:
    """`make()`; what code from outside raises, and our own would not, is a wrong config too."""
    try:
        return make()
    except (ValueError, NotImplementedError, OverflowError, MemoryError):
        raise  # as our own classes raise them
    except Exception as error:
        raise ConfigError(f"{what} raised {lookup.blame(error)}") from error
